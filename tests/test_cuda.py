"""What CUDA needs, by stand-ins on a CPU: why a recipe cannot run, providers, CUDA graphs, padded rows, memory faults."""

from __future__ import annotations

import ast
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qtool import cuda, export, host, recipes, worker
from qtool.core import QtoolError
from qtool.runtimes import _graphs, _providers
from tests.conftest import need

H200 = {"name": "a GPU", "memory_bytes": 141 * 10**9, "capability": 9.0, "driver": "580.1"}
A100 = H200 | {"name": "an older GPU", "capability": 8.0}


@pytest.fixture
def machine(monkeypatch):
    """Say which GPUs and libraries there are."""

    def become(*gpus: dict, installed: dict[str, str | None] | None = None) -> None:
        versions = {"pynvml": "13.0", "torch": "2.13.0", "onnxruntime": "1.32.0"} | (installed or {})
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(host, "gpus", lambda: list(gpus))
        monkeypatch.setattr(host, "installed", lambda name: versions.get(name, "1"))
        monkeypatch.setattr(cuda, "_has_cuda_provider", lambda: True)

    return become


def why(name: str) -> str:
    return str(recipes.why_not(recipes.find(name)[0], "cuda"))


def test_no_driver_a_silent_driver_and_missing_bindings_are_told_apart(machine, tmp_path, monkeypatch):
    machine()
    assert "no NVIDIA driver answers" in str(cuda.no_gpu(tmp_path))
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    assert "the loaded NVIDIA driver shows none" in str(cuda.no_gpu(tmp_path))
    machine(installed={"pynvml": None})
    reason, fix = cuda.no_gpu(tmp_path) or ("", "")
    assert "a driver is loaded, but NVML's bindings are missing" in reason
    assert "pip install 'qtool[cuda]'" in fix
    assert "(NVML's bindings are missing)" in str(cuda.no_gpu(tmp_path / "elsewhere"))
    machine(H200)
    assert cuda.no_gpu(tmp_path) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "CUDA_VISIBLE_DEVICES='-1' hides" in str(cuda.no_gpu(tmp_path))


def test_every_cuda_recipe_can_run_where_everything_is_there(machine):
    machine(H200)
    for recipe in recipes.load_all():
        if "cuda" in recipe.devices:
            assert recipes.why_not(recipe, "cuda") is None, recipe.name


def test_an_older_gpu_is_too_old_for_dynamic_fp8_alone(machine):
    machine(A100)
    assert why("fp8-dynamic") == ("needs CUDA capability 8.9, found 8.0 (an older GPU): use a newer GPU")
    others = [
        recipe for recipe in recipes.load_all() if "cuda" in recipe.devices and recipe.name != "fp8-dynamic"
    ]
    assert len(others) >= 15
    assert all(recipes.why_not(recipe, "cuda") is None for recipe in others)


def test_a_cpu_build_of_torch_and_an_onnxruntime_without_cuda_are_reasons(machine, monkeypatch):
    machine(H200, installed={"torch": "2.13.0+cpu"})
    assert why("bf16").startswith(
        "needs PyTorch built for CUDA, found 2.13.0+cpu: pip install torch==2.13.0 "
    )
    machine(H200)
    monkeypatch.setattr(cuda, "_has_cuda_provider", lambda: False)
    assert "found onnxruntime 1.32.0 without it" in why("onnx-fp32")
    assert "pip install onnxruntime-gpu" in why("onnx-fp32")
    assert recipes.why_not(recipes.find("bf16")[0], "cuda") is None


def test_the_cuda_provider_is_looked_for_as_a_file(tmp_path, monkeypatch):
    (tmp_path / "capi").mkdir()
    (tmp_path / "__init__.py").write_text("")
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: spec)
    assert not cuda._has_cuda_provider()
    (tmp_path / "capi/libonnxruntime_providers_cuda.so").write_text("")
    assert cuda._has_cuda_provider()


# ONNX Runtime


def test_a_session_that_fell_back_to_the_cpu_is_an_error():
    both = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    assert _providers.check(both, both[0]) == both[0]
    with pytest.raises(RuntimeError, match="runs on CPUExecutionProvider, asked for CUDAExecutionProvider"):
        _providers.check(["CPUExecutionProvider"], "CUDAExecutionProvider")


def subgraph(provider: str, *operators: str) -> types.SimpleNamespace:
    nodes = [types.SimpleNamespace(op_type=name) for name in operators]
    return types.SimpleNamespace(ep_name=provider, get_nodes=lambda: nodes)


