"""The doctor's sentences for machines made up here: an old CPU, a new one, an Arm server, a GPU."""

import json
from collections.abc import Callable

import pytest

from qtool import doctor, host, isolate
from qtool.core import Recipe
from qtool.recipes import load_all


def recipe(name: str, **changes: object) -> Recipe:
    base = {"description": "x", "source": "x", "method": "m", "runtime": "r"}
    return Recipe.model_validate({"name": name, **base, **changes})


RECIPES = [
    recipe("plain"),
    recipe("half", dtype="bfloat16", devices=["cpu", "cuda"]),
    recipe("small-half", dtype="float16"),
    recipe("eight", expect={"linear_share": {"int8": 1.0}}),
    recipe("four", quantize={"scheme": "nf4"}),
    recipe("tiny-float", quantize={"scheme": "fp8-weight"}, devices=["cuda"]),
    recipe("hinted", runtime_options={"hint": {"INFERENCE_PRECISION_HINT": "bf16"}}),
    recipe("picky", requires={"cpu_flags": ["amx_tile"]}),
]

Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def become(family: str, flags: set[str], gpus: tuple[dict, ...] = ()) -> None:
        monkeypatch.setattr(host, "family", lambda: family)
        monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(flags))
        monkeypatch.setattr(host, "gpus", lambda: list(gpus))

    return become


def meanings() -> dict[str, dict]:
    return {meaning["trait"]: meaning for meaning in doctor.facts(RECIPES)["meaning"]}


def test_recipes_are_concerned_by_dtype_options_and_expectation_not_by_name(machine: Machine) -> None:
    machine("x86", {"avx2"})
    found = {trait: meaning["recipes"] for trait, meaning in meanings().items()}
    assert found["INT8 dot products"] == ["eight"]
    assert found["BF16 arithmetic"] == ["half", "hinted"]
    assert found["FP16 arithmetic"] == ["small-half"]
    assert found["4-bit arithmetic"] == ["four"]
    assert found["FP8 arithmetic"] == []  # its recipe runs on cuda only


def test_a_cpu_without_vnni_is_warned_of_saturation(machine: Machine) -> None:
    machine("x86", {"avx2", "avx512f"})
    int8 = meanings()["INT8 dot products"]
    assert int8["available"] is False
    assert "onnxruntime#6004" in int8["sentence"]
    assert "emulated" in meanings()["BF16 arithmetic"]["sentence"]


@pytest.mark.parametrize("flag", ["avx512_vnni", "avx_vnni", "amx_int8"])
def test_any_of_the_dot_product_extensions_is_enough(machine: Machine, flag: str) -> None:
    machine("x86", {"avx2", flag})
    assert meanings()["INT8 dot products"]["flags"] == [flag]


def test_an_arm_server_is_read_by_arm_names(machine: Machine) -> None:
    machine("arm", {"asimd", "asimddp", "asimdhp", "bf16"})
    found = doctor.facts(RECIPES)
    assert found["cpu"]["flags"]["i8mm"] is False
    assert found["cpu"]["flags"]["bf16"] is True
    assert "avx2" not in found["cpu"]["flags"]
    assert all(meanings()[trait]["available"] for trait in ("INT8 dot products", "BF16 arithmetic"))


def test_an_unknown_architecture_claims_no_flag(machine: Machine) -> None:
    machine("riscv64", set())
    assert doctor.facts(RECIPES)["cpu"]["flags"] == {}
    assert "does not tell" in doctor.report(RECIPES)


def test_a_recipes_own_requirement_is_compared_with_the_cpu(machine: Machine) -> None:
    machine("x86", {"avx2"})
    assert doctor.facts(RECIPES)["unmet"] == ["picky: not on this CPU, it needs amx_tile"]
    machine("x86", {"avx2", "amx_tile"})
    assert doctor.facts(RECIPES)["unmet"] == []


def test_fp8_on_a_gpu_needs_capability_8_9(machine: Machine) -> None:
    board = {"name": "A100", "memory_bytes": 80 * 2**30, "capability": 8.0, "driver": "580.1"}
    machine("x86", {"avx2", "amx_tile"}, (board,))
    found = doctor.facts(RECIPES)
    assert found["unmet"] == ["tiny-float: no FP8 arithmetic below capability 8.9"]
    assert "A100, 80.0 GiB, capability 8.0, driver 580.1" in doctor.report(RECIPES)
    machine("x86", {"avx2", "amx_tile"}, (board | {"capability": 9.0},))
    assert doctor.facts(RECIPES)["unmet"] == []


def test_a_missing_package_comes_with_its_pip_line(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("x86", {"avx2"})
    real = host.installed
    gone = {"openvino", "nncf", "torchao"}
    monkeypatch.setattr(host, "installed", lambda name: None if name in gone else real(name))
    text = doctor.report(RECIPES)
    assert "missing   torchao: pip install 'qtool[torchao]'" in text
    assert "missing   openvino, nncf: pip install 'qtool[openvino]'" in text


def test_a_cpu_build_of_torch_beside_a_gpu_is_noticed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("x86", set(), ({"name": "L4", "memory_bytes": None, "capability": 8.9, "driver": "1"},))
    monkeypatch.setattr(host, "versions", lambda: {"torch": "2.13.0+cpu"})
    assert any("CPU build" in warning for warning in doctor.facts()["warnings"])


def test_the_facts_of_this_machine_and_the_shipped_recipes_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    recipes = load_all()
    found = json.loads(json.dumps(doctor.facts(recipes), allow_nan=False))
    assert found["hub"] == {"reachable": False, "sentence": "the hub is switched off by HF_HUB_OFFLINE=1"}
    named = {name for meaning in found["meaning"] for name in meaning["recipes"]}
    assert named == {recipe.name for recipe in recipes if "cpu" in recipe.devices}
    for recipe_ in recipes:
        assert "cpu" not in recipe_.devices or recipe_.name in doctor.report(recipes)


def test_ceilings_are_measured_on_request_only(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("x86", {"avx2"})
    asked: list[tuple[str, int]] = []
    values = {"copy_bytes_per_s": 20e9, "fp32_flop_per_s": 210e9, "threads": 2, "copy_array_bytes": 2**27}

    def run(stage: str, spec: dict, *, threads: int, **_: object) -> isolate.Outcome:
        asked.append((stage, threads))
        assert spec == {"threads": threads}
        return isolate.Outcome("ok", values)

    monkeypatch.setattr(isolate, "run", run)
    monkeypatch.setattr(host, "physical_cores", lambda: 2)
    assert "GB/s" not in doctor.report(RECIPES)
    assert asked == []
    text = doctor.report(RECIPES, measure=True)
    assert asked == [("ceilings", 2)]
    assert "copy      20.0 GB/s on 2 threads" in text
    assert "arrays of 134 MB" in text
    assert "fp32      210 GFLOP/s on 2 threads" in text
    assert "balance   10.5 FLOP a byte" in text  # 210 / 20


def test_ceilings_that_could_not_be_taken_say_why(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("x86", {"avx2"})
    monkeypatch.setattr(isolate, "run", lambda *_, **__: isolate.Outcome("failed", {}, "killed by SIGKILL"))
    assert "not measured: killed by SIGKILL" in doctor.report(RECIPES, measure=True)
