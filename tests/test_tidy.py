"""The tidy table: its lines counted by hand, its types, and the same numbers in every format."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from qtool import report, store
from qtool.report import tidy
from qtool.report.text import columns
from qtool.summary import summarise
from qtool.units import change, number
from tests.conftest import need, qtool
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 200
HASH = "a" * 64
RUN = {
    "model": "=HYPERLINK(1)",
    "started_at": "2026-11-30T12:00:00+00:00",
    "host": {"hash": "h1", "cpu_model": "+A CPU"},
    "model_info": {"content": HASH},
    "versions": {"qtool": "0.1.0"},
}


def recipe(p50_s, wrong, **more):
    answers = [1 - label if i in wrong else label for i, label in enumerate(LABELS)]
    return Made(p50_s, answers, metrics={"accuracy": 1 - len(wrong) / 400}, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    recipes = {
        "fp32": recipe((0.0108, 0.0110, 0.0109), range(40), disk_bytes=91_100_000),
        "int8": recipe((0.00270, 0.00272, 0.00271), range(2, 42), disk_bytes=23_400_000),
        "odd": Made((1, 1, 1), bad={"measure-1": ("failed", '-1 is no\n\x1b[31mtime,\x1b[0m or "so"', None)}),
        "fp16": Made((1, 1, 1), bad={"plan": ("skipped", "needs a GPU", None)}),
    }
    return write_run(tmp_path_factory.mktemp("tidy") / "my-run", recipes, labels=LABELS, run=RUN)


@pytest.fixture(scope="module")
def table(folder):
    return tidy.rows(summarise(folder), store.read_run(folder), folder.name)


def cells(table):
    return {(line["recipe"], line["metric"]): line for line in table}


def read_csv(text):
    """CSV back into the columns' types, by the csv module's own rules."""
    as_type = {
        "string": lambda x: x[1:] if x[:1] == "'" else x,
        "int64": int,
        "float64": float,
        "bool": {"true": True, "false": False}.__getitem__,
    }
    return [
        {name: as_type[tidy.COLUMNS[name]](cell) if cell else None for name, cell in line.items()}
        for line in csv.DictReader(io.StringIO(text, newline=""))
    ]


def test_a_trial_has_a_line_for_each_metric_and_a_failed_one_has_one_line(table):
    summary_metrics = 25  # accuracy, 5 of agreement and shift, 19 of times, sizes and use
    counts = {name: sum(line["recipe"] == name for line in table) for name in ("fp32", "int8", "odd", "fp16")}
    assert counts["fp32"] == counts["int8"] == summary_metrics
    assert counts["odd"] == counts["fp16"] == 1
    failed = next(line for line in table if line["recipe"] == "odd")
    assert (failed["status"], failed["metric"], failed["value"]) == ("failed", None, None)
    assert failed["reason"] == '-1 is no [31mtime, [0m or "so"'


def test_values_are_in_seconds_bytes_and_fractions_with_their_intervals(table):
    found = cells(table)
    assert found["int8", "latency_p50_s"]["value"] == pytest.approx(0.00271)
    assert found["int8", "latency_p50_s"]["unit"] == "s"
    assert found["int8", "accuracy"]["value"] == 0.9
    assert found["int8", "disk_bytes"]["value"] == 23_400_000.0
    assert found["int8", "latency_p50_s"]["low"] < 0.00271 < found["int8", "latency_p50_s"]["high"]
    assert found["int8", "accuracy"]["unit"] is None
    vram = found["int8", "peak_vram_bytes"]
    assert (vram["value"], vram["reason"]) == (None, "not measured on a CPU")


def test_every_line_names_its_run_and_says_what_is_on_the_frontier_and_recommended(table):
    assert {line["run"] for line in table} == {"my-run"}
    assert len({line["run_hash"] for line in table}) == 1
    assert {(line["host"], line["model_content"], line["threads"]) for line in table} == {("h1", HASH, 2)}
    assert {line["recipe"] for line in table if line["recommended"]} == {"int8"}
    assert "int8" in {line["recipe"] for line in table if line["on_frontier"]}


def test_a_run_keeps_its_hash_in_another_folder_and_another_run_has_another():
    run = {"model": "m", "plan": [{"trial_id": "t"}], "started_at": "x", "host": {"hash": "h"}}
    assert tidy.run_hash(run) == tidy.run_hash(dict(run))
    for other in (
        {"started_at": "y"},
        {"plan": [{"trial_id": "u"}]},
        {"host": {"hash": "i"}},
        {"model": "n"},
    ):
        assert tidy.run_hash(run | other) != tidy.run_hash(run)


def test_csv_gives_back_every_cell(table):
    assert read_csv(tidy.to_csv(table)) == table


def test_a_text_that_a_spreadsheet_would_run_is_made_a_text_and_a_number_stays_one(table):
    lines = list(csv.DictReader(io.StringIO(tidy.to_csv(table), newline="")))
    assert {line["model"] for line in lines} == {"'=HYPERLINK(1)"}
    assert {line["cpu_model"] for line in lines} == {"'+A CPU"}
    negative = [line for line in lines if line["metric"] == "score_delta" and line["low"].startswith("-")]
    assert negative
    assert all(float(line["low"]) < 0 for line in negative)
    assert next(line for line in lines if line["recipe"] == "odd")["reason"].startswith("'-1")


def test_csv_has_a_quote_and_a_comma_as_rfc_4180_writes_them(table):
    text = tidy.to_csv(table)
    assert '"\'-1 is no [31mtime, [0m or ""so"""' in text
    assert text.count("\r\n") == len(table) + 1
    assert "\x1b" not in text