def test_products_on_the_cpu_are_an_error_and_arithmetic_on_shapes_is_none():
    products = {"MatMul", "Gemm"}
    found = _providers.assigned(
        [
            subgraph("CUDA", "MatMul", "MatMul", "Add"),
            subgraph("CPU", "Shape", "Concat"),
            subgraph("CPU", "Shape"),
        ]
    )
    assert found == {"CUDA": Counter(MatMul=2, Add=1), "CPU": Counter(Shape=2, Concat=1)}
    _providers.refuse_products_elsewhere(found, "CUDA", products)
    found = _providers.assigned([subgraph("CUDA", "Gemm"), subgraph("CPU", "MatMul", "MatMul", "Shape")])
    with pytest.raises(RuntimeError, match="put 2 MatMul on CPU, asked for CUDA"):
        _providers.refuse_products_elsewhere(found, "CUDA", products)


def test_the_engine_tells_where_its_nodes_run(tmp_path):
    need("onnxruntime", "onnx")
    import onnxruntime as ort
    from onnx import TensorProto, helper, save

    value = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in "ab"}
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", "a"], ["b"])], "g", [value["a"]], [value["b"]]
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(made, tmp_path / "m.onnx")
    settings = ort.SessionOptions()
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(
        str(tmp_path / "m.onnx"), settings, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    found = _providers.assigned(session.get_provider_graph_assignment_info())
    assert found == {"CPUExecutionProvider": Counter(MatMul=1)}


# CUDA graphs


def test_reduce_overhead_is_for_cuda_alone(tmp_path):
    recipe = recipes.find("bf16-cudagraphs")[0]
    assert recipe.devices == ["cuda"]
    recipes.check(recipe)
    with pytest.raises(QtoolError, match="a CPU does not have"):
        recipes.check(recipe.model_copy(update={"devices": ["cpu", "cuda"]}))


def test_a_shape_is_recorded_before_its_first_answer_and_played_back_after_it(monkeypatch):
    need("torch")
    import torch

    told: list[str] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append("begin"))
    config = torch._inductor.config.triton
    before = config.cudagraph_or_error, config.cudagraph_dynamic_shape_warn_limit

    def run(**inputs: torch.Tensor) -> int:
        told.append(f"call of {inputs['input_ids'].shape[1]}")
        return len(told)

    try:
        recorded = _graphs.Recorded(run)
        assert config.cudagraph_or_error is True
        five, six = torch.ones(1, 5), torch.ones(1, 6)
        assert recorded(input_ids=five) == 6  # warm up, record, play back
        assert told == ["begin", "call of 5"] * 3
        recorded(input_ids=five)
        assert told[6:] == ["begin", "call of 5"]
        recorded(input_ids=six)
        recorded(input_ids=five)
        assert told[8:] == ["begin", "call of 6"] * 3 + ["begin", "call of 5"]
    finally:
        config.cudagraph_or_error, config.cudagraph_dynamic_shape_warn_limit = before


def node(*children: types.SimpleNamespace) -> types.SimpleNamespace:
    return types.SimpleNamespace(children={1: list(children)} if children else {})


def test_recorded_graphs_are_counted_with_those_behind_others():
    assert _graphs.count(None) == {"cuda_graphs": "none recorded"}
    assert _graphs.count(types.SimpleNamespace(roots={})) == {"cuda_graphs": "none recorded"}
    manager = types.SimpleNamespace(roots={7: [node(), node(node(node()))], 8: [node()]})
    assert _graphs.count(manager) == {"cuda_graphs": "recorded", "cuda_graphs_recorded": "5"}


def test_the_names_of_pytorch_that_cuda_graphs_need_are_there():
    need("torch")
    import torch._inductor.config as inductor
    from torch._inductor import cudagraph_trees

    assert inductor.triton.cudagraph_or_error is False
    assert hasattr(inductor.triton, "cudagraph_dynamic_shape_warn_limit")
    source = Path(cudagraph_trees.__file__).read_text()
    assert "self.roots: dict[FunctionID, list[CUDAGraphNode]]" in source
    assert "create_if_none_exists" in source


# torchao


