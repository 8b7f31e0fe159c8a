"""A run folder of two hosts: rows, scores and frontiers apart, and nothing pooled. Figures are counted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtool import compare, evidence, pick, store, summary
from qtool.core import Measurement, QtoolError, Trial
from qtool.report import terminal, tidy
from qtool.rows import Group
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 200
RIGHT = LABELS
HALF = [0] * 400  # right on every second example
SLOW, FAST = "slow/aaaa", "fast/bbbb"


def of_two_hosts(folder: Path, attempt: int = 1) -> Path:
    """fp32 and int8 on two kinds of node: on `slow` int8 is twice as fast, on `fast` it is no faster."""
    parts = {
        SLOW: {"fp32": Made((0.02, 0.02, 0.02), RIGHT), "int8": Made((0.01, 0.01, 0.01), RIGHT)},
        FAST: {"fp32": Made((0.004, 0.004, 0.004), RIGHT), "int8": Made((0.004, 0.004, 0.004), HALF)},
    }
    plan, lines = [], []
    for host, made in parts.items():
        kind, _, own = host.partition("/")
        for recipe in made.values():
            recipe.metrics = {"accuracy": 1.0 if recipe.answers is RIGHT else 0.5}
        write_run(folder / kind, made, labels=LABELS)
        run = json.loads((folder / kind / "run.json").read_text())
        for entry in run["plan"]:
            plan.append(entry | {"trial_id": f"{kind}-{entry['trial_id']}", "host": host, "kind": kind})
        for text in (folder / kind / "results.jsonl").read_text().splitlines():
            line = json.loads(text) | {"host": own}
            if line["stage"] == "score":
                line["trial_id"] += f"-{kind}"
                line["values"]["predictions"] = f"{kind}/{line['values']['predictions']}"
            if line["stage"] == "measure":
                line["trial_id"] = f"{kind}-{line['trial_id']}"
            lines.append(line)
    hosts = {
        host: {"hash": host.partition("/")[2], "kind": host.partition("/")[0], "attempt": attempt}
        for host in parts
    }
    run |= {"plan": plan, "hosts": hosts, "host": {"hash": "driver"}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_each_host_has_its_own_rows_baseline_and_frontier(tmp_path):
    found = summary.summarise(of_two_hosts(tmp_path))
    assert [(r["recipe"], r["host"], r["device"], r["batch_size"]) for r in found["rows"]] == [
        ("fp32", SLOW, "cpu", 1),
        ("int8", SLOW, "cpu", 1),
        ("fp32", FAST, "cpu", 1),
        ("int8", FAST, "cpu", 1),
    ]
    told = {(r["recipe"], r["host"]): r["metrics"] for r in found["rows"]}
    assert told["int8", SLOW]["speedup"]["value"] == pytest.approx(2.0)
    assert told["int8", FAST]["speedup"]["value"] == pytest.approx(1.0)
    # the score belongs to the host too: 400 of 400 against 200 of 400
    assert told["int8", SLOW]["accuracy"]["value"] == 1.0
    assert told["int8", FAST]["accuracy"]["value"] == 0.5
    assert told["int8", FAST]["score_delta"]["value"] == -0.5
    assert [(g["host"], g["recommended"]) for g in found["frontier"]] == [(SLOW, "int8"), (FAST, "fp32")]


def test_pick_holds_no_time_of_one_host_against_the_others(tmp_path):
    chosen = pick.pick(of_two_hosts(tmp_path), pick.Goals())
    assert [option["name"] for option in chosen["options"]] == [
        f"{recipe} at {host}" for host in (SLOW, FAST) for recipe in ("fp32", "int8")
    ]
    # five times as fast, and yet no domination: the hosts' rounds were not paired
    assert set(chosen["frontier"]["members"]) >= {f"int8 at {SLOW}", f"fp32 at {FAST}"}


def test_two_runs_of_the_same_hosts_are_compared_host_by_host(tmp_path):
    a, b = of_two_hosts(tmp_path / "a"), of_two_hosts(tmp_path / "b")
    found = compare.compare(a, b)
    assert [(row["recipe"], row["host"]) for row in found["rows"]] == [
        ("fp32", "aaaa"),
        ("int8", "aaaa"),
        ("fp32", "bbbb"),
        ("int8", "bbbb"),
    ]
    assert found["differences"] == []
    assert [r["columns"]["latency_p50_s"]["change"] for r in found["rows"]] == pytest.approx([1.0] * 4)


def test_the_reports_name_the_host(tmp_path):
    run = of_two_hosts(tmp_path)
    told = terminal.render(summary.summarise(run), store.read_run(run), width=None, color=False)
    assert f"cpu of {SLOW}, batch 1" in told
    assert {line["host"] for line in tidy.of(run)} == {"aaaa", "bbbb"}


def test_a_line_of_a_host_that_is_not_its_groups_is_refused(tmp_path):
    run = of_two_hosts(tmp_path)
    lines = [json.loads(line) for line in (run / "results.jsonl").read_text().splitlines()]
    next(line for line in lines if line["stage"] == "measure")["host"] = "cccc"
    (run / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(QtoolError, match=r"2 hosts \(aaaa, cccc\), and no statistic pools hosts"):
        evidence.load_times(run)


def test_lines_of_a_lost_node_are_superseded_not_mixed(tmp_path):
    run = of_two_hosts(tmp_path, attempt=2)
    # the new node has measured one round of one trial of `slow`; the lost ones' three are void
    extra = json.loads((run / "results.jsonl").read_text().splitlines()[2])
    assert (extra["stage"], extra["trial_id"], extra["round"]) == ("measure", "slow-fp32-cpu-b1", 1)
    extra["values"]["attempt"] = 2
    with (run / "results.jsonl").open("a") as file:
        file.write(json.dumps(extra) + "\n")
    found = evidence.load_times(run)
    assert [(t.recipe, t.group.host, len(t.rounds), t.status) for t in found.trials] == [
        ("fp32", SLOW, 1, "failed"),
        ("int8", SLOW, 0, "failed"),
        ("fp32", FAST, 0, "failed"),
        ("int8", FAST, 0, "failed"),
    ]
    assert found.trials[0].cause == "unfinished: 1 of 3 rounds measured"


def test_a_run_of_one_host_has_its_hash_and_an_older_one_none(tmp_path):
    one = write_run(tmp_path / "one", {"fp32": Made((0.01,))}, metric=None, run={"host": {"hash": "h"}})
    assert evidence.load_times(one).groups == [Group("h", "cpu", 1)]
    old = write_run(tmp_path / "old", {"fp32": Made((0.01,))}, metric=None, run={"host": None})
    assert summary.summarise(old)["rows"][0]["host"] is None


def test_two_hosts_in_a_run_that_tells_of_one_are_refused(tmp_path):
    other = Measurement(
        trial_id="fp32-cpu-b1",
        recipe="fp32",
        device="cpu",
        batch_size=1,
        stage="measure",
        round=3,
        status="ok",
        samples={"latency_s": [0.01]},
        host="another",
        started_at="2026-11-30T12:00:00+00:00",
    )
    run = write_run(tmp_path, {"fp32": Made((0.01, 0.01))}, metric=None, more=[other])
    with pytest.raises(QtoolError, match=r"2 hosts \(another, h\)"):
        evidence.load_times(run)


def test_a_plan_that_names_an_unknown_host_is_refused(tmp_path):
    run = of_two_hosts(tmp_path)
    record = json.loads((run / "run.json").read_text())
    record["plan"][0]["host"] = "elsewhere"
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(QtoolError, match="names a host that hosts lacks"):
        store.read_run(run)


def test_a_kind_is_part_of_a_trials_id_and_its_absence_is_not():
    facts = {
        "model": "m",
        "revision": None,
        "recipe": "fp32",
        "fingerprint": "f",
        "task": None,
        "data_hash": "d",
        "limit": None,
        "calibration_hash": None,
        "device": "cpu",
        "batch_size": 1,
        "seq_len": None,
        "threads": 1,
        "seed": 0,
    }
    import hashlib

    plain = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    assert Trial(**facts).id == hashlib.sha256(plain).hexdigest()[:16]  # as before there were kinds
    assert len({Trial(**facts, kind=kind).id for kind in (None, "l4", "h200")}) == 3
