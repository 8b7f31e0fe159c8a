"""The model card: its metadata as huggingface_hub reads it back, and what it must not let through."""

from __future__ import annotations

import ast
import re

import pytest

from qtool import recipes
from qtool.core import QtoolError
from qtool.report import card
from tests.conftest import need, qtool
from tests.run_folder import Made, write_run

LABELS = [0, 1] * 200
HOST = {
    "cpu_model": "A CPU <b>",
    "physical_cores": 2,
    "memory_gib": 8,
    "os": "Linux",
    "kernel": "6.1",
    "hash": "h",
}


def made(p50_s, wrong, **more):
    answers = [1 - label if i in wrong else label for i, label in enumerate(LABELS)]
    return Made(p50_s, answers, metrics={"accuracy": 1 - len(wrong) / 400}, **more)


FP32_S, INT8_S = (0.0108, 0.0110, 0.0109), (0.00270, 0.00272, 0.00271)


def write(folder, recipe_names=("fp32", "int8-dynamic"), fp32_s=FP32_S, int8_s=INT8_S, **run):
    book = {recipe.name: recipe for recipe in recipes.load_all()}
    told = {
        "model": "./models/my-model",
        "host": HOST,
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
        "args": {"threads": 2},
        "data": {"rows": 400, "max_tokens": 128, "longest": 40, "source": "films.csv"},
        "model_info": {"revision": None, "content": "a" * 64, "embeds": False},
        "recipes": {name: book[name].model_dump() for name in recipe_names if name in book},
        "started_at": "2026-11-30T12:00:00+00:00",
    }
    swept = {
        "fp32": made(fp32_s, range(40), disk_bytes=90_000_000, peak_bytes=(4e8,) * 5),
        "int8-dynamic": made(int8_s, range(2, 42), disk_bytes=22_500_000, peak_bytes=(4e8,) * 5),
        "bf16": Made((1,), bad={"plan": ("skipped", "needs a newer CPU", None)}),
    }
    return write_run(folder, swept, labels=LABELS, run=told | run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("card") / "run")


def read(text):
    need("huggingface_hub")
    from huggingface_hub import ModelCard

    return ModelCard(text)


def test_the_hub_reads_back_the_scores_and_nothing_else_of_the_numbers(folder):
    data = read(card.render(folder, "int8-dynamic")).data
    assert data.model_name == "my-model-int8-dynamic"
    assert [(r.task_type, r.metric_type, r.metric_value, r.metric_name) for r in data.eval_results] == [
        ("text-classification", "accuracy", 0.9, "accuracy")
    ]
    assert data.pipeline_tag == "text-classification"
    assert data.library_name == "transformers"


def test_the_metadata_survives_a_file_and_its_model_index_keeps_the_hubs_form(folder, tmp_path):
    need("huggingface_hub")
    from huggingface_hub import metadata_load
    from huggingface_hub.repocard_data import model_index_to_eval_results

    path = tmp_path / "README.md"
    path.write_text(card.render(folder, "int8-dynamic"), "utf-8")
    metadata = metadata_load(path)
    name, results = model_index_to_eval_results(metadata["model-index"])
    assert name == "my-model-int8-dynamic"
    assert results == read(path.read_text("utf-8")).data.eval_results
    assert read(str(read(path.read_text("utf-8")))).data.to_dict() == metadata


@pytest.mark.parametrize(
    ("run", "dataset"),
    [
        (
            {"task": "sst2", "data": {"rows": 872, "source": "nyu-mll/glue sst2 validation"}},
            ("nyu-mll/glue", "GLUE SST-2", "sst2", "validation"),
        ),
        (
            {"task": "mnli-mismatched", "data": {"rows": 9832, "source": "glue/MNLI/dev_mismatched.tsv"}},
            ("nyu-mll/glue", "GLUE MNLI", "mnli", "validation_mismatched"),
        ),
        (
            {"task": "rte", "args": {"split": "train"}, "data": {"rows": 100, "source": "hub"}},
            ("nyu-mll/glue", "GLUE RTE, 100 of 2,490 rows", "rte", "train"),
        ),
        (
            {"task": "sst2", "args": {"data": "my.tsv"}, "data": {"rows": 872, "source": "my.tsv"}},
            ("nyu-mll/glue", "GLUE SST-2", "sst2", None),
        ),
        (
            {"task": "text", "data": {"rows": 12, "source": "/home/me/films.csv"}},
            ("custom", "your own table of texts and labels (films.csv, 12 rows)", None, None),
        ),
    ],
)
def test_the_data_set_is_named_as_the_hub_names_it(run, dataset):
    found = card._dataset(run)
    keys = ("dataset_type", "dataset_name", "dataset_config", "dataset_split")
    assert tuple(found.get(key) for key in keys) == dataset


