"""The job on a real model: eight recipes of a MiniLM classifier on the whole of SST-2's validation split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import need, qtool, shared

pytestmark = pytest.mark.slow
RECIPES = {
    *("fp32", "bf16", "int8-dynamic", "torchao-int8-weight", "fp8-weight"),
    *("bnb-nf4", "onnx-int8-dynamic", "openvino-int8"),
}
# What each recipe says it stores: the type of nearly all elements of the linear layers' weights.
LINEAR = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "int8-dynamic": "int8",
    "torchao-int8-weight": "int8",
    "fp8-weight": "float8_e4m3fn",
    "bnb-nf4": "nf4",
    "onnx-int8-dynamic": "int8",
    "openvino-int8": "int8",
}
EIGHT_BIT = ("int8-dynamic", "torchao-int8-weight", "fp8-weight", "onnx-int8-dynamic", "openvino-int8")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One sweep as the README shows it, with one round."""
    model, data = shared("models", "minilm-sst2"), shared("data", "glue")
    need("torch", "torchao", "bitsandbytes", "onnx", "onnxruntime", "openvino", "nncf", "evaluate", "sklearn")
    root = tmp_path_factory.mktemp("minilm")
    done = qtool(
        "sweep", model, "--task", "sst2", "--data", data, "--rounds", "1", "--out", root / "run",
        timeout_s=1500, QTOOL_CACHE=str(root / "cache"), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root / "run"


@pytest.fixture(scope="module")
def rows(run) -> dict[str, dict]:
    return {row["recipe"]: row for row in json.loads((run / "summary.json").read_text())["rows"]}


def _value(row: dict, metric: str) -> float:
    return row["metrics"][metric]["value"]


def test_all_eight_recipes_are_ok(rows):
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(RECIPES, "ok")


def test_the_baseline_is_right_on_774_of_872_sentences(run, rows):
    import numpy as np

    with np.load(run / "predictions" / "fp32-cpu.npz") as file:
        logits, labels = file["logits"], file["labels"]
    assert logits.shape == (872, 2)
    assert int((logits.argmax(axis=1) == labels).sum()) == 774
    assert _value(rows["fp32"], "accuracy") == 774 / 872


def test_the_labels_and_rows_are_the_files_own(run):
    import numpy as np

    lines = (shared("data", "glue") / "SST-2" / "dev.tsv").read_text().splitlines()[1:]
    with np.load(run / "predictions" / "fp32-cpu.npz") as file:
        assert file["ids"].tolist() == list(range(872))
        assert file["labels"].tolist() == [int(line.split("\t")[1]) for line in lines]


def test_the_audit_proves_every_precision(rows):
    for name, row in rows.items():
        elements = row["audit"]["linear_elements_by_dtype"]
        assert elements[LINEAR[name]] / sum(elements.values()) > 0.9, (name, elements)
    for name in (
        "int8-dynamic",
        "torchao-int8-weight",
        "fp8-weight",
        "bnb-nf4",
        "onnx-int8-dynamic",
        "openvino-int8",
    ):
        # 6 layers of 6 linear layers, less a head or a pooler that some leave alone
        assert sum(rows[name]["audit"]["changed_modules"].values()) >= 36, (name, rows[name]["audit"])


@pytest.mark.parametrize(
    ("recipe", "least", "most"),
    [("bf16", 0.49, 0.51), ("openvino-int8", 0.24, 0.27), ("onnx-int8-dynamic", 0.24, 0.27)],
)
def test_the_size_on_disk_is_the_precisions_share_of_the_baselines(rows, recipe, least, most):
    assert least <= _value(rows[recipe], "disk_bytes") / _value(rows["fp32"], "disk_bytes") <= most


def test_agreement_with_the_baseline_is_what_the_precision_allows(rows):
    assert _value(rows["fp32"], "agreement") == 1.0
    for name in EIGHT_BIT:
        assert _value(rows[name], "agreement") >= 0.95, name
    assert _value(rows["bnb-nf4"], "agreement") >= 0.93


def test_agreement_and_score_delta_are_recomputed_from_the_stored_logits(run, rows):
    import numpy as np

    def right(name):
        with np.load(run / "predictions" / f"{name}-cpu.npz") as file:
            return file["logits"].argmax(axis=1), file["labels"]

    base, labels = right("fp32")
    for name in RECIPES:
        predicted, _ = right(name)
        assert _value(rows[name], "agreement") == pytest.approx(np.mean(predicted == base))
        assert _value(rows[name], "score_delta") == pytest.approx(
            np.mean(predicted == labels) - np.mean(base == labels)
        )
