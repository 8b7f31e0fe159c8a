"""The command line is a contract: a flag that changes its name breaks someone's CI."""

from __future__ import annotations

import argparse

import pytest

from qtool import cli

INPUTS = {
    *("--task", "--data", "--text", "--text-pair", "--label", "--limit", "--split", "--calibration"),
    *("--seq-len", "--threads", "--timeout", "--revision", "--device", "--batch-size", "--recipe", "--out"),
}
FLAGS = {
    "sweep": INPUTS
    | {"--models", "--metric", "--rounds", "--speedup-within", "--time-budget", "--policy", "--track"}
    | {"--no-score", "--resume", "--dry-run", "--executor", "--address", "--on", "--shared"},
    "pick": {"--max-drop", "--p95", "--p50", "--throughput", "--memory", "--disk", "--prefer"}
    | {"--objectives", "--cost", "--json"},
    "compare": {"--json"},
    "gate": {"--policy", "--reference", "--json"},
    "report": {"--format", "--recipe", "--serve", "--port", "--track", "--cost", "--sla"},
    "profile": INPUTS | {"--json"},
    "load": {"--arrival", "--sla", "--pattern", "--max-batch", "--max-wait", "--recipe", "--device", "--seed"}
    | {"--real", "--duration", "--json"},
    "fit": {"--device-memory", "--recipe", "--revision", "--json"},
    "export": set(),
    "recipes": {"--schema"},
    "tasks": set(),
    "doctor": {"--measure"},
}


def verbs() -> dict[str, argparse.ArgumentParser]:
    actions = cli.build_parser()._actions
    return dict(next(a for a in actions if isinstance(a, argparse._SubParsersAction)).choices)


def test_the_verbs_are_those_that_are_documented():
    assert set(verbs()) == set(FLAGS) == set(cli.VERBS)


@pytest.mark.parametrize("verb", FLAGS)
def test_the_flags_of_a_verb_are_frozen(verb):
    found = {flag for action in verbs()[verb]._actions for flag in action.option_strings}
    assert found - {"-h", "--help"} == FLAGS[verb]
