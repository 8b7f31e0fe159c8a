"""Placement: what a recipe may ask for, what Accelerate's hooks really move, and a sweep that offloads to disk."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import host, plan, plugins, recipes
from qtool.core import Batch, BuildJob, Loaded, QtoolError, Recipe, Unavailable
from tests.conftest import make_checkpoint, need, qtool, shared

DISK = {"device_map": {"": "disk"}}


def recipe_of(placement: dict[str, Any], **parts: Any) -> Recipe:
    own = {"name": "t", "description": "t", "source": "t", "method": "torch_cast", "runtime": "pytorch"}
    return Recipe.model_validate(own | {"placement": placement} | parts)


@pytest.mark.parametrize(
    "placement",
    [
        {"device_map": "auto"},
        {"device_map": "sequential", "max_memory": {"cpu": "200MB"}},
        DISK,
        {"device_map": {"bert": "disk", "classifier": "cpu"}, "offload_buffers": True},
    ],
)
def test_what_accelerate_takes_is_a_placement(placement):
    recipes.check(recipe_of(placement))


@pytest.mark.parametrize("device_map", ["balanced", "balanced_low_0", {"": 0}, {"": "cuda"}, {"": "cpu"}])
def test_gpus_are_named_by_number_or_as_cuda(device_map):
    recipes.check(recipe_of({"device_map": device_map}, devices=["cuda"]))


INT8 = {"method": "torchao", "quantize": {"scheme": "int8_weight_only"}}
NF4 = {"method": "bitsandbytes", "quantize": {"scheme": "nf4"}, "dtype": "bfloat16"}
ONNX = {"method": "onnx", "runtime": "onnxruntime"}


@pytest.mark.parametrize(
    ("placement", "parts", "says"),
    [
        ({"device_mpa": "auto"}, {}, "unknown key 'device_mpa'. Did you mean 'device_map'"),
        ({"device_map": "gpu"}, {}, "placement of runtime 'pytorch': device_map"),
        ({"device_map": {"": "tape"}}, {}, "placement of runtime 'pytorch': device_map"),
        ({"device_map": {}}, {}, "name a place"),
        ({"max_memory": {"cpu": "200"}}, {}, "max_memory of cpu: '200': the unit is missing"),
        ({"max_memory": {"cpu": "2 XB"}}, {}, "unknown unit 'XB'"),
        ({"max_memory": {"disk": "2GB"}}, {}, "'disk' is neither cpu nor a GPU's number"),
        ({"max_memory": {0: "2GB"}}, {}, "names GPU 0, and devices has cpu. Set devices: [cuda]"),
        ({"device_map": {"": 1}}, {"devices": ["cpu", "cuda"]}, "names GPU 1, and devices has cpu"),
        (
            DISK | {"max_memory": {"cpu": "2GB"}},
            {},
            "max_memory has no effect beside a place for each module",
        ),
        (DISK, {"compile": {"dynamic": True}}, "hooks cannot be in one compiled graph"),
        (DISK, INT8, "'torchao' cannot be offloaded to disk, cpu only"),
        (DISK, NF4, "'bitsandbytes' cannot be offloaded to disk, nowhere"),
        ({"device_map": {"": "cpu"}}, NF4 | {"devices": ["cuda"]}, "cannot be offloaded to cpu"),
        ({"device_map": "auto"}, {"method": "torch_dynamic"}, "packs its weights out of Accelerate's sight"),
        ({"device_map": "auto"}, ONNX, "runtime 'onnxruntime' does not place weights"),
    ],
)
def test_what_does_not_combine_is_refused_before_any_work(placement, parts, says):
    with pytest.raises(QtoolError, match=r"^[^\n]*$") as caught:
        recipes.check(recipe_of(placement, **parts))
    assert says in str(caught.value)


def test_a_recipe_is_the_same_after_a_journey_through_json_and_shares_its_artifact():
    placed = recipe_of({"device_map": {"": 0}, "max_memory": {}}, devices=["cuda"])
    limited = recipe_of({"max_memory": {0: "8GB", "cpu": "200MB"}}, devices=["cuda"])
    for recipe in (placed, limited):
        assert Recipe(**json.loads(json.dumps(recipe.model_dump()))) == recipe
    plain = recipe_of({})
    assert plain.content() == placed.content() == limited.content()
    prints = {plan._deployment(recipe, "artifact") for recipe in (plain, placed, limited)}
    assert len(prints) == 3


def test_without_a_limit_a_cpu_gives_what_is_free_and_uses_no_gpu(monkeypatch):
    need("torch")
    from qtool.runtimes import _placement

    monkeypatch.setattr(host, "available_bytes", lambda: 7_000)
    assert _placement.room({}, "cpu") == {"cpu": 7_000}
    assert _placement.room({"cpu": 500}, "cpu") == {"cpu": 500}
    # a named GPU: the others are left out, as Accelerate has it, and nobody has to ask a driver
    assert _placement.room({1: 900}, "cuda") == {"cpu": 7_000, 1: 900}


def test_a_gpu_without_a_limit_is_filled_as_far_as_the_estimate_plans(monkeypatch):
    need("torch")
    import torch

    from qtool import fit
    from qtool.runtimes import _placement

    monkeypatch.setattr(host, "available_bytes", lambda: 7_000)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (1_000 * (number + 1), 5_000))
    assert _placement.room({}, "cuda") == {"cpu": 7_000, 0: 900, 1: 1_800}
    assert _placement.room({"cpu": 500}, "cuda") == {"cpu": 500, 0: 900, 1: 1_800}
    assert _placement.GPU_SHARE == fit.HEADROOM


BATCH: Batch = {
    "input_ids": np.array([[2, 5, 6, 7, 3], [2, 9, 8, 3, 0]]),
    "attention_mask": np.array([[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]),
    "token_type_ids": np.zeros((2, 5), np.int64),
}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    """The tiny BERT as the cast method saves it."""
    need("torch", "transformers", "accelerate")
    folder = tmp_path_factory.mktemp("placed")
    source = make_checkpoint(folder / "tiny")
    (folder / "model").mkdir()
    recipe = recipe_of({})
    plugins.load("methods", "torch_cast").build(BuildJob(source, folder / "model", recipe, [], 1))
    return folder / "model"


def opened(artifact: Path, recipe: Recipe) -> tuple[Any, Loaded]:
    runtime = plugins.load("runtimes", "pytorch")
    model = runtime.open_model(artifact, recipe, "cpu")
    return model, runtime.wrap(model, recipe, "cpu", 1)


def elements_of_tiny_bert() -> dict[str, int]:
    """By hand: 64 wide, 2 layers, 128 inside, 26 words, 64 positions, 2 token types, 2 classes."""
    layer = 4 * (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64) + 2 * 2 * 64
    embeddings = (26 + 64 + 2) * 64 + 2 * 64
    return {"embeddings": embeddings, "encoder": 2 * layer, "pooler": 64 * 64 + 64, "classifier": 2 * 64 + 2}


@pytest.mark.parametrize(
    ("device_map", "away"),
    [
        ({"": "disk"}, ["embeddings", "encoder", "pooler", "classifier"]),
        ({"": "cpu", "bert.encoder": "disk"}, ["encoder"]),
        ({"": "disk", "bert.encoder": "cpu"}, ["embeddings", "pooler", "classifier"]),
        ({"bert": "cpu", "classifier": "disk"}, ["classifier"]),
    ],
)
def test_moved_bytes_are_those_that_the_hooks_set_and_the_logits_stay(
    artifact, device_map, away, monkeypatch
):
    from accelerate import hooks

    _, plain = opened(artifact, recipe_of({}))
    _, placed = opened(artifact, recipe_of({"device_map": device_map}))
    expected = plain.predict(BATCH)
    moved: list[int] = []
    original = hooks.set_module_tensor_to_device

    def watched(module: Any, name: str, device: Any, value: Any = None, **others: Any) -> None:
        moved.append(0 if value is None else value.nbytes)
        original(module, name, device, value=value, **others)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", watched)
    np.testing.assert_array_equal(placed.predict(BATCH), expected)
    monkeypatch.undo()
    assert placed.placement is not None
    found = placed.placement(BATCH)
    elements = elements_of_tiny_bert()
    by_hand = 4 * sum(elements[part] for part in away)
    assert sum(moved) == found["moved_bytes"] == found["disk_bytes"] == by_hand
    assert found["cpu_bytes"] == 0
    buffers = 2 * 64 * 8  # position_ids and token_type_ids, int64, which stay
    assert found["resident_bytes"] == 4 * sum(elements.values()) + buffers - by_hand
    assert set(found["device_map"]) == ({"disk"} if len(away) == 4 else {"cpu", "disk"})


@pytest.mark.parametrize("device_map", [{"": "disk"}, {"": "cpu", "bert.encoder": "disk"}])
def test_the_audit_of_offloaded_weights_is_that_of_the_plain_recipe(artifact, device_map):
    _, plain = opened(artifact, recipe_of({}))
    _, placed = opened(artifact, recipe_of({"device_map": device_map}))
    placed.predict(BATCH)
    assert placed.audit() == plain.audit()


def test_tied_weights_count_once_in_size_and_as_often_as_they_come_over(tmp_path):
    """ALBERT runs one layer's weights several times: a hook brings them over each time."""
    need("torch", "transformers", "accelerate")
    import transformers

    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=16, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    transformers.AlbertForSequenceClassification(config).save_pretrained(tmp_path)
    model, placed = opened(tmp_path, recipe_of(DISK))
    assert placed.placement is not None
    found = placed.placement(BATCH)
    layer = sum(
        4 * parameter.numel() for name, parameter in model.named_parameters() if "albert_layers" in name
    )
    assert found["moved_bytes"] == found["disk_bytes"] + 2 * layer


