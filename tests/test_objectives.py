"""Frontier over chosen metrics: hand-made boxes for the volume, counted resamples for the standing."""

from __future__ import annotations

import numpy as np
import pytest

from qtool import evidence, frontier, objectives, summary
from qtool.core import QtoolError
from qtool.frontier import Candidate
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 50


def made(p50_s=(0.010, 0.010, 0.010), lost=0, **more):
    told = [1 - label if i < 10 + lost else label for i, label in enumerate(LABELS)]
    return Made(p50_s, told, metrics={"accuracy": (90 - lost) / 100}, **more)


def load(tmp_path, recipes, **more):
    found = evidence.load(write_run(tmp_path / "run", recipes, **({"labels": LABELS} | more)))
    return found, objectives.options(found, summary.of(found)["rows"])


def test_the_volume_of_boxes_counted_by_hand():
    assert objectives.hypervolume(np.array([[3.0], [2.0]])) == 3
    # 2 x 2 and 1 x 4 share 1 x 2
    assert objectives.hypervolume(np.array([[2.0, 2.0], [1.0, 4.0]])) == 4 + 4 - 2
    # 1 x 1 x 3, 2 x 2 x 1 and 1 x 3 x 1: 3 + 4 - 1 + 3 - 2 (the last shares 1x2x1 with the second, of which 1 with the first)
    boxes = np.array([[1.0, 1, 3], [2.0, 2, 1], [1.0, 3, 1]])
    assert objectives.hypervolume(boxes) == 3 + 4 - 1 + 3 - 2
    assert objectives.hypervolume(np.array([[0.0, 5.0]])) == 0
    assert objectives.hypervolume(np.zeros((0, 2))) == 0


def test_the_volume_is_the_share_of_random_points_under_some_box():
    rng = np.random.default_rng(5)
    boxes = rng.random((8, 4))
    points = rng.random((200_000, 4))
    under = (points[:, None, :] < boxes[None]).all(axis=2).any(axis=1).mean()
    assert objectives.hypervolume(boxes) == pytest.approx(under, abs=0.005)


def test_the_volume_of_a_run_by_hand(tmp_path):
    recipes = {"fp32": made(disk_bytes=100), "int8": made((0.005,) * 3, disk_bytes=50)}
    found, every = load(tmp_path, recipes)
    names = ["score", "latency_p50_s", "disk_bytes"]
    # int8 contains fp32's box. Scores 0.9 from 0.85: 0.05 / 0.15; half the time and size: 1 - 0.5 / 1.25 = 0.6
    value, reason = objectives.hypervolume_of(found, every, names)
    assert (value, reason) == (pytest.approx(0.05 / 0.15 * 0.6 * 0.6), None)


def test_a_volume_needs_a_baseline(tmp_path):
    broken = made(bad={"build": ("failed", "no memory", None)})
    found, every = load(tmp_path, {"fp32": broken, "int8": made()})
    assert objectives.hypervolume_of(found, every, ["latency_p50_s"]) == (None, "fp32 did not finish")


def test_standing_is_the_share_of_resamples_in_which_nothing_is_better(tmp_path):
    # the fast one wins two rounds of three: of 27 resamples of three rounds it has the smaller mean log unless
    # the round it loses by ln 9 is drawn often enough: twice ln 1.5 = 0.81 < 2.2, so whenever it is drawn at all
    recipes = {"fp32": made((0.0015, 0.0015, 0.0010)), "int8": made((0.0010, 0.0010, 0.0090))}
    found, every = load(tmp_path, recipes)
    shares = objectives.standing(found, every, ["latency_p50_s"], resamples=20_000)
    assert shares["int8"] == pytest.approx(8 / 27, abs=0.015)
    assert shares["int8"] + shares["fp32"] == pytest.approx(1)


def test_what_is_the_same_everywhere_is_on_the_frontier_every_time(tmp_path):
    found, every = load(tmp_path, {"fp32": made(), "same": made()})
    names = objectives.check([], every, found)
    assert names == ["score", "latency_p50_s", "peak_rss_bytes", "disk_bytes"]
    assert objectives.standing(found, every, names) == {"fp32": 1.0, "same": 1.0}


def test_a_metric_that_is_better_when_higher_is_turned_round(tmp_path):
    recipes = {"fp32": made(), "int8": made((0.005, 0.0051, 0.0049))}
    found, every = load(tmp_path, recipes)
    names = ["throughput_per_s", "agreement"]
    made_ = [Candidate(o.name, {name: o.numbers(name) for name in names}) for o in every]
    pairs = frontier.compare(made_, None)
    assert pairs["int8", "fp32"]["throughput_per_s"] == "better"
    told = objectives.describe(found, every, names[:1], objectives.only(pairs, names[:1]))
    assert told["members"] == ["int8"]


def test_options_are_named_by_what_differs(tmp_path):
    _, every = load(tmp_path, {"fp32": made(), "fp32@8": made(batch_size=8)})
    assert [option.name for option in every] == ["fp32 batch 1", "fp32 batch 8"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("latency_p55_s", "there is no metric 'latency_p55_s'. Did you mean 'latency_p95_s'?"),
        ("peak_vram_bytes", "has a value of 'peak_vram_bytes'"),
        ("f1", "has a value of 'f1'"),
    ],
)
def test_an_objective_without_values_is_refused(tmp_path, name, told):
    found, every = load(tmp_path, {"fp32": made(), "int8": made()})
    with pytest.raises(QtoolError) as caught:
        objectives.check([name], every, found)
    assert told in str(caught.value)


def test_the_tasks_own_metric_is_the_score_and_the_speedup_has_its_rounds(tmp_path):
    recipes = {"fp32": made(), "int8": made((0.005, 0.0051, 0.0049), lost=1)}
    found, every = load(tmp_path, recipes)
    assert objectives.check(["accuracy", "score", "speedup"], every, found) == ["score", "speedup"]
    pairs = frontier.compare([Candidate(o.name, {"speedup": o.numbers("speedup")}) for o in every], None)
    assert pairs["int8", "fp32"]["speedup"] == "better"


def test_only_rounds_that_all_have_are_drawn(tmp_path):
    recipes = {"fp32": made(), "int8": made((0.005, 0.005, 0.005, 1.0), peak_bytes=(400e6,) * 4)}
    found, every = load(tmp_path, recipes, run={"rounds": 3})
    assert objectives.standing(found, every, ["latency_p50_s"]) == {"fp32": 0.0, "int8": 1.0}