def test_a_hub_model_is_the_base_model_and_a_folder_is_not(tmp_path):
    info = {"revision": "0" * 40, "content": "a" * 64, "embeds": False}
    found = read(card.render(write(tmp_path / "hub", model="owner/name", model_info=info), "int8-dynamic"))
    assert (found.data.base_model, found.data["base_model_relation"]) == ("owner/name", "quantized")
    local = write(tmp_path / "local", model="owner/name", model_info=info | {"revision": None})
    assert read(card.render(local, "int8-dynamic")).data.base_model is None


def test_the_text_sets_the_recipe_beside_the_baseline(folder):
    text = card.render(folder, "int8-dynamic")
    row = next(line for line in text.splitlines() if line.startswith("| p50 ms"))
    assert [cell.split()[0] for cell in row.strip("| ").split(" | ")[1:]] == ["10.9", "2.71", "4.02x"]
    assert "| disk MB | 90.0 | 22.5 | 0.25x |" in text
    score = next(line for line in text.splitlines() if line.startswith("| accuracy %"))
    assert [cell.split()[0] for cell in score.strip("| ").split(" | ")[2:]] == ["90.00", "+0.00"]
    assert "2 answers were gained and 2 lost" in text.lower()
    assert "A CPU &lt;b&gt;" in text


def intervals(text):
    """What the card says of its brackets."""
    return re.findall(r"Brackets hold[^.]*\.|Times and memory of[^.]*\.", text)


def test_intervals_are_told_over_the_recipes_own_processes_and_not_the_most_of_any(tmp_path):
    run = write(tmp_path / "run", int8_s=(*INT8_S, 0.0027, 0.0027), rounds=3)
    own = (
        "Brackets hold 95 % intervals: of times and memory over {} fresh processes, of scores over examples."
    )
    assert intervals(card.render(run, "fp32")) == [own.format(3)]
    assert intervals(card.render(run, "int8-dynamic")) == [own.format("int8-dynamic's 5 and fp32's 3")]
    alike = write(tmp_path / "alike")
    assert intervals(card.render(alike, "int8-dynamic")) == [own.format(3)]


def test_one_process_has_no_interval_of_times_to_tell_of(tmp_path):
    text = card.render(write(tmp_path / "run", fp32_s=FP32_S[:1], int8_s=INT8_S[:1]), "int8-dynamic")
    row = next(line for line in text.splitlines() if line.startswith("| p50 ms"))
    assert "[" not in row
    assert intervals(text) == [
        "Brackets hold 95 % intervals: of scores over examples.",
        "Times and memory of int8-dynamic and fp32 are of one process.",
    ]
    bare = {"metric": None, "task": None, "metrics": []}
    run = write(tmp_path / "bare", fp32_s=FP32_S[:1], int8_s=INT8_S[:1], **bare)
    assert intervals(card.render(run, "fp32")) == ["Times and memory of fp32 are of one process."]


def test_the_baseline_has_a_card_of_its_own(folder):
    text = card.render(folder, "fp32")
    assert "|  | fp32 |" in text
    assert "0.9" in text


def test_the_load_script_is_python_and_what_it_needs_is_named(folder):
    text = card.render(folder, "int8-dynamic")
    script = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert script
    assert {n.name for n in ast.parse(script[1]).body if isinstance(n, ast.FunctionDef)} >= {"predict"}
    assert "max_length=128" in script[1]
    assert "transformers==5.24.0" in text


