"""Reports of runs written by hand: units and counts worked out by hand, Markdown read by its rules."""

from __future__ import annotations

import copy
import re
import xml.etree.ElementTree as ElementTree

import pytest

from qtool import store, units
from qtool.report import markdown, plots, terminal, text
from qtool.summary import summarise
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 200
NASTY = "no <b>kernel</b> | for `int8` \x1b[31mhere\x1b[0m\n" + "and on and on " * 60


def recipe(p50_s, wrong, **more):
    right = 1 - len(wrong) / 400
    answers = [1 - label if i in wrong else label for i, label in enumerate(LABELS)]
    return Made(p50_s, answers, metrics={"accuracy": right}, **more)


RECIPES = {
    "fp32": recipe((0.0108, 0.0110, 0.0109), range(40), disk_bytes=91_100_000),
    "int8": recipe((0.00270, 0.00272, 0.00271), range(2, 42), peak_bytes=(2.6e8,) * 3, disk_bytes=23_400_000),
    "rough": recipe((0.00271, 0.00269, 0.00270), range(120), disk_bytes=23_400_001, contended=True),
    "odd": Made((1, 1, 1), bad={"measure-1": ("failed", NASTY, "see | the log")}),
    "fp16": Made((1, 1, 1), bad={"plan": ("skipped", "needs a GPU", None)}),
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"), RECIPES, labels=LABELS)
    return summarise(folder), store.read_run(folder)


@pytest.fixture(scope="module")
def unscored(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("bare"), RECIPES, metric=None)
    return summarise(folder), store.read_run(folder)


def line_of(shown, name):
    return next(line for line in shown.splitlines() if re.match(rf"F? *{name} ", line))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("latency_p50_s", 0.00271, "2.71 ms"),
        ("latency_p50_s", 0.1085, "108 ms"),
        ("load_s", 2.7134, "2,713 ms"),
        ("disk_bytes", 23_400_000, "23.4 MB"),
        ("peak_rss_bytes", 1_117_200_000, "1,117 MB"),
        ("accuracy", 774 / 872, "88.76 %"),
        ("matthews_correlation", 0.58213, "0.5821"),
        ("speedup", 4.0249, "4.02x"),
        ("speedup", 5.7e-7, "<0.01x"),
        ("speedup", 5_228_597.0, ">1000x"),
        ("energy_j", 0.0, "0 J"),
        ("latency_p95_s", None, "not known"),
    ],
)
def test_numbers_are_shown_in_milliseconds_megabytes_and_percent(name, value, shown):
    assert units.with_unit(name, value) == shown


def test_plain_output_keeps_a_long_cause_on_one_line(swept):
    shown = terminal.render(*swept, width=None, color=False)
    told = next(line for line in shown.splitlines() if line.startswith("odd failed: "))
    assert told.endswith("and on. Next: see | the log")
    assert len(told) > 800


def test_every_recipe_has_its_status_in_plain_output(swept):
    shown = terminal.render(*swept, width=None, color=False)
    for name, status in (("fp32", "ok"), ("rough !", "ok"), ("odd", "failed"), ("fp16", "skipped")):
        assert re.search(rf"{name} +{status} ", line_of(shown, name))


def test_an_error_cannot_steer_the_terminal(swept):
    shown = terminal.render(*swept, width=None, color=False)
    assert "\x1b" not in shown
    assert "[31mhere" in shown


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(swept, width):
    shown = terminal.render(*swept, width=width, color=False)
    assert max(map(len, shown.splitlines())) <= width
    if width >= 80:
        assert "23.4" in line_of(shown, "int8")


def test_intervals_stand_where_there_is_room(swept):
    assert "[" in line_of(terminal.render(*swept, width=200, color=False), "int8")
    assert "[" not in line_of(terminal.render(*swept, width=100, color=False), "int8")


def test_colour_is_used_only_when_asked_for(swept):
    assert "\x1b[" in terminal.render(*swept, width=120, color=True)
    assert "\x1b[" not in terminal.render(*swept, width=120, color=False)


def test_the_best_values_the_ties_and_the_frontier_are_marked(swept):
    shown = terminal.render(*swept, width=100, color=False)
    fast, rough, base = (line_of(shown, name) for name in ("int8", "rough", "fp32"))
    # p50 2.71 and 2.70 ms cannot be told apart; 90 % is the best accuracy, of two
    assert "2.70*" in rough
    assert "2.71~" in fast
    assert "90.00*" in fast
    assert "90.00*" in base
    assert "23.4*" in fast
    assert "23.4*" not in rough
    assert [line.startswith("F") for line in (fast, rough, base)] == [True, False, False]


def test_frontier_and_recommendation_are_told_in_words(swept):
    shown = terminal.render(*swept, width=None, color=False)
    assert "frontier: int8" in shown
    # 10.9 over 2.71 ms; two answers of 400 gained and two lost
    assert "Take int8: 4.02x [" in shown
    assert "2 answers gained, 2 lost, McNemar p = 1" in shown
    assert "260 MB against 400 MB" in shown
    assert "disk 23.4 MB against 91.1 MB" in shown