@pytest.mark.parametrize("shape", [(1, 64), (1, 5, 64), (3, 7, 64)])
def test_rows_of_zeros_leave_an_int8_layer_exactly_as_it_was(shape, monkeypatch):
    need("torch", "torchao")
    import torch
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    from qtool.methods import torchao

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.ReLU(), torch.nn.Linear(24, 2)).bfloat16()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    rows: list[int] = []
    real = torch.nn.functional.linear
    x = torch.randn(*shape, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        torchao.suit(model, "cpu")
        assert type(model[0]) is torch.nn.Linear
        torchao.suit(model, "cuda")
        assert type(model[0]).__name__ == "PaddedLinear"

        def seen(*given: torch.Tensor) -> torch.Tensor:
            rows.append(given[0].shape[0])
            return real(*given)

        monkeypatch.setattr(torch.nn.functional, "linear", seen)
        assert torch.equal(model(x), expected)
    assert rows == [x[..., 0].numel() + 16] * 2


def test_an_exported_script_multiplies_more_rows_too_and_so_does_a_hooked_layer():
    need("torch", "torchao", "accelerate")
    import torch
    from accelerate.hooks import ModelHook, add_hook_to_module
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    recipe = recipes.find("torchao-int8-dynamic")[0]
    script = export.load_script(recipe, "cuda", 128)
    assert "suit(" not in export.load_script(recipe, "cpu", 128)
    (function,) = [
        node for node in ast.parse(script).body if isinstance(node, ast.FunctionDef) and node.name == "suit"
    ]
    scope: dict[str, Any] = {}
    exec(ast.unparse(function), scope)
    assert script.index("def suit") < script.index("suit(model, 'cuda')") < script.index("def predict")
    model = torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.Linear(24, 2)).bfloat16()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    add_hook_to_module(model[0], ModelHook())
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        expected = model(x)
        scope["suit"](model, "cuda")
        assert {type(layer).__name__ for layer in model} == {"PaddedLinear"}
        assert model[0]._old_forward.__func__ is type(model[0]).forward
        assert torch.equal(model(x), expected)


@pytest.mark.slow
def test_rows_of_zeros_stay_one_compiled_graph_for_texts_of_every_length():
    need("torch", "torchao")
    import torch
    from torch._dynamo.utils import counters
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    from qtool.methods import torchao

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).bfloat16()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    inputs = [torch.randn(2, tokens, 64, dtype=torch.bfloat16) for tokens in (5, 7, 30)]
    before = counters["stats"]["unique_graphs"]
    with torch.inference_mode():
        expected = [model(x).float() for x in inputs]
        torchao.suit(model, "cuda")
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
        for x, wanted in zip(inputs, expected, strict=True):
            # fused kernels round elsewhere: bfloat16 has 8 bits, and sums of 64 products reach about 2
            assert torch.allclose(compiled(x).float(), wanted, atol=0.05)
    assert counters["stats"]["unique_graphs"] - before == 1


def test_weights_alone_in_int8_need_no_more_rows():
    need("torch", "torchao")
    import torch
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    from qtool.methods import torchao

    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
    quantize_(model, Int8WeightOnlyConfig())
    torchao.suit(model, "cuda")
    assert type(model[0]) is torch.nn.Linear


def test_only_what_no_cpu_computes_is_built_on_the_gpu():
    from qtool import plugins

    needing = {
        recipe.name
        for recipe in recipes.load_all()
        if getattr(plugins.load("methods", recipe.method), "needs_gpu", lambda recipe: False)(recipe)
    }
    assert needing == {"fp8-dynamic"}
    assert all(recipes.find(name)[0].devices == ["cuda"] for name in needing)


# memory faults

ORT_FAULT = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running MatMul node."
    " onnxruntime::BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size 939524096"
)


@pytest.mark.parametrize(
    ("message", "device", "on_gpu"),
    [
        (
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.6 GiB",
            "cuda",
            True,
        ),
        (ORT_FAULT, "cuda", True),
        # the arena of host memory says the same
        (ORT_FAULT, "cpu", False),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cuda", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None, True),
        ("CUDA failure 2: out of memory ; GPU=0", "cuda", True),
        ("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory", "cuda", False),
    ],
)
def test_every_librarys_memory_fault_is_oom_with_a_next_step(message, device, on_gpu):
    assert worker._is_oom(RuntimeError(message))
    answer = worker._oom(message, device)
    assert answer["status"] == "oom"
    assert ("GPU with more memory" in answer["next_step"]) is on_gpu


def test_pytorchs_own_class_is_oom_and_another_cuda_error_is_not():
    need("torch")
    import torch

    assert worker._is_oom(torch.OutOfMemoryError("Tried to allocate 20 MiB"))
    assert not worker._is_oom(RuntimeError("CUDA error: device-side assert triggered"))
    assert not worker._is_oom(RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED"))
