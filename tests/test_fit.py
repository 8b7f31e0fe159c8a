"""`qtool fit`: bytes by hand from shapes, places by hand from bytes, and what a user gets wrong."""

from __future__ import annotations

import json
import shutil

import pytest

from qtool import cli, estimate, fit, host, isolate, plugins, recipes, store
from qtool.core import QtoolError, Unavailable
from qtool.layers import Tensor
from qtool.report import fit as report
from qtool.summary import summarise
from tests import architectures
from tests.conftest import need, qtool
from tests.run_folder import Made, write_run

LINEAR = Tensor("l.weight", (96, 64), "float32", 4, "linear")  # 6144 weights in 96 rows, 96 blocks of 64
HEAD = Tensor("head.weight", (2, 64), "float32", 4, "linear", head=True)
WORDS = Tensor("words.weight", (100, 64), "float32", 4, "lookup", words=True)
NARROW = Tensor("bias_table.weight", (10, 16), "float32", 4, "lookup")
BIAS = Tensor("l.bias", (96,), "float32", 4)
IDS = Tensor("ids", (1, 64), "int64", 8, "buffer")

BYTES = [
    ("fp32", LINEAR, {"float32": 6144 * 4}),
    ("bf16-autocast", LINEAR, {"float32": 6144 * 4}),
    ("bf16", LINEAR, {"bfloat16": 6144 * 2}),
    ("fp16", BIAS, {"float16": 96 * 2}),
    ("int8-dynamic", LINEAR, {"int8": 6144, "float64": 96 * 8}),
    ("int8-dynamic", WORDS, {"float32": 6400 * 4}),
    ("int8-dynamic-embeddings", WORDS, {"uint8": 6400, "float32": 100 * (4 + 4)}),
    ("torchao-int8-weight", LINEAR, {"int8": 6144 + 96, "float32": 96 * 4}),
    ("torchao-int8-dynamic", WORDS, {"bfloat16": 6400 * 2}),
    ("fp8-weight", LINEAR, {"float8_e4m3fn": 6144, "float32": 96 * 4}),
    ("fp8-dynamic", LINEAR, {"float8_e4m3fn": 6144, "float32": 96 * 4}),
    ("bnb-int8", LINEAR, {"int8": 6144, "float32": 96 * 4}),
    ("bnb-int8", HEAD, {"bfloat16": 128 * 2}),
    ("bnb-nf4", LINEAR, {"uint8": 3072, "float32": (96 + 16) * 4}),
    ("bnb-fp4", HEAD, {"bfloat16": 128 * 2}),
    # 96 scales in bytes are one block of 256: its scale, a code of 256, the offset, the code of 16
    ("bnb-nf4-double", LINEAR, {"uint8": 3072 + 96, "float32": (1 + 256 + 1 + 16) * 4}),
    ("onnx-fp32", LINEAR, {"float32": 6144 * 4}),
    ("onnx-int8-dynamic", LINEAR, {"int8": 6144 + 96, "float32": 96 * 4}),
    ("onnx-int8-dynamic", WORDS, {"int8": 6400, "float32": 100 * 4}),
    ("onnx-int8-static", HEAD, {"int8": 128 + 2, "float32": 2 * 4}),
    ("openvino-fp32", WORDS, {"float32": 6400 * 4}),
    ("openvino-bf16", BIAS, {"float16": 96 * 2}),
    ("openvino-int8-weight", LINEAR, {"int8": 6144, "float16": 96 * 2}),
    ("openvino-int8", WORDS, {"int8": 6400, "float32": 100 * 4}),
    ("openvino-int4", LINEAR, {"int4": 3072, "float16": 6144 // 32 * 2}),
    ("openvino-int4", NARROW, {"uint8": 160 + 10, "float16": 10 * 2}),
    ("optimum-openvino-int8", LINEAR, {"int8": 6144, "float32": 96 * 4}),
    ("optimum-openvino-fp32", BIAS, {"float32": 96 * 4}),
]


@pytest.mark.parametrize(("name", "tensor", "expected"), BYTES, ids=[f"{n}-{t.name}" for n, t, _ in BYTES])
def test_a_tensor_takes_the_bytes_counted_by_hand(name, tensor, expected):
    recipe, _ = recipes.find(name)
    assert plugins.load("methods", recipe.method).weight_bytes(recipe, tensor) == expected


@pytest.mark.parametrize("name", [recipe.name for recipe in recipes.load_all()])
def test_every_recipe_of_the_book_is_estimated_and_leaves_buffers_alone(name):
    recipe, _ = recipes.find(name)
    assert estimate.total(recipe, [IDS]) == {
        "weight_bytes": 512,
        "weight_bytes_by_dtype": {"int64": 512},
    }


def test_options_that_change_the_layout_change_the_bytes():
    def told(name, tensor, **quantize):
        recipe, _ = recipes.find(name)
        recipe = recipe.model_copy(update={"quantize": recipe.quantize | quantize})
        return plugins.load("methods", recipe.method).weight_bytes(recipe, tensor)

    assert told("int8-dynamic", LINEAR, per_channel=False) == {"int8": 6144, "float64": 8}
    assert told("onnx-int8-dynamic", LINEAR, per_channel=False) == {"int8": 6145, "float32": 4}
    assert told("onnx-int8-dynamic", WORDS, embeddings=False) == {"float32": 25600}
    # rows of 64 in groups of 128 do not go: 64 is the largest smaller power of two that does
    assert told("openvino-int4", LINEAR, group_size=128) == {"int4": 3072, "float16": 96 * 2}
    assert told("openvino-int8", BIAS, fp16_weights=True) == {"float16": 192}


def test_a_method_that_does_not_tell_is_not_estimated(monkeypatch):
    recipe, _ = recipes.find("bf16")
    monkeypatch.delattr(plugins.load("methods", "torch_cast"), "weight_bytes")
    told = estimate.total(recipe, [LINEAR])
    assert told["weight_bytes"] is None
    assert told["weight_bytes_reason"] == "not estimated: method 'torch_cast' has no weight_bytes"
    assert estimate.error(told, 5.0)["error_ratio_reason"] == told["weight_bytes_reason"]


def test_the_error_is_relative_to_what_was_measured():
    assert estimate.error({"weight_bytes": 110}, 100)["error_ratio"] == pytest.approx(0.1)
    assert estimate.error({"weight_bytes": 90}, 100)["error_ratio"] == pytest.approx(-0.1)
    assert estimate.error({"weight_bytes": 90}, None)["error_ratio"] is None
    assert estimate.error(None, 100)["error_ratio_reason"] == "not estimated: the run has no shapes for it"


# -- places -------------------------------------------------------------------------------------------------


@pytest.fixture
def three():
    """Layers a, b and c, of which a place test says the sizes."""
    need("torch", "accelerate")
    import torch

    with torch.device("meta"):
        return torch.nn.Sequential(
            *(torch.nn.Linear(2, 2, bias=False) for _ in range(3)),
        )


SIZES = {"0.weight": 100, "1.weight": 200, "2.weight": 100}
BOTH = ("cpu", "disk")


def placed(model, memory, spills=BOTH, sizes=SIZES):
    from qtool import fitting

    fitting.stand_in(model, sizes)
    return fitting.place(model, sizes, memory, spills)


def test_all_of_it_fits_where_there_is_room_for_all(three):
    found = placed(three, {0: 1000, "cpu": 1000})
    assert found == {
        "fits": True,
        "resident_bytes": 400,
        "cpu_bytes": 0,
        "disk_bytes": 0,
        "moved_bytes": 0,
        "modules": {},
    }


def test_what_a_device_does_not_hold_crosses_the_bus_at_every_pass(three):
    # room for the largest layer (200) is kept: of 350, the first layer's 100 go in and the second's 200 do not,
    # because the 100 of the third must still find room
    found = placed(three, {0: 350, "cpu": 1000})
    assert (found["fits"], found["resident_bytes"], found["cpu_bytes"]) == (False, 100, 300)
    assert (found["moved_bytes"], found["modules"]) == (300, {"cpu": ["1", "2"]})


def test_what_a_host_does_not_hold_is_read_from_disk(three):
    found = placed(three, {"cpu": 350})
    assert (found["resident_bytes"], found["cpu_bytes"], found["disk_bytes"]) == (100, 0, 300)
    assert (found["moved_bytes"], found["modules"]) == (300, {"disk": ["1", "2"]})


def test_a_device_smaller_than_the_largest_layer_takes_nothing(three):
    found = placed(three, {0: 150, "cpu": 1000})
    assert (found["fits"], found["moved_bytes"]) == (False, None)
    assert "largest layer" in found["moved_bytes_reason"]


def test_weights_that_one_engine_holds_fit_whole_or_not_at_all(three):
    assert placed(three, {"cpu": 400}, None)["fits"]
    assert placed(three, {"cpu": 399}, None)["moved_bytes_reason"].startswith("one engine holds")
    assert not placed(three, {0: 399, 1: 399, "cpu": 10**6}, None)["fits"]


def test_a_method_says_where_its_weights_may_be_spilled(three):
    assert "cannot be kept on cpu" in placed(three, {0: 350, "cpu": 1000}, ())["moved_bytes_reason"]
    assert "cannot be kept on disk" in placed(three, {"cpu": 350}, ("cpu",))["moved_bytes_reason"]
    assert placed(three, {0: 350, "cpu": 1000}, ("cpu",))["moved_bytes"] == 300


def test_buffers_stay_with_the_computing(three):
    import torch

    three[1].register_buffer("ids", torch.empty(4, dtype=torch.int64, device="meta"))
    found = placed(three, {0: 350, "cpu": 1000}, sizes=SIZES | {"1.ids": 32})
    assert (found["resident_bytes"], found["moved_bytes"]) == (132, 300)


def test_tied_weights_are_held_once(three):
    from accelerate.utils.modeling import compute_module_sizes

    from qtool import fitting

    three[2].weight = three[0].weight
    fitting.stand_in(three, {"0.weight": 100, "1.weight": 200})
    assert three[2].weight is three[0].weight
    assert compute_module_sizes(three)[""] == 300
    fitting.stand_in(three, {"0.weight": 50, "1.weight": 60})
    assert compute_module_sizes(three)[""] == 110


# -- shapes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", architectures.ARCHITECTURES)
def test_the_empty_model_has_the_bytes_of_the_checkpoint(model_type, tmp_path):
    import torch
    from transformers import AutoModelForSequenceClassification

    from qtool import fitting, layers

    folder = architectures.make(tmp_path / model_type, model_type)
    real = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    parameters = {id(t): t.nbytes for t in real.parameters()}
    buffers = {id(t): t.nbytes for t in real.buffers()}
    tensors = layers.describe(fitting.empty(folder))
    told = {t.part == "buffer": 0 for t in tensors}
    for tensor in tensors:
        told[tensor.part == "buffer"] += tensor.elements * tensor.itemsize
    assert told[False] == sum(parameters.values())
    assert told.get(True, 0) == sum(buffers.values())
    words = [tensor for tensor in tensors if tensor.words]
    assert [tensor.shape for tensor in words] == [(architectures.VOCABULARY, architectures.HIDDEN)]
    linear = {t.name for t in tensors if t.part == "linear"}
    assert linear == {f"{name}.weight" for name, m in real.named_modules() if isinstance(m, torch.nn.Linear)}


def test_a_checkpoint_in_half_precision_is_described_in_float32(checkpoint, tmp_path):
    from qtool import fitting, layers

    folder = tmp_path / "half"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert {t.dtype for t in layers.describe(fitting.empty(folder))} == {"float32", "int64"}


# -- the verb -----------------------------------------------------------------------------------------------


@pytest.fixture
def in_process(monkeypatch):
    """The child's stage without a process of its own."""
    need("torch", "transformers", "accelerate")

    def run(stage, spec, **how):
        from qtool import worker

        try:
            return isolate.Outcome("ok", worker.STAGES[stage](json.loads(json.dumps(spec))))
        except QtoolError as error:
            return isolate.Outcome("user_error", {}, str(error))
        except Unavailable as error:
            return isolate.Outcome("unavailable", {}, str(error))

    monkeypatch.setattr(isolate, "run", run)
    monkeypatch.setattr(host, "gpus", lambda: [])


def test_fit_tells_weights_of_every_recipe_from_shapes_alone(in_process, checkpoint, tmp_path, capsys):
    from safetensors import safe_open

    (tmp_path / "model").mkdir()
    shutil.copy(checkpoint / "config.json", tmp_path / "model")  # no weights, no tokenizer
    assert cli.run(["fit", str(tmp_path / "model"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["recipe"]: row for row in found["recipes"]}
    assert set(rows) == {recipe.name for recipe in recipes.load_all()}
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        parameters = sum(file.get_tensor(name).size for name in file.keys())  # noqa: SIM118
    ids = 2 * 64 * 8  # position_ids and token_type_ids of BERT
    assert found["parameters"] == parameters
    assert rows["fp32"]["weight_bytes"] == found["float32_bytes"] == 4 * parameters + ids
    assert rows["bf16"]["weight_bytes"] == 2 * parameters + ids
    assert rows["fp32"]["float32_share"] == 1.0
    assert all(row["cpu"] is None or row["cpu"]["fits"] for row in rows.values())
    assert rows["fp32"]["device"] is None
    assert "--device-memory was not given" in rows["fp32"]["device_reason"]
    assert rows["fp8-dynamic"]["cpu"] is None
    assert rows["fp8-dynamic"]["cpu_reason"] == "runs on cuda only"
    assert rows["fp8-dynamic"]["weight_bytes"] < rows["bf16"]["weight_bytes"]
    assert rows["fp8-dynamic"]["not_here"]


def test_fit_names_what_spills_from_a_small_device(in_process, checkpoint, capsys):
    # the tiny BERT: tables of 64 wide rows, two layers of 33,472 parameters, a pooler of 4,160, a head of 130
    arguments = [
        "fit",
        str(checkpoint),
        "--device-memory",
        "300KB",
        "--recipe",
        "bnb-nf4",
        "--recipe",
        "onnx-*",
    ]
    assert cli.run([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == [{"name": "the device", "memory_bytes": 300_000, "planned_bytes": 270_000}]
    rows = {row["recipe"]: row for row in found["recipes"]}
    device = rows["fp32"]["device"]
    assert device["fits"] is False
    assert device["cpu_bytes"] == device["moved_bytes"] > 0
    # parameters are on either side, nothing is lost; what stays leaves room for the largest layer
    assert device["resident_bytes"] + device["moved_bytes"] == rows["fp32"]["weight_bytes"]
    assert rows["bnb-nf4"]["device"]["fits"] is True
    assert rows["onnx-int8-dynamic"]["device"] is None
    assert rows["onnx-int8-dynamic"]["device_reason"] == "runs on cpu only"
    assert "fp32 fits only by offload" in found["conclusion"][0]
    assert "not latency" in found["conclusion"][-1]
    assert cli.run(arguments) == 0
    told = capsys.readouterr().out
    assert "offload" in told
    assert "beside the device" in told
    assert "Activations grow with batch size" in told


def test_gpus_that_are_seen_are_the_devices(in_process, monkeypatch, checkpoint, capsys):
    gpu = {"name": "A GPU", "memory_bytes": 10**9, "capability": 8.9, "driver": "1"}
    monkeypatch.setattr(host, "gpus", lambda: [gpu, gpu | {"memory_bytes": None}])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cli.run(["fit", str(checkpoint), "--recipe", "fp32", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert [device["planned_bytes"] for device in found["devices"]] == [900_000_000]
    assert found["recipes"][0]["device"]["fits"] is True
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cli.run(["fit", str(checkpoint), "--recipe", "fp32", "--json"])
    assert json.loads(capsys.readouterr().out)["devices"] == []


BAD = [
    ("{m} --device-memory 8", "the unit is missing"),
    ("{m} --device-memory 8gb", "Did you mean 'GB'?"),
    ("{m} --device-memory=-8GB", "out of range"),
    ("{m} --device-memory 0.0001KB", "less than a byte"),
    ("{m} --device-memory lots", "expected a number with"),
    ("{m} --recipe bf61", "Did you mean 'bf16'?"),
    ("{m} --revision main", "is for hub ids"),
    ("{m} --devise-memory 8GB", "Did you mean '--device-memory'?"),
    ("", "MODEL"),
    ("{d}/nothing", "is not a model folder"),
    ("some/model", "not in the local cache and HF_HUB_OFFLINE is set"),
    ("{d}/empty", "has no config.json"),
    ("{d}/onnx", "holds an exported graph (onnx)"),
    ("{d}/zero", "cannot make the model of"),
    ("{d}/code", "needs custom code"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD)
def test_a_bad_input_is_one_line_and_exit_code_2(in_process, checkpoint, arguments, says, tmp_path, capsys):
    config = json.loads((checkpoint / "config.json").read_text())
    for name, changes in (
        ("empty", None),
        ("onnx", {}),
        ("zero", {"num_attention_heads": 0}),
        ("code", {"auto_map": {}}),
    ):
        (tmp_path / name).mkdir()
        if changes is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "onnx" / "model.onnx").write_bytes(b"")
    with pytest.raises(SystemExit) as left:
        cli.main(["fit", *arguments.format(m=checkpoint, d=tmp_path).split()])
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("qtool: ")]
    assert left.value.code == 2
    assert len(lines) == 1
    assert says in lines[0], lines[0]


def test_a_missing_library_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "installed", lambda name: None)
    with pytest.raises(QtoolError, match=r"needs torch. Try: pip install 'qtool\[pytorch\]'"):
        fit.answer(fit.Question(str(tmp_path), None, (), None))


# -- what a run says of it afterwards -----------------------------------------------------------------------


def test_a_row_carries_the_estimate_beside_what_was_measured(tmp_path):
    told = {
        "fp32": {"weight_bytes": 90_900_000},
        "mine": {"weight_bytes": None, "weight_bytes_reason": "why"},
    }
    made = {"fp32": Made((0.01,) * 3, disk_bytes=90_000_000), "mine": Made((0.01,) * 3)}
    run = write_run(tmp_path / "run", made, metric=None, run={"fit": told})
    summary = summarise(run)
    rows = {row["recipe"]: row["fit"] for row in summary["rows"]}
    assert rows["fp32"] == {
        "weight_bytes": 90_900_000,
        "measured_bytes": 90_000_000,
        "peak_bytes": 400e6,
        "error_ratio": pytest.approx(0.01),
    }
    assert (rows["mine"]["error_ratio"], rows["mine"]["error_ratio_reason"]) == (None, "why")
    sentence = report.compared(summary["rows"])
    assert (
        "for 1 recipe: off by at most 1.0 %, fp32 with 90.9 MB estimated and 90.0 MB measured; its process peaked at 400 MB"
        in sentence
    )
    from qtool.report import render

    for form in ("table", "md"):
        assert "off by at most 1.0 %" in render(run, form).replace("\\", "")


def test_a_run_without_estimates_says_nothing_of_them(tmp_path):
    run = write_run(tmp_path / "run", {"fp32": Made((0.01,) * 3)}, metric=None)
    summary = summarise(run)
    assert summary["rows"][0]["fit"] is None
    assert report.compared(summary["rows"]) == ""


@pytest.mark.parametrize(
    "told", [{"fp32": {"weight_bytes": "many"}}, {"fp32": 3}, {"fp32": {"weight_bytes": -1}}, []]
)
def test_a_run_with_impossible_estimates_is_refused(tmp_path, told):
    run = write_run(tmp_path / "run", {"fp32": Made((0.01,) * 3)}, metric=None, run={"fit": told})
    with pytest.raises(QtoolError, match=r"run.json: fit"):
        store.read_run(run)


def test_strings_of_a_model_do_not_steer_the_terminal():
    row = {
        "recipe": "a\x1b[31m",
        "weight_bytes": 10**6,
        "float32_share": 1.0,
        "largest_layer": {"name": "x\ny", "bytes": 10},
        "cpu": None,
        "device": {
            **{"fits": False, "resident_bytes": 1, "cpu_bytes": 2, "disk_bytes": 0, "moved_bytes": 2},
            "modules": {"cpu": [f"m\x1b{i}" for i in range(6)]},
        },
        "not_here": None,
    }
    found = {
        **{"model": "m\x07", "model_type": "bert", "parameters": 10**6, "float32_bytes": 4 * 10**6},
        **{"recipes": [row], "conclusion": [], "assumptions": []},
    }
    told = report.render(found)
    assert all(c.isprintable() or c == "\n" for c in told)
    assert "and 2 more" in told


def test_the_conclusion_says_what_fits_whole_by_offload_and_not_at_all():
    def row(name, fits, moved):
        return {
            "recipe": name,
            "cpu": {"fits": True, "moved_bytes": 0},
            "device": {"fits": fits, "moved_bytes": moved},
        }

    rows = [row("a", True, 0), row("b", False, 5), row("c", False, None), row("d", True, 0)]
    devices = [{"name": "A GPU", "planned_bytes": 7_200_000_000}]
    first, second, third = fit.conclude(rows, 16 * 10**9, devices)
    assert first == (
        "On A GPU (7.2 GB planned with) a, d fit whole; b fits only by offload; c fits not at all."
    )
    assert second == "In this host's memory (16 GB free) all 4 recipes fit whole."
    assert third.startswith("Offload solves fit, not latency")


def test_a_recipe_that_was_not_built_has_no_error(tmp_path):
    made = {"fp32": Made((0.01,) * 3, bad={"build": ("failed", "it broke", None)})}
    run = write_run(tmp_path / "run", made, metric=None, run={"fit": {"fp32": {"weight_bytes": 5}}})
    assert summarise(run)["rows"][0]["fit"]["error_ratio"] is None


@pytest.mark.slow
def test_fit_answers_in_a_child_and_the_parent_loads_no_library(checkpoint):
    done = qtool("fit", checkpoint, "--device-memory", "1GiB", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "recipes fit whole" in done.stdout