def test_strings_from_outside_stay_strings(tmp_path):
    evil = "x\n---\nlicense: mit\n<script>alert(1)</script> [a](javascript:b)"
    host = HOST | {"cpu_model": "![i](http://e.vil)", "os": "\x1b[31mred"}
    run = write(tmp_path / "evil", model=evil, host=host, versions={"torch": "`2`\n# big", "evil": "<b>"})
    text = card.render(run, "int8-dynamic")
    found = read(text)
    assert "license" not in found.data.to_dict() or found.data.license is None
    assert "<script" not in found.text
    assert "\x1b" not in text
    assert "](http" not in text.replace(r"\]", "")
    assert "\n# big" not in text


OWN_KEYS = {"library_name", "pipeline_tag", "tags", "model-index"}


@pytest.mark.parametrize(
    ("evil", "shown"),
    [
        ("x\n---\nlicense: mit", "x --- license: mit"),
        ("x\r---\r\nlicense: mit", "x --- license: mit"),
        ("x\x85---\u2028license: mit", "x --- license: mit"),
        ("--- \n", "---"),
        ("a: b", "a: b"),
        ("# none", "# none"),
        ("- a", "- a"),
        ('it\'s "so"', 'it\'s "so"'),
        ("{a: [b", "{a: [b"),
        ("&a *a !!python", "&a *a !!python"),
        ("%YAML 1.1", "%YAML 1.1"),
        ("word " * 60 + "--- more", "word " * 60 + "--- more"),
    ],
)
def test_the_front_matter_has_its_own_keys_alone_whatever_the_names_are(tmp_path, evil, shown):
    need("huggingface_hub")
    import yaml

    data = {"rows": 400, "max_tokens": 128, "longest": 40, "source": evil}
    info = {"revision": "0" * 40, "content": "a" * 64, "embeds": False}
    run = write(tmp_path / "run", model=evil, task=evil, data=data, model_info=info)
    text = card.render(run, "int8-dynamic")
    assert text.startswith("---\n")
    front = text[4:].partition("\n---\n")[0]
    for found in (yaml.safe_load(front), read(text).data.to_dict()):
        assert set(found) == OWN_KEYS
        (entry,) = found["model-index"]
        assert entry["name"] == f"{shown}-int8-dynamic"
        (result,) = entry["results"]
        assert result["dataset"] == {"type": "custom", "name": f"{shown} ({shown}, 400 rows)"}
    assert "## Measured on cpu" in text[4:].partition("\n---\n")[2]


@pytest.mark.parametrize(
    ("model", "known"),
    [
        ("owner/name", True),
        ("bert-base-uncased", True),
        ("owner/name\n", False),
        ("owner/name/more", False),
        ("../name", False),
        ("https://e.vil/x", False),
        ("owner/na me", False),
    ],
)
def test_only_what_can_be_a_name_on_the_hub_is_a_base_model(model, known):
    run = {"model": model, "model_info": {"revision": "0" * 40}}
    assert card._hub_id(run) == (model if known else None)


def test_a_run_without_scores_has_a_card_without_model_index(tmp_path):
    run = write(tmp_path / "bare", metric=None, task=None, metrics=[])
    data = read(card.render(run, "int8-dynamic")).data.to_dict()
    assert "model-index" not in data


def test_a_near_miss_gets_a_suggestion_and_a_skipped_recipe_its_cause(folder):
    with pytest.raises(QtoolError, match="Did you mean 'int8-dynamic'"):
        card.render(folder, "int8-dynamc")
    with pytest.raises(QtoolError, match="needs a newer CPU"):
        card.render(folder, "bf16")


def test_a_run_that_does_not_say_what_the_recipe_is_is_an_error(tmp_path):
    with pytest.raises(QtoolError, match="does not hold what recipe"):
        card.render(write(tmp_path / "old", recipes={}), "int8-dynamic")


def test_without_huggingface_hub_the_error_names_the_pip_line(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(QtoolError, match="pip install huggingface_hub"):
        card.render(folder, "int8-dynamic")


def test_the_command_line_prints_the_card_and_wants_a_recipe(folder):
    done = qtool("report", folder, "--format", "card", "--recipe", "int8-dynamic")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("---\n")
    done = qtool("report", folder, "--format", "card")
    assert done.returncode == 2
    assert "--recipe" in done.stderr
