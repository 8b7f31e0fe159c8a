"""Run folders that were damaged or edited: every verb that reads them says so in one line, none crashes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qtool import cli
from qtool.core import QtoolError
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 100
BASE = [1 - label if i < 20 else label for i, label in enumerate(LABELS)]


@pytest.fixture
def run(tmp_path):
    made = {name: Made((0.01,) * 3, BASE, metrics={"accuracy": 0.9}) for name in ("fp32", "int8")}
    (tmp_path / "qtool.yaml").write_text(
        "all: {max_drop: 1%, min_speedup: 0.5, max_disk: 1GB, max_memory: 1GB}"
    )
    return write_run(tmp_path / "run", made, labels=LABELS)


def verbs(run: Path) -> list[list[str]]:
    return [
        ["pick", str(run), "--json"],
        ["gate", str(run), "--policy", str(run.parent / "qtool.yaml"), "--json"],
        ["compare", str(run), str(run), "--json"],
        ["report", str(run), "--format", "json"],
    ]


def edit_lines(run: Path, stage: str, recipe: str, **values: object) -> None:
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["stage"] == stage and line["recipe"] == recipe:
            line["values"] |= values
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("plan", None),
        ("plan", [3]),
        ("plan", [{"recipe": "fp32"}]),
        ("rounds", "3"),
        ("rounds", 0),
        ("rounds", None),
        ("metric", "bleu"),
        ("metric", 3),
        ("metrics", 3),
        ("args", "x"),
        ("versions", [1]),
        ("host", "here"),
        ("host", {"cpu_flags": 3}),
        ("host", {"gpus": ["H100"]}),
        ("host", {"hash": 3}),
        ("host", {"topology": "NVLink"}),
        ("host", {"topology": {"pairs": [{"gpus": None}]}}),
        ("data", {"rows": "many"}),
        ("notes", 3),
        ("recipes", []),
    ],
)
def test_a_record_of_the_wrong_type_is_named(run, key, value):
    content = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(content | {key: value}))
    for arguments in verbs(run):
        with pytest.raises(QtoolError, match=key):
            cli.run(arguments)


@pytest.mark.parametrize(
    ("stage", "values"),
    [
        ("measure", {"peak_rss_bytes": float("nan")}),
        ("measure", {"peak_rss_bytes": "x"}),
        ("measure", {"peak_rss_bytes": -1}),
        ("measure", {"load_s": float("inf")}),
        ("build", {"disk_bytes": float("nan")}),
        ("build", {"disk_bytes": 10**400}),
        ("score", {"predictions": 3}),
        ("score", {"metrics": [0.9]}),
    ],
)
def test_an_impossible_value_is_told_with_its_line(run, stage, values):
    edit_lines(run, stage, "int8", **values)
    for arguments in verbs(run):
        with pytest.raises(QtoolError, match=r"line \d+ is not a measurement"):
            cli.run(arguments)


@pytest.mark.parametrize("seconds", [0.0, -0.01, 1e308, 1e-320])
def test_a_sample_that_no_clock_gives_is_told_with_its_line(run, seconds):
    text = (run / "results.jsonl").read_text().splitlines()
    lines = [json.loads(line) for line in text]
    for line in lines:
        if line["stage"] == "measure" and line["recipe"] == "int8":
            line["samples"]["latency_s"][0] = seconds
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(QtoolError, match=r"line \d+ is not a measurement"):
        cli.run(verbs(run)[0])


def save(path: Path, **arrays: object) -> None:
    with np.load(path) as stored:
        whole = {name: stored[name] for name in stored.files}
    np.savez(path, **(whole | arrays))  # type: ignore[arg-type]


def an_array_instead(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.zeros(3))


DAMAGE = {
    "nothing in it": lambda path: path.write_bytes(b""),
    "an array instead": an_array_instead,
    "a single id": lambda path: save(path, ids=np.array(3)),
    "a single label": lambda path: save(path, labels=np.array(1)),
    "no rows": lambda path: save(path, ids=np.zeros(0), labels=np.zeros(0), logits=np.zeros((0, 2))),
    "another number of classes": lambda path: save(path, logits=np.zeros((200, 3))),
    "a label that is no number": lambda path: save(path, labels=np.full(200, np.nan)),
    "a logit that is no number": lambda path: save(path, logits=np.full((200, 2), np.nan)),
    "words": lambda path: save(path, labels=np.array(["a"] * 200)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_predictions_leave_a_recipe_without_evidence_on_its_score(run, capsys, damage):
    damage(run / "predictions" / "int8-cpu.npz")
    for arguments in verbs(run):
        assert cli.run(arguments) == 0
    gate = json.loads((run / "gate.json").read_text())
    drop = next(check for check in gate["checks"] if check["limit_name"] == "max_drop")
    assert (drop["verdict"], drop["value"]) == ("inconclusive", None)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_predictions_of_the_baseline_are_a_mistake_to_mend(run, damage):
    (run.parent / "qtool.yaml").write_text("all: {max_drop: 1%}")
    damage(run / "predictions" / "fp32-cpu.npz")
    # what has its own shape could be right: then the other recipe is the odd one
    for arguments in verbs(run)[:2]:
        try:
            assert cli.run(arguments) in (0, 1)
        except QtoolError as error:
            assert "fp32" in str(error)  # noqa: PT017


def test_predictions_that_are_not_those_that_were_scored_are_not_used(run, capsys):
    edit_lines(run, "score", "int8", predictions_sha256="0" * 64)
    assert cli.run(verbs(run)[1]) == 0
    gate = json.loads(capsys.readouterr().out)
    drop = next(check for check in gate["checks"] if check["limit_name"] == "max_drop")
    assert (drop["verdict"], "not those that were scored" in drop["why"]) == ("inconclusive", True)
    edit_lines(run, "score", "fp32", predictions_sha256="0" * 64)
    for arguments in verbs(run)[:2]:
        with pytest.raises(QtoolError, match="fp32"):
            cli.run(arguments)


def test_a_size_that_was_not_recorded_is_no_size_within_the_limit(run, capsys):
    edit_lines(run, "build", "int8", disk_bytes=None)
    cli.run(verbs(run)[1])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert next(c["verdict"] for c in checks if c["limit_name"] == "max_disk") == "inconclusive"


def test_a_run_in_which_nothing_was_timed_cannot_be_gated(run):
    lines = [line for line in (run / "results.jsonl").read_text().splitlines() if '"measure"' not in line]
    (run / "results.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(QtoolError, match="nothing was measured"):
        cli.run(verbs(run)[1])


def test_the_confidence_that_is_printed_is_the_one_that_judged(run, capsys):
    (run.parent / "qtool.yaml").write_text("all: {confidence: 0.99, max_memory: 1GB}")
    cli.run(verbs(run)[1][:-1])
    assert capsys.readouterr().out.splitlines()[-1].endswith("at 99 % confidence")


def test_one_round_shows_nothing_and_is_called_provisional(tmp_path, capsys):
    made = {
        "fp32": Made((0.01,), BASE, metrics={"accuracy": 0.9}),
        "int8": Made((0.005,), BASE, metrics={"accuracy": 0.9}),
    }
    run = write_run(tmp_path / "run", made, labels=LABELS)
    cli.run(["pick", str(run)])
    told = capsys.readouterr().out
    assert "provisional: one round has no interval" in told
    assert "p50 0.50x: one round shows nothing" in told
