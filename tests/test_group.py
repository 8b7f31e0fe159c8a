"""Several models in one call: the models file, one folder an entry, and the GLUE table."""

from __future__ import annotations

import pytest
import yaml

from qtool import cli, group
from qtool.core import QtoolError
from tests.conftest import WORDS, make_checkpoint
from tests.test_sweep import make_quick, row_of


def summary(task, metric, **scores):
    """A summary of one row a recipe; a value is the scores of the task's metrics, None a failed row."""
    rows = [
        {
            "recipe": name,
            "status": "failed" if values is None else "ok",
            "metrics": {metric: {"value": value} for metric, value in (values or {}).items()},
        }
        for name, values in scores.items()
    ]
    return {"task": task, "metric": metric, "rows": rows}


def cells(text):
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def test_a_task_of_two_metrics_counts_with_their_mean():
    found = group.table(
        [
            summary("sst2", "accuracy", fp32={"accuracy": 0.9}),
            summary("mrpc", "f1", fp32={"f1": 0.9, "accuracy": 0.8}),
        ]
    )
    assert found.splitlines()[0].split() == ["recipe", "sst2", "(accuracy)", "mrpc", "(f1)", "average"]
    assert cells(found)["fp32"] == ["90.00", "90.00", "87.50"]  # (90 + (90 + 80) / 2) / 2


def test_the_two_mnli_sets_count_as_one_task():
    found = group.table(
        [
            summary("mnli", "accuracy", fp32={"accuracy": 0.8}),
            summary("mnli-mismatched", "accuracy", fp32={"accuracy": 0.82}),
            summary("cola", "matthews_correlation", fp32={"matthews_correlation": 0.5}),
        ]
    )
    assert cells(found)["fp32"][-1] == "65.50"  # ((80 + 82) / 2 + 50) / 2


def test_no_average_over_fewer_tasks_than_the_others():
    found = group.table(
        [
            summary("sst2", "accuracy", fp32={"accuracy": 0.9}, bf16={"accuracy": 0.91}),
            summary("rte", "accuracy", fp32={"accuracy": 0.6}, bf16=None),
        ]
    )
    assert cells(found) == {"fp32": ["90.00", "60.00", "75.00"], "bf16": ["91.00", "-", "-"]}


def test_entries_that_would_share_a_folder_are_numbered():
    names = group._folders([("a/m", "sst2"), ("b/m", "sst2"), ("m", "rte"), ("c/m", "sst2")])
    assert names == ["sst2-m", "sst2-m~2", "rte-m", "sst2-m~3"]


def test_an_alias_brings_its_task(tmp_path):
    path = tmp_path / "models.yaml"
    path.write_text("- {model: distilbert}\n- {model: ./mine, task: demo}\n")
    assert group.read(path) == [("distilbert", "sst2"), ("./mine", "demo")]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds NoneType, expected a list"),
        ("model: demo", "holds dict, expected a list"),
        ("- demo", "entry 1 is str"),
        ("- {model: demo}\n- {modl: demo}", "entry 2: unknown key 'modl'. Did you mean 'model'?"),
        ("- {model: 3, task: demo}", "model is 3"),
        ("- {model: ./mine}", "task is None"),
        ("- {model: ./mine, task: dmo}", "no task is called 'dmo'. Did you mean 'demo'?"),
        ("- [", "not valid YAML"),
        ("- {model: demo, model: ./mine}", "key 'model' stands twice"),
        ("- &a {model: demo}\n- *a", "aliases (*name) are not allowed"),
        ("- {model: demo, task: !!bool maybe}", "not valid YAML"),
    ],
)
def test_a_wrong_models_file_is_refused_in_one_line(tmp_path, content, says):
    path = tmp_path / "models.yaml"
    path.write_text(content)
    with pytest.raises(QtoolError) as caught:
        group.read(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_each_entry_is_swept_into_its_own_folder_and_the_table_comes_last(tmp_path, monkeypatch, capsys):
    sst2 = make_checkpoint(tmp_path / "films")
    rte = make_checkpoint(tmp_path / "pairs", labels=("entailment", "not_entailment"))
    glue, out = tmp_path / "glue", tmp_path / "out"
    for task, header, rows in (
        ("SST-2", "sentence\tlabel", [f"a {word} film\t{i % 2}" for i, word in enumerate(WORDS)]),
        ("RTE", "index\tsentence1\tsentence2\tlabel",
         [f"{i}\tthe {word} plot\ta {word} story\t{('entailment', 'not_entailment')[i % 2]}" for i, word in enumerate(WORDS)]),
    ):  # fmt: skip
        (glue / task).mkdir(parents=True)
        (glue / task / "dev.tsv").write_text("\n".join([header, *rows]) + "\n")
    models = tmp_path / "models.yaml"
    models.write_text(
        yaml.safe_dump([{"model": str(sst2), "task": "sst2"}, {"model": str(rte), "task": "rte"}])
    )
    make_quick(monkeypatch, sst2, models, tmp_path)
    flags = ["--data", str(glue), "--out", str(out), "--recipe", "bf16", "--rounds", "1", "--threads", "1"]
    call = ["sweep", "--models", str(models), "--task", "glue", *flags]
    assert cli.run(call) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()[-3:]
    assert lines[0].split() == ["recipe", "sst2", "(accuracy)", "rte", "(accuracy)", "average"]
    for line, recipe in zip(lines[1:], ("fp32", "bf16"), strict=True):
        scores = [
            row_of(out / f, recipe)["metrics"]["accuracy"]["value"] for f in ("sst2-films", "rte-pairs")
        ]
        assert line.split() == [recipe, *(f"{100 * s:.2f}" for s in scores), f"{50 * sum(scores):.2f}"]
    before = [(out / f / "results.jsonl").read_text() for f in ("sst2-films", "rte-pairs")]
    assert cli.run([*call, "--resume"]) == 0
    assert [(out / f / "results.jsonl").read_text() for f in ("sst2-films", "rte-pairs")] == before
    with pytest.raises(QtoolError, match="already holds a run"):
        cli.run(call)
    with pytest.raises(QtoolError, match="nothing to resume in"):
        cli.run([*call[:-6], "--out", str(tmp_path / "mistyped"), "--resume"])