def test_an_architecture_whose_weights_hooks_do_not_see_is_refused_before_any_work():
    from qtool.methods import _architectures

    reason = _architectures.refuse(recipe_of(DISK), "deberta-v2", 1)
    assert reason is not None
    assert reason.startswith("deberta-v2 cannot be offloaded")
    for placement in ({}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        assert _architectures.refuse(recipe_of(placement), "deberta-v2", 1) is None
    assert _architectures.refuse(recipe_of(DISK), "bert", 1) is None


def test_a_placement_that_is_resident_has_no_hooks(artifact):
    model, placed = opened(artifact, recipe_of({"device_map": "auto"}))
    _, plain = opened(artifact, recipe_of({}))
    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    np.testing.assert_array_equal(placed.predict(BATCH), plain.predict(BATCH))
    assert placed.placement is not None
    found = placed.placement(BATCH)
    assert found["moved_bytes"] == found["disk_bytes"] == found["cpu_bytes"] == 0
    assert set(found["device_map"]) == {"cpu"}


def test_what_max_memory_leaves_no_room_for_goes_to_disk(artifact):
    _, placed = opened(artifact, recipe_of({"device_map": "sequential", "max_memory": {"cpu": "200KB"}}))
    assert placed.placement is not None
    found = placed.placement(BATCH)
    assert 0 < found["resident_bytes"] <= 200_000 + 1024
    assert found["moved_bytes"] == found["disk_bytes"] > 0


@pytest.mark.parametrize(
    ("placement", "parts", "says"),
    [
        ({"device_map": {"berd": "cpu", "": "disk"}}, {}, "names 'berd', which is no module of this model"),
        ({"device_map": {"bert": "disk"}}, {}, "no place for 'classifier'"),
        (
            {"device_map": "sequential", "max_memory": {"cpu": "200KB"}},
            {"compile": {"dynamic": True}},
            "hooks cannot be in one compiled graph",
        ),
    ],
)
def test_what_only_the_model_shows_is_unavailable(artifact, placement, parts, says):
    with pytest.raises(Unavailable, match=says):
        opened(artifact, recipe_of(placement, **parts))


@pytest.mark.parametrize(
    ("device_map", "says"),
    [
        ({"berd": "cpu", "": "disk"}, "names 'berd'.* Did you mean 'bert'"),
        ({"nosuchmodule": "disk"}, "its parts are bert, dropout, classifier, and '' for all"),
        ({"bert": "disk"}, "no place for 'classifier'"),
    ],
)
def test_a_map_that_does_not_go_with_the_model_is_the_users_mistake_before_any_work(
    artifact, device_map, says
):
    from qtool import fitting

    recipe = recipe_of({"device_map": device_map})
    with pytest.raises(QtoolError, match=f"recipe '{recipe.name}': placement .*{says}"):
        fitting.totals(artifact, [recipe])
    assert fitting.totals(artifact, [recipe_of({"device_map": {"": "disk"}})])


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"device_map": {"": "mps"}}, "'mps' is no place of a module: cpu, disk, cuda or a GPU's number are"),
        ({"device_map": {"": -1}}, "'-1' is no place"),
        ({"device_map": {"": True}}, "'True' is no place"),
        ({"device_map": "tpu"}, "'tpu' is neither auto, balanced, balanced_low_0, sequential nor"),
        ({"max_memory": {"cpu": 8}}, "the unit of 8 is missing"),
    ],
)
def test_a_place_that_is_none_is_named_with_those_there_are(placement, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        plugins.load("runtimes", "pytorch").Placement(**placement)


def test_a_map_whose_names_contain_each_other_is_taken_apart(artifact):
    from qtool import checkpoint
    from qtool.runtimes import _placement

    model = checkpoint.empty(artifact)
    found = dict(_placement.flatten(model, {"": "disk", "bert.encoder.layer.1": "cpu"}, "cpu"))
    assert found == {
        "bert.embeddings": "disk",
        "bert.encoder.layer.0": "disk",
        "bert.encoder.layer.1": "cpu",
        "bert.pooler": "disk",
        "classifier": "disk",
    }
    assert dict(_placement.flatten(model, {"": "disk"}, "cpu")) == {"": "disk"}
    assert dict(_placement.flatten(model, {"": "cpu"}, "cuda")) == {"bert": "cpu", "classifier": "cpu"}
    given = _placement.arguments(_placement.Options(device_map={"": "disk"}), artifact, "cuda")
    assert given["device_map"] == {"bert": "disk", "classifier": "disk", _placement.RUNS_HERE: 0}


def test_storage_is_asked_of_the_kernel_or_not_known(tmp_path):
    need("torch")
    from qtool.runtimes import _offload

    told = tmp_path / "io"
    told.write_text("rchar: 5\nread_bytes: 4096\nwrite_bytes: 1\n")
    assert _offload.storage_read_bytes(told) == 4096
    assert _offload.storage_read_bytes(tmp_path / "none") is None


@pytest.mark.slow
def test_a_sweep_with_disk_offload_names_the_bytes_and_the_slowdown(tmp_path):
    need("torch", "transformers", "accelerate")
    model, data = shared("models", "minilm-sst2"), shared("data")
    resident = tmp_path / "resident.yaml"
    resident.write_text(
        "name: resident\ndescription: Placed where it fits.\nsource: here\nmethod: torch_cast\nruntime: pytorch\n"
        "placement: {device_map: auto}\n"
    )
    out, started = tmp_path / "run", time.monotonic()
    done = qtool(
        *("sweep", model, "--recipe", "fp32-disk-offload", "--recipe", resident, "--limit", 32),
        *("--task", "sst2", "--data", data / "glue", "--rounds", 1, "--batch-size", 1, "--out", out),
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["recipe"]: row for row in json.loads((out / "summary.json").read_text())["rows"]}
    offloaded, placed = rows["fp32-disk-offload"], rows["resident"]
    weights = offloaded["audit"]["weight_bytes_by_dtype"]
    assert weights == rows["fp32"]["audit"]["weight_bytes_by_dtype"]
    moved = offloaded["placement"]["moved_bytes"]
    assert moved == offloaded["placement"]["disk_bytes"] == weights["float32"]
    verdict = offloaded["verdict"]
    assert verdict["against"] == "fp32"
    assert verdict["kind"] in ("fits only by offload", "transfer-bound")
    assert f"{moved / 1e6:.1f} MB come from" in verdict["sentence"]
    assert "p95" in verdict["sentence"]
    assert offloaded["why"] == [verdict["sentence"]]
    assert placed["placement"]["moved_bytes"] == 0
    assert placed["verdict"]["kind"] in ("fits and faster", "fits, no faster")
    for text in (done.stdout, (out / "report.md").read_text(), (out / "report.html").read_text()):
        assert f"{moved / 1e6:.1f} MB come from" in text
    assert rows["fp32"]["placement"] is None
    assert not list(tmp_path.rglob("*.dat"))  # what is offloaded is read from the artifact itself
    assert time.monotonic() - started < 600


@pytest.mark.gpu
def test_what_a_gpu_has_no_room_for_crosses_the_bus_at_each_pass(artifact):
    need("torch", "accelerate")
    if not host.cuda_available():
        pytest.skip("no CUDA device")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    runtime = plugins.load("runtimes", "pytorch")
    _, plain = opened(artifact, recipe_of({}))
    for device_map, away in (({"": "cpu"}, "cpu_bytes"), ({"": "disk"}, "disk_bytes")):
        recipe = recipe_of({"device_map": device_map}, devices=["cuda"])
        model = runtime.open_model(artifact, recipe, "cuda")
        placed = runtime.wrap(model, recipe, "cuda", 1)
        np.testing.assert_allclose(placed.predict(BATCH), plain.predict(BATCH), atol=0.05)
        found = placed.placement(BATCH)
        assert found["moved_bytes"] == found[away] == 4 * sum(elements_of_tiny_bert().values())
        assert placed.audit().weight_bytes_by_dtype == plain.audit().weight_bytes_by_dtype
