"""MODEL as an exported graph: what is accepted, what is refused, and a sweep whose baseline is the graph itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qtool import cli, graphs, models, plugins, recipes
from qtool.core import BuildJob, QtoolError
from tests.conftest import make_checkpoint, need
from tests.test_sweep import BASE, make_quick, row_of, summary_of

KINDS = {"onnx": "onnx-fp32", "openvino": "openvino-fp32"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder for each kind, as an export leaves it: graph, config and tokenizer."""
    need("torch", "transformers", "onnx", "onnxscript", "onnxruntime", "openvino", "nncf")
    root = tmp_path_factory.mktemp("exported")
    source = make_checkpoint(root / "source")
    for kind, name in KINDS.items():
        (root / kind).mkdir()
        recipe = recipes.find(name)[0]
        plugins.load("methods", recipe.method).build(BuildJob(source, root / kind, recipe, [], 1))
        for path in models.find_tokenizer(source):
            shutil.copyfile(path, root / kind / path.name)
    return root


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_graph_is_described_as_its_checkpoint_is(exported, kind):
    source = models.check(exported / "source", None)
    found = graphs.check(exported / kind, None, graphs.kind(exported / kind) or "")
    assert (found.source, found.id2label, found.max_tokens) == (kind, source.id2label, source.max_tokens)
    # an export leaves out what no logit depends on and adds constants of its own
    assert found.weight_bytes == pytest.approx(source.weight_bytes, rel=0.15)


def test_a_folder_with_weights_for_pytorch_is_a_checkpoint_whatever_lies_beside(exported):
    assert graphs.kind(exported / "source") is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_that_does_not_fit_its_config_is_refused(exported, kind, tmp_path):
    folder = Path(shutil.copytree(exported / kind, tmp_path / kind))
    config = json.loads((folder / "config.json").read_text())
    config["id2label"] = {"0": "a", "1": "b", "2": "c"}
    config["label2id"] = {"a": 0, "b": 1, "c": 2}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(QtoolError, match=r"has 2 outputs, config\.json names 3 classes"):
        graphs.check(folder, None, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_graph_is_refused(exported, kind, tmp_path):
    folder = Path(shutil.copytree(exported / kind, tmp_path / kind))
    (folder / graphs.FILES[kind]).write_bytes(b"no graph")
    with pytest.raises(QtoolError, match="cannot open"):
        graphs.check(folder, None, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "other"), [("onnx", "onnx-int8-dynamic"), ("openvino", "openvino-int8-weight")]
)
def test_a_sweep_of_a_graph_measures_its_family_against_itself(
    exported, kind, other, table, tmp_path, monkeypatch
):
    make_quick(monkeypatch, exported / kind, table, tmp_path)
    out = tmp_path / "run"
    flags = ["--recipe", "bf16", "--recipe", other, "--out", str(out), "--data", str(table)]
    assert cli.run(["sweep", str(exported / kind), *flags, *BASE]) == 0
    summary = summary_of(out)
    assert summary["baseline"] == KINDS[kind]
    status = {row["recipe"]: (row["status"], row["cause"]) for row in summary["rows"]}
    assert status[KINDS[kind]] == status[other] == ("ok", None)
    assert status["bf16"] == ("skipped", f"starts from a checkpoint, found an {kind} model")
    assert "fp32" not in status
    assert row_of(out, other)["metrics"]["speedup"]["value"] is not None
