"""Verdicts of placements, for trials made up here; every number in a sentence is counted by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qtool import summary, transfer
from qtool.core import Recipe
from qtool.report import markdown, terminal
from qtool.stats import Interval
from qtool.transfer import Seen, verdict
from tests.run_folder import Made, write_run

# 2 GB come over in each 1 s pass: the pageable link's 2.5 GB/s is near, the pinned one's 20 GB/s is not
CEILINGS = {
    "pinned_copy_bytes_per_s": 20e9,
    "pageable_copy_bytes_per_s": 2.5e9,
    "disk_read_bytes_per_s": 0.5e9,
    "page_cache_read_bytes_per_s": 8e9,
}
NVLINK = {
    "gpus": [{}, {}],
    "pairs": [{"gpus": [0, 1], "nvlinks": 4, "nvswitch": False, "ancestor": 30}],
}


def placement(**sizes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"device_map": {"cpu": 3}, "resident_bytes": 1, "cpu_bytes": 0, "disk_bytes": 0}
    return found | {"moved_bytes": 0, "storage_read_bytes": 0} | sizes


def seen(device: str = "cpu", placed: dict[str, Any] | None = None, **facts: Any) -> Seen:
    facts = {"status": "ok", "p50_s": 1.0, "against": "plain"} | facts
    return Seen(device=device, placement=placed or placement(), **facts)


RAM = placement(device_map={"cpu": 9, "cuda:0": 1}, cpu_bytes=2_000_000_000, moved_bytes=2_000_000_000)
DISK = placement(device_map={"disk": 9}, disk_bytes=90_000_000, moved_bytes=90_000_000)
SLOW = {"speedup": Interval(0.2, 0.19, 0.21), "tail": Interval(5.0, 4.0, 6.0)}


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        (seen(status="oom", cause="CUDA out of memory"), "does not fit", ["CUDA out of memory"]),
        (
            seen(speedup=Interval(1.5, 1.4, 1.6)),
            "fits and faster",
            ["1.50x [1.40, 1.60] the speed of plain"],
        ),
        (seen(speedup=Interval(1.02, 0.97, 1.07)), "fits, no faster", ["1.02x [0.970, 1.07]"]),
        # after one round nothing is shown
        (seen(speedup=Interval(3.0)), "fits, no faster", ["3.00x (one round) the speed of plain"]),
        (seen(speedup=None, against_status="failed"), "fits, no faster", ["plain is failed"]),
        (
            seen(speedup=Interval(1.5, 1.4, 1.6), placed=placement(device_map={"cuda:0": 4, "cuda:1": 4})),
            "fits and faster",
            ["across 2 GPUs joined by NVLink"],
        ),
        (
            seen("cuda", RAM, **SLOW, utilization_ratio=0.12),
            "transfer-bound",
            [
                "p95 5.00x [4.00, 6.00] worse than plain's",
                "2.00 GB cross the bus at each pass",
                "2.00 GB/s of the 2.50 GB/s that a copy from pageable memory gives at most",
                "the GPU busy 12 % of the time",
            ],
        ),
        # a GPU that works, one that does not tell, and a pass that takes five times the transfer
        (seen("cuda", RAM, **SLOW, utilization_ratio=0.9), "fits only by offload", ["2.00 GB cross the bus"]),
        (seen("cuda", RAM, **SLOW), "fits only by offload", ["without this placement plain fits here whole"]),
        (seen("cuda", RAM, **SLOW, utilization_ratio=0.1, p50_s=5.0), "fits only by offload", ["2.00 GB"]),
        (
            seen("cuda", RAM, speedup=None, tail=None, against_status="oom", utilization_ratio=0.9),
            "fits only by offload",
            ["2.00 GB cross the bus at each pass, plain does not fit"],
        ),
        (
            seen("cpu", DISK, **SLOW),
            "fits only by offload",
            ["90.0 MB come from the disk's page cache at each pass"],
        ),
        # 90 MB at the disk's 0.5 GB/s take 0.18 of the 0.2 s
        (
            seen("cpu", DISK | {"storage_read_bytes": 90_000_000}, **SLOW, p50_s=0.2),
            "transfer-bound",
            ["90.0 MB come from the disk itself at each pass", "0.450 GB/s of the 0.500 GB/s that the disk"],
        ),
        (
            seen("cpu", DISK | {"storage_read_bytes": None}, tail=Interval(1.05, 0.9, 1.2)),
            "fits only by offload",
            ["p95 1.05x [0.900, 1.20] that of plain", "from the disk or its page cache"],
        ),
        (
            seen("cpu", DISK, speedup=Interval(0.5, 0.4, 0.6), tail=None),
            "fits only by offload",
            ["0.500x [0.400, 0.600] the speed of plain at the median"],
        ),
    ],
)
def test_the_verdict_follows_from_the_numbers(case, kind, words):
    found = verdict(case, CEILINGS, NVLINK)
    assert found is not None
    assert found["kind"] == kind
    assert found["sentence"].startswith(f"{kind}: ")
    for each in words:
        assert each in found["sentence"]


@pytest.mark.parametrize("status", ["failed", "skipped", "timeout"])
def test_what_was_not_measured_for_another_reason_has_no_verdict(status):
    assert verdict(seen(status=status), CEILINGS) is None


def test_without_ceilings_nothing_is_called_transfer_bound():
    found = verdict(seen("cuda", RAM, **SLOW, utilization_ratio=0.1), None)
    assert found is not None
    assert found["kind"] == "fits only by offload"


def test_a_twin_differs_in_nothing_but_its_placement():
    def recipe(name: str, **parts: Any) -> dict[str, Any]:
        own = {"description": "d", "source": "s", "method": "m", "runtime": "r"}
        return Recipe.model_validate(own | parts | {"name": name}).model_dump()

    all_ = [
        recipe("half", dtype="float16"),
        recipe("graph", compile={"dynamic": True}),
        recipe("other", placement={"device_map": "auto"}),
        recipe("plain", description="another", devices=["cpu", "cuda"]),
        recipe("placed", placement={"device_map": "auto"}),
    ]
    assert transfer.twin("placed", {each["name"]: each for each in all_}) == "plain"
    assert transfer.twin("placed", {each["name"]: each for each in all_ if each["name"] != "plain"}) is None


def made(folder, values: dict[str, Any], **bad: Any):
    parts = {"method": "m", "runtime": "r", "dtype": "float32"}
    book = {"fp32": parts, "away": parts | {"placement": {"device_map": {"": "disk"}}}}
    recipes = {
        "fp32": Made((0.010, 0.011, 0.010)),
        "away": Made((0.030, 0.033, 0.030), values=values, **bad),
    }
    return write_run(folder, recipes, metric=None, run={"recipes": book})


def test_rows_and_reports_of_a_run_say_the_verdict(tmp_path):
    run = made(tmp_path, {"placement": DISK})
    found = summary.summarise(run)
    rows = {row["recipe"]: row for row in found["rows"]}
    assert rows["fp32"]["placement"] is rows["fp32"]["verdict"] is None
    row = rows["away"]
    assert row["placement"] == DISK
    # every round's p95 is three times the other's
    assert row["verdict"]["kind"] == "fits only by offload"
    assert "p95 3.00x [3.00, 3.00] worse than fp32's" in row["verdict"]["sentence"]
    assert row["why"] == [row["verdict"]["sentence"]]
    record = json.loads((run / "run.json").read_text())
    told = terminal.render(found, record, width=None, color=False)
    assert f"away: {row['verdict']['sentence']}" in told
    assert "worse than fp32's" in markdown.render(found, record)


def test_a_trial_that_ran_out_of_memory_does_not_fit(tmp_path):
    run = made(tmp_path, {}, bad={"measure-1": ("oom", "no memory left", None)})
    rows = {row["recipe"]: row for row in summary.summarise(run)["rows"]}
    assert rows["away"]["verdict"]["kind"] == "does not fit"
    assert rows["away"]["verdict"]["sentence"] == "does not fit: no memory left."


@pytest.mark.parametrize(
    "damaged", [7, {}, {"device_map": 3}, DISK | {"moved_bytes": "many"}, DISK | {"gpus": 5}]
)
def test_a_damaged_placement_is_no_placement(tmp_path, damaged):
    rows = {row["recipe"]: row for row in summary.summarise(made(tmp_path, {"placement": damaged}))["rows"]}
    assert rows["away"]["placement"] is None
    assert rows["away"]["verdict"] is None
