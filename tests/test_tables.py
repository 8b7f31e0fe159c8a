"""Tables and metrics: real forms are read, a malformed row is named by its line, a metric equals its hand count."""

from __future__ import annotations

import json

import pytest

from qtool.core import QtoolError
from qtool.tasks import find, find_all
from qtool.tasks._table import read
from tests.conftest import need


def put(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_lone_quotation_mark_in_a_tsv_is_text(tmp_path):
    path = put(tmp_path, "t.tsv", 'sentence\tlabel\n"a lone mark\t1\nsaid "so"\t0\n')
    assert read(path, "sentence", None, "label").texts == ['"a lone mark', 'said "so"']


def test_a_quoted_csv_keeps_commas_and_line_breaks(tmp_path):
    path = put(tmp_path, "t.csv", 'text,label\n"one, two\nthree",pos\n')
    assert read(path, "text", None, "label").texts == ["one, two\nthree"]


def test_a_byte_order_mark_and_windows_line_ends_are_not_text(tmp_path):
    path = put(tmp_path, "t.tsv", b"\xef\xbb\xbfsentence\tlabel\r\na b\t1\r\n")
    table = read(path, "sentence", None, "label")
    assert (table.texts, table.labels) == (["a b"], ["1"])


def test_other_unicode_line_separators_stay_inside_a_text(tmp_path):
    path = put(tmp_path, "t.tsv", "sentence\tlabel\na\u2028b\x85c\t1\n")
    assert read(path, "sentence", None, "label").texts == ["a\u2028b\x85c"]


def test_a_column_may_have_several_names_and_the_first_one_found_is_taken(tmp_path):
    path = put(tmp_path, "t.tsv", "label\tgold_label\tpremise\n1\t0\ta b\n")
    table = read(path, ("sentence1", "premise"), None, ("gold_label", "label"))
    assert (table.texts, table.labels) == (["a b"], ["0"])


def test_a_name_that_stands_twice_does_not_matter_in_a_column_that_is_not_read(tmp_path):
    path = put(tmp_path, "t.tsv", "id\tid\tsentence\tlabel\n7\t8\ta b\t1\n")
    assert read(path, "sentence", None, "label").texts == ["a b"]


def test_a_label_is_parsed_and_a_wrong_one_is_named_by_its_line(tmp_path):
    def parse(label):
        if label != "1":
            raise ValueError("a 1")
        return 1

    good = put(tmp_path, "good.tsv", "sentence\tlabel\na b\t1\n")
    assert read(good, "sentence", None, "label", parse=parse).labels == [1]
    bad = put(tmp_path, "bad.tsv", "sentence\tlabel\na b\t1\nc\t2\n")
    with pytest.raises(QtoolError, match="line 3: column 'label' holds '2', expected a 1"):
        read(bad, "sentence", None, "label", parse=parse)


def test_columns_are_found_by_name_in_any_order(tmp_path):
    path = put(
        tmp_path, "t.jsonl", '{"y": 1, "extra": null, "q": "b", "x": "a"}\n\n{"x": "c", "q": "d", "y": 0}\n'
    )
    table = read(path, "x", "q", "y")
    assert (table.texts, table.pairs, table.labels) == (["a", "c"], ["b", "d"], [1, 0])


def test_parquet_gives_the_same_table_as_csv(tmp_path):
    need("pyarrow")
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["a", "b"], "label": ["x", "y"]}), tmp_path / "t.parquet"
    )
    put(tmp_path, "t.csv", "text,label\na,x\nb,y\n")
    a, b = (read(tmp_path / name, "text", None, "label") for name in ("t.parquet", "t.csv"))
    assert (a.texts, a.labels) == (b.texts, b.labels)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.tsv", "", "is empty"),
        ("t.tsv", "sentence\tlabel\n", "has no rows"),
        ("t.tsv", b"sentence\tlabel\n\x00\x01\t1\n", "is binary"),
        ("t.tsv", b"sentence\tlabel\nok\t1\n\xff\xfe\t1\n", "line 3 is not UTF-8"),
        ("t.tsv", "sentence\tlabel\nno label\n", "line 2 has 1 fields, the header has 2"),
        ("t.tsv", "sentence\tlabel\na\t1\tx\n", "line 2 has 3 fields"),
        ("t.tsv", "sentence\tlabel\na\t1\n\t1\n", "line 3: column 'sentence' holds '', expected text"),
        ("t.tsv", "sentence\tlabel\na\t\n", "line 2: column 'label' holds '', expected a label"),
        (
            "t.tsv",
            "sentenc\tlabel\na\t1\n",
            "has no column 'sentence'. Did you mean 'sentenc'? It has: sentenc, label",
        ),
        ("t.tsv", "sentence\tlabel\tlabel\na\t1\t1\n", "column 'label' stands twice"),
        ("t.csv", 'sentence,label\n"open,1\n', "Check the quoting"),
        ("t.jsonl", '{"sentence": "a", "label": 1}\nnot json\n', "line 2 is not JSON"),
        ("t.jsonl", "[1]\n", "line 1 holds list"),
        ("t.jsonl", '{"sentence": 5, "label": 1}\n', "line 1: column 'sentence' holds 5, expected text"),
        ("t.jsonl", '{"sentence": "a", "label": null}\n', "line 1: column 'label' holds None"),
        ("t.parquet", "not parquet", "is not a Parquet file"),
        ("t.xlsx", "x", "cannot tell what kind of table"),
    ],
)
def test_a_wrong_table_is_refused_with_its_line(tmp_path, name, content, says):
    if name.endswith("parquet"):
        need("pyarrow")
    with pytest.raises(QtoolError) as caught:
        read(put(tmp_path, name, content), "sentence", None, "label")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_demo_table_is_balanced_and_apart_from_its_calibration_rows():
    task, file = find("demo")
    scored, calibration = file.load(task, None, None), file.load(task, "train", None)
    assert (scored.labels.count("negative"), scored.labels.count("positive")) == (500, 500)
    assert len(calibration) == 256
    assert not set(scored.texts) & set(calibration.texts)


