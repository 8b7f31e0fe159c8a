"""Recipe files: the book is valid, a wrong file is refused in one line that helps, and skips say why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from qtool import host, listing, recipes
from qtool.core import Audit, Expect, QtoolError, unmet
from tests.conftest import need

GOOD = {
    "name": "mine",
    "description": "d",
    "source": "s",
    "method": "torch_cast",
    "dtype": "bfloat16",
    "runtime": "pytorch",
}
CONTRACT = set(
    [
        "fp32",
        "bf16",
        "fp16",
        "bf16-autocast",
        "fp16-autocast",
        "fp32-compile",
        "bf16-compile",
        "int8-dynamic",
        "int8-dynamic-embeddings",
        "torchao-int8-weight",
        "torchao-int8-dynamic",
        "bnb-int8",
        "bnb-nf4",
        "bnb-nf4-double",
        "bnb-fp4",
        "fp8-weight",
        "fp8-dynamic",
        "onnx-fp32",
        "onnx-int8-dynamic",
        "onnx-int8-static",
        "openvino-fp32",
        "openvino-bf16",
        "openvino-int8-weight",
        "openvino-int8",
        "openvino-int4",
        "optimum-openvino-fp32",
        "optimum-openvino-int8",
    ]
)


def write(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return path


def test_the_book_holds_the_names_others_rely_on():
    assert {recipe.name for recipe in recipes.load_all()} >= CONTRACT


def test_a_recipe_file_is_named_after_its_recipe():
    for path in recipes.book().glob("*.yaml"):
        assert recipes.load_file(path).name == path.stem


def test_the_baseline_is_always_among_the_chosen():
    assert [recipe.name for recipe in recipes.select(["bf16"])] == ["fp32", "bf16"]


def test_a_glob_chooses_by_name_and_never_twice():
    names = [recipe.name for recipe in recipes.select(["bnb-n*", "bnb-nf4"])]
    assert names == ["fp32", "bnb-nf4", "bnb-nf4-double"]


def test_a_users_own_file_works_from_any_path(tmp_path):
    path = write(tmp_path, GOOD)
    assert [recipe.name for recipe in recipes.select([str(path)])] == ["fp32", "mine"]


def test_the_schema_accepts_every_shipped_file_and_refuses_an_unknown_key():
    need("jsonschema")
    import jsonschema

    from qtool import listing

    schema = json.loads(listing.schema())
    for path in recipes.book().glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**GOOD, "methd": "x"}, schema)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**GOOD, "methd": "x"}, "unknown key 'methd'. Did you mean 'method'?"),
        ({**GOOD, "method": "torch_cst"}, "unknown method 'torch_cst'. Did you mean 'torch_cast'?"),
        ({**GOOD, "runtime": "pytorc"}, "unknown runtime 'pytorc'. Did you mean 'pytorch'?"),
        ({**GOOD, "runtime": "openvino"}, "makes artifacts for runtime 'pytorch', found 'openvino'"),
        ({**GOOD, "dtype": "int3"}, "dtype: Input should be"),
        ({**GOOD, "quantize": {"scheme": "int8"}}, "quantize of method 'torch_cast': unknown key 'scheme'"),
        ({**GOOD, "runtime_options": {"autocst": "bfloat16"}}, "Did you mean 'autocast'?"),
        ({**GOOD, "placement": {"device_mpa": "auto"}}, "Did you mean 'device_map'?"),
        ({**GOOD, "search": {"group": [32, 64]}}, "'search' is not supported yet"),
        ({**GOOD, "env": "/opt/python"}, "'env' is not supported yet"),
        ("description: 2020-99-99", "is not valid YAML"),
        ("description: !!bool maybe", "is not valid YAML"),
        ({**GOOD, "expect": {"weight_share": {"int8": float("nan")}}}, "Input should be a finite number"),
        ({**GOOD, "name": "../../etc"}, "name: String should match pattern"),
        ({**GOOD, "devices": []}, "devices: List should have at least 1 item"),
        ({**GOOD, "devices": ["tpu"]}, "devices.0: Input should be 'cpu' or 'cuda'"),
        ({key: GOOD[key] for key in GOOD if key != "method"}, "key 'method' is missing"),
        ({**GOOD, "method": "torch_dynamic"}, "torch_dynamic needs dtype float32, found bfloat16"),
        (
            {**GOOD, "method": "bitsandbytes", "quantize": {"scheme": "nf5"}},
            "scheme: Input should be ",
        ),
        (
            {**GOOD, "calibration": {"rows": 0}},
            "calibration.rows: Input should be greater than or equal to 1",
        ),
        ("name: [", "is not valid YAML"),
        ("- a\n- b\n", "holds list, expected a mapping"),
        ("", "holds NoneType, expected a mapping"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a: &a [x, x]\nb: [*a, *a]\n", "aliases (*name) are not allowed"),
        ("name: x\nname: y\n", "key 'name' stands twice (line 2)"),
        ("x" * 70_000, "has 70000 bytes; a recipe has at most 65536"),
        ("[" * 3000, "is not valid YAML"),
        ("? {a: b}\n: c\n", "is not valid YAML"),
    ],
)
def test_a_wrong_recipe_is_refused_with_a_reason(tmp_path, content, says):
    with pytest.raises(QtoolError) as caught:
        recipes.load_file(write(tmp_path, content))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QtoolError, match="is not UTF-8 text"):
        recipes.load_file(path)


def test_a_missing_package_is_the_reason_with_the_pip_line(monkeypatch):
    recipe = recipes.find("bnb-nf4")[0]
    monkeypatch.setattr(host, "installed", lambda package: None if package == "bitsandbytes" else "1")
    assert str(recipes.why_not(recipe, "cpu")) == "needs bitsandbytes: pip install 'qtool[bitsandbytes]'"


def test_a_recipe_for_another_device_says_which():
    recipe = recipes.find("int8-dynamic")[0]
    assert recipes.why_not(recipe, "cuda") == recipes.Why("runs on cpu only", "--device cpu")


def test_a_missing_cpu_flag_is_a_reason_and_one_of_several_is_enough(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda package: "1")
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset({"avx2"}))
    base = recipes.find("bf16")[0]
    wanting = base.model_copy(
        update={"requires": base.requires.model_copy(update={"cpu_flags": ["amx_bf16", "avx512_bf16"]})}
    )
    assert recipes.why_not(wanting, "cpu") == recipes.Why(
        "needs a CPU with amx_bf16 or avx512_bf16", "use another machine"
    )
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset({"avx512_bf16"}))
    assert recipes.why_not(wanting, "cpu") is None


def test_no_calibration_rows_is_a_reason(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda package: "1")
    why = recipes.why_not(recipes.find("openvino-int8")[0], "cpu", has_calibration=False)
    assert why is not None
    assert why.fix == "give --calibration PATH"


def test_an_expectation_that_is_not_met_is_named():
    expect = Expect(
        weight_share={"int8": 0.9},
        changed_modules=3,
        engine={"HINT": "f32"},
        autocast="bfloat16",
        compiled_graphs=1,
    )
    audit = Audit({"int8": 89, "float32": 11}, {}, {"Linear4bit": 2}, {"HINT": "bf16"}, 0, "float32")
    assert unmet(expect, audit) == [
        "89.0% of the weight bytes are int8, expected at least 90.0%",
        "2 modules changed, expected at least 3",
        "the engine reports HINT=bf16, expected f32",
        "0 graphs compiled, expected 1",
        "autocast ran as float32, expected bfloat16",
    ]


def test_met_expectations_are_silent():
    expect = Expect(weight_share={"int8": 0.9}, linear_share={"int8": 1.0})
    assert unmet(expect, Audit({"int8": 9, "float32": 1}, {"int8": 5})) == []


def test_the_readmes_table_is_the_one_the_files_give(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    copy = tmp_path / "README.md"
    copy.write_text(readme.read_text())
    listing.rewrite(copy)
    assert copy.read_text() == readme.read_text(), "run `make readme`"


def test_a_recipe_is_skipped_for_a_model_its_method_does_not_read():
    recipe = recipes.load_file(recipes.book() / "bf16.yaml")
    why = recipes.why_not(recipe, "cpu", source="onnx")
    assert why is not None
    assert str(why) == ("starts from a checkpoint, found an onnx model: give the checkpoint it was made from")


def test_the_baseline_of_an_exported_model_is_that_of_its_family():
    assert [recipe.name for recipe in recipes.select(["onnx-int8-dynamic"], "onnx-fp32")] == [
        "onnx-fp32",
        "onnx-int8-dynamic",
    ]