def test_a_note_of_the_run_is_shown(swept):
    assert "note: tokens were truncated" in terminal.render(*swept, width=None, color=False)


def cells(line):
    return re.split(r"(?<!\\)\|", line)[1:-1]


def test_every_table_of_the_report_has_rows_of_one_length(swept):
    report = markdown.render(*swept)
    for block in re.findall(r"(?:^\|.*\n)+", report, re.MULTILINE):
        lengths = {len(cells(line)) for line in block.splitlines()}
        assert len(lengths) == 1, block
    assert len(re.findall(r"^\| :--", report, re.MULTILINE)) == 3


def test_strings_from_outside_bring_neither_html_nor_links_into_the_report(swept):
    summary, run = copy.deepcopy(swept)
    summary["model"] = "<script>x</script> ![a](http://e.vil) [b](javascript:c) www.e.vil a|b"
    report = markdown.render(summary, run)
    assert "<script" not in report
    assert "<b>" not in report
    assert not re.search(r"(?<!\\)\]\((?!frontier)", report)
    assert "http://" not in report
    assert "www." not in report
    assert r"a\|b" in report


def test_the_report_says_how_to_read_it_where_it_was_measured_and_links_the_plots(swept):
    report = markdown.render(*swept)
    for needed in (
        "![frontier: score against latency and against peak memory](frontier.svg)",
        "(frontier.png)",
        "## How to read this",
        r"A CPU \| two cores",
        "2.13.0",
        "tokens were truncated",
        "what int8 does",
        "Take int8",
    ):
        assert needed in report


def test_the_report_gives_the_reason_of_every_missing_number_once(swept):
    report = markdown.render(*swept)
    assert "- peak VRAM, GPU use, energy of every recipe: not measured on a CPU" in report


def test_without_a_score_the_tables_have_no_score_columns(unscored):
    shown = terminal.render(*unscored, width=None, color=False)
    assert "accuracy" not in shown.split("frontier:")[0]
    assert "no score" in shown
    header = next(line for line in markdown.render(*unscored).splitlines() if line.startswith("|"))
    assert "Δ" not in header


def test_a_report_of_nothing_that_finished_names_what_failed(tmp_path):
    bad = Made((0.01,), bad={"build": ("failed", "no such file", None)})
    folder = write_run(tmp_path, {"fp32": bad}, labels=LABELS)
    summary, run = summarise(folder), store.read_run(folder)
    assert "fp32 failed: no such file" in terminal.render(summary, run, width=80, color=False)
    assert "**fp32 failed**: no such file" in markdown.render(summary, run)
    plots.draw(summary, folder)
    assert (folder / "frontier.png").stat().st_size > 0


def test_the_same_summary_draws_the_same_svg(swept, tmp_path):
    (tmp_path / "again").mkdir()
    for folder in (tmp_path, tmp_path / "again"):
        plots.draw(swept[0], folder)
    once = (tmp_path / "frontier.svg").read_bytes()
    assert once == (tmp_path / "again" / "frontier.svg").read_bytes()
    assert (tmp_path / "frontier.png").read_bytes().startswith(b"\x89PNG")


def words_of(svg):
    return [
        " ".join(node.itertext()).strip()
        for node in ElementTree.parse(svg).iter()
        if node.tag.endswith("}text")
    ]


def test_both_panels_name_every_recipe_that_finished_and_no_other(swept, tmp_path):
    plots.draw(swept[0], tmp_path)
    words = words_of(tmp_path / "frontier.svg")
    assert [words.count(name) for name in ("fp32", "int8", "rough", "odd", "fp16")] == [2, 2, 2, 0, 0]
    assert "cpu, batch 1: accuracy against latency p50" in words
    assert "cpu, batch 1: accuracy against peak RSS" in words


def test_without_a_score_latency_is_drawn_against_memory_and_disk(unscored, tmp_path):
    plots.draw(unscored[0], tmp_path)
    words = words_of(tmp_path / "frontier.svg")
    assert "cpu, batch 1: peak RSS against latency p50" in words
    assert "cpu, batch 1: size on disk against latency p50" in words


def test_names_of_near_points_do_not_overlap():
    import matplotlib.text
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4))
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for number in range(6):
        axis.errorbar(1 + number / 1000, 1, fmt="o", label=f"recipe-with-a-name-{number}")
    axis.set_xlim(0, 2)
    axis.set_ylim(0, 2)
    figure.canvas.draw()
    plots._label(axis)
    boxes = [matplotlib.text.Text.get_window_extent(note) for note in axis.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_control_character_becomes_a_space():
    assert text.printable("a\x1b[31m\tb\n c") == "a [31m b c"