def test_an_unknown_task_gets_a_suggestion():
    assert set(find_all()) >= {"sst2", "text", "demo"}
    with pytest.raises(QtoolError, match="Did you mean 'sst2'"):
        find("sst-2")


@pytest.mark.parametrize(
    ("name", "predictions", "references", "expected"),
    [
        # hand counts: 3 of 4; precision 2/3 and recall 1; (2*1 - 1*0)/sqrt(3*2*2*1); a straight line; ranks reversed
        ("accuracy", [1, 0, 1, 1], [1, 0, 1, 0], 0.75),
        ("f1", [1, 0, 1, 1], [1, 0, 1, 0], 0.8),
        ("matthews_correlation", [1, 0, 1, 1], [1, 0, 1, 0], 2 / 12**0.5),
        ("pearson", [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 1.0),
        ("spearman", [1.0, 2.0, 9.0], [3.0, 2.0, 1.0], -1.0),
    ],
)
def test_a_metric_equals_its_hand_count_and_loads_without_the_hub(
    name, predictions, references, expected, tmp_path, monkeypatch
):
    need("evaluate", "sklearn")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path))
    from qtool import metrics

    assert metrics.compute(name, predictions, references) == pytest.approx(expected)
    assert json.dumps(metrics.compute(name, predictions, references))


def test_a_metric_file_is_an_evaluate_module(tmp_path):
    need("evaluate", "sklearn")
    import evaluate

    from qtool import metrics

    path = str(metrics.__path__[0]) + "/accuracy.py"
    metric = evaluate.load(path, cache_dir=str(tmp_path), keep_in_memory=True)
    assert metric.compute(predictions=[1, 0], references=[1, 1])["accuracy"] == 0.5


def test_a_metric_that_is_not_defined_is_none():
    need("evaluate", "sklearn")
    from qtool import metrics

    assert metrics.compute("spearman", [1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
