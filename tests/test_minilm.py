"""The job on a real model: the whole book on a MiniLM classifier and the whole of SST-2's validation split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qtool import host
from tests.conftest import need, qtool, shared

pytestmark = pytest.mark.slow
# What each recipe says it stores: the type of nearly all elements of the linear layers' weights.
LINEAR = {
    **dict.fromkeys(["fp32", "fp32-disk-offload", "fp32-compile"], "float32"),
    **dict.fromkeys(["bf16-autocast", "fp16-autocast"], "float32"),
    **dict.fromkeys(["onnx-fp32", "openvino-fp32"], "float32"),
    **dict.fromkeys(["bf16", "bf16-compile"], "bfloat16"),
    **dict.fromkeys(["fp16", "openvino-bf16"], "float16"),
    **dict.fromkeys(["int8-dynamic", "int8-dynamic-embeddings"], "int8"),
    **dict.fromkeys(["torchao-int8-weight", "torchao-int8-dynamic", "bnb-int8"], "int8"),
    **dict.fromkeys(["onnx-int8-dynamic", "onnx-int8-static"], "int8"),
    **dict.fromkeys(["openvino-int8-weight", "openvino-int8"], "int8"),
    "fp8-weight": "float8_e4m3fn",
    **dict.fromkeys(["bnb-nf4", "bnb-nf4-double"], "nf4"),
    "bnb-fp4": "fp4",
    "openvino-int4": "int4",
}
if not host.cpu_flags() & {"avx512_bf16", "amx_bf16"}:
    del LINEAR["openvino-bf16"]
RECIPES = set(LINEAR)
EIGHT_BIT = {name for name, kind in LINEAR.items() if kind in ("int8", "float8_e4m3fn")}
FOUR_BIT = {name for name, kind in LINEAR.items() if kind in ("nf4", "fp4", "int4")}
# For a GPU alone, and in an environment of their own.
SKIPPED = {
    "fp8-dynamic",
    "fp16-auto",
    "bf16-cudagraphs",
    "optimum-openvino-fp32",
    "optimum-openvino-int8",
    "openvino-bf16",
} - RECIPES


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """One sweep as the README shows it, with one round."""
    model, data = shared("models", "minilm-sst2"), shared("data", "glue")
    need("torch", "torchao", "bitsandbytes", "onnx", "onnxruntime", "openvino", "nncf", "evaluate", "sklearn")
    root = tmp_path_factory.mktemp("minilm")
    done = qtool(
        "sweep", model, "--task", "sst2", "--data", data, "--rounds", "1", "--out", root / "run",
        timeout_s=2400, QTOOL_CACHE=str(root / "cache"), HF_HUB_OFFLINE="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root / "run"


@pytest.fixture(scope="module")
def rows(run) -> dict[str, dict]:
    return {row["recipe"]: row for row in json.loads((run / "summary.json").read_text())["rows"]}


def _value(row: dict, metric: str) -> float:
    return row["metrics"][metric]["value"]


def test_every_recipe_of_the_book_is_ok_or_skipped_for_a_true_reason(rows):
    assert {name: (row["status"], row["cause"]) for name, row in rows.items() if name not in SKIPPED} == (
        dict.fromkeys(RECIPES, ("ok", None))
    )
    assert "8.9" in rows["fp8-dynamic"]["cause"]
    for name in ("optimum-openvino-fp32", "optimum-openvino-int8"):
        assert (rows[name]["status"], rows[name]["cause"]) == ("skipped", "needs optimum.intel")


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
    for name in RECIPES:
        audit = rows[name]["audit"]
        elements = audit["linear_elements_by_dtype"]
        assert elements[LINEAR[name]] / sum(elements.values()) > 0.9, (name, elements)
        if name in EIGHT_BIT | FOUR_BIT:
            # 6 layers of 6 linear layers, less a head or a pooler that some leave alone
            assert sum(audit["changed_modules"].values()) >= 36, (name, audit)


@pytest.mark.parametrize(
    ("recipe", "most"),
    [
        ("bf16", 0.51),
        ("int8-dynamic-embeddings", 0.30),
        ("onnx-int8-dynamic", 0.27),
        ("openvino-int8", 0.27),
        ("openvino-int8-weight", 0.27),
        ("openvino-int4", 0.20),
    ],
)
def test_the_size_on_disk_is_the_precisions_share_of_the_baselines(rows, recipe, most):
    assert _value(rows[recipe], "disk_bytes") / _value(rows["fp32"], "disk_bytes") <= most


def test_agreement_with_the_baseline_is_what_the_precision_allows(rows):
    assert _value(rows["fp32"], "agreement") == 1.0
    for names, least in ((EIGHT_BIT, 0.95), (FOUR_BIT, 0.93)):
        found = {name: _value(rows[name], "agreement") for name in names}
        assert min(found.values()) >= least, found


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