def test_parquet_has_the_written_types_and_every_cell(table, tmp_path):
    need("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    tidy.write_parquet(table, tmp_path / "table.parquet")
    read = pq.read_table(tmp_path / "table.parquet")
    kinds = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64(), "bool": pa.bool_()}
    assert read.schema.names == list(tidy.COLUMNS)
    assert read.schema.types == [kinds[kind] for kind in tidy.COLUMNS.values()]
    assert read.to_pylist() == table
    assert [path.name for path in tmp_path.iterdir()] == ["table.parquet"]


def test_a_run_of_nothing_that_finished_still_has_the_types(tmp_path):
    need("pyarrow")
    import pyarrow.parquet as pq

    bad = Made((1.0,), bad={"build": ("failed", "no such file", None)})
    folder = write_run(tmp_path / "run", {"fp32": bad}, labels=LABELS)
    tidy.write_parquet(
        tidy.rows(summarise(folder), store.read_run(folder), "run"), tmp_path / "table.parquet"
    )
    read = pq.read_table(tmp_path / "table.parquet")
    assert str(read.schema.field("value").type) == "double"
    assert read.num_rows == 1


def numbers(lines):
    """What a table says, by where it says it."""
    return {
        (line["recipe"], line["device"], line["batch_size"], line["metric"]): (
            line["value"],
            line["low"],
            line["high"],
        )
        for line in lines
        if line["metric"]
    }


def test_parquet_csv_and_json_tell_the_same_numbers(folder, table, tmp_path):
    need("pyarrow")
    import pyarrow.parquet as pq

    tidy.write_parquet(table, tmp_path / "table.parquet")
    told = json.loads(report.render(folder, "json"))
    from_json = {
        (row["recipe"], row["device"], row["batch_size"], name): (cell["value"], cell["low"], cell["high"])
        for row in told["rows"]
        for name, cell in row["metrics"].items()
    }
    assert len(from_json) == 50
    assert numbers(read_csv(tidy.to_csv(table))) == from_json
    assert numbers(pq.read_table(tmp_path / "table.parquet").to_pylist()) == from_json


def ten_digits(x):
    return float(f"{x:.10g}")


def test_the_pages_drawings_have_the_numbers_of_the_csv_to_ten_digits(folder, table):
    need("jinja2")
    from qtool import evidence
    from qtool.report import page

    found = evidence.load(folder)
    text = page.render(found, summarise(folder))
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block
    drawn = json.loads(block[1])
    on_page = {}
    for recipe_number, group_number, _, cells in drawn["rows"]:
        group = drawn["groups"][group_number]
        key = (drawn["recipes"][recipe_number], group["device"], group["batch"])
        named = zip(drawn["metrics"], cells, strict=True)
        on_page |= {(*key, name): cell for name, cell in named if cell is not None}
    expected = {
        key: [ten_digits(value)] if low is None or low == high else [*map(ten_digits, (value, low, high))]
        for key, (value, low, high) in numbers(read_csv(tidy.to_csv(table))).items()
        if value is not None
    }
    assert on_page == expected


def test_the_pages_table_shows_the_numbers_of_the_csv_rounded_as_every_report_does(folder, table):
    need("jinja2")
    from qtool import evidence
    from qtool.report import page

    text = page.render(evidence.load(folder), summarise(folder))
    found = cells(read_csv(tidy.to_csv(table)))
    for name in ("fp32", "int8"):
        row = re.search(rf'<th scope="row" data-v="{name}">.*?</tr>', text, re.DOTALL)
        assert row
        shown = re.findall(r'<td class="n[ "][^>]*>([^<]*)', row[0])
        names = columns("accuracy", "cpu")
        expected = [
            "0"
            if (name, metric) == ("fp32", "score_delta")
            else change("accuracy", found[name, metric]["value"])
            if metric == "score_delta"
            else number(metric, found[name, metric]["value"])
            for metric in names
        ]
        assert shown == expected


@pytest.mark.slow
def test_the_command_line_prints_csv_and_writes_the_other_files_into_the_run_folder(folder, table):
    need("pyarrow", "jinja2", "matplotlib")
    done = qtool("report", folder, "--format", "csv")
    assert done.returncode == 0, done.stderr
    # pipes of the text kind read \r\n as \n
    assert read_csv(done.stdout.replace("\n", "\r\n")) == table
    for format, name in (("parquet", "table.parquet"), ("html", "report.html"), ("svg", "frontier.svg")):
        done = qtool("report", folder, "--format", format)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{folder / name}\n"
        assert (folder / name).is_file()
