"""The laws of the structure, each as a test: what imports what, and who may know a recipe's name."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import qtool
from qtool import core, plugins, recipes

PACKAGE = Path(qtool.__file__).parent
HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnxruntime",
    "openvino",
    "nncf",
    "torchao",
    "bitsandbytes",
    "datasets",
    "evaluate",
    "accelerate",
    "sklearn",
    "ray",
}
PARENT_ONLY = (
    *("cli", "sweep", "plan", "listing", "doctor", "export", "joint", "cost", "prices", "fit"),
    *("cluster", "ray_sweep", "remote"),
)


def imports(path: Path) -> set[str]:
    """Names of qtool modules a file imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "qtool":
            rest = node.module.split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
    return found


def test_listing_recipes_imports_no_ml_library():
    code = (
        "import sys, json, contextlib, io\nfrom qtool import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()): cli.run(['recipes'])\n"
        "import qtool.sweep, qtool.report, qtool.export, qtool.doctor, qtool.joint, qtool.report.joint, qtool.fit\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not HEAVY & set(json.loads(done.stdout))


def test_only_isolate_starts_processes():
    for path in PACKAGE.rglob("*.py"):
        names = {
            getattr(n, "module", None) or a.name
            for n in ast.walk(ast.parse(path.read_text()))
            if isinstance(n, ast.Import | ast.ImportFrom)
            for a in n.names
        }
        assert path.name == "isolate.py" or not names & {"subprocess", "multiprocessing"}, path


def test_the_child_side_does_not_import_the_parent_side():
    children = [
        PACKAGE / f"{name}.py"
        for name in (
            "worker",
            "measure",
            "reload",
            "checkpoint",
            "layers",
            "estimate",
            "fitting",
            "prepare",
            "models",
            "timing",
            "memory",
            "gpu",
            "rapl",
            "core",
            "store",
            "stats",
            "ceilings",
            "links",
            "topology",
            "transfer",
        )
    ]
    for path in [
        *children,
        *(PACKAGE / "methods").glob("*.py"),
        *(PACKAGE / "runtimes").glob("*.py"),
        *(PACKAGE / "tasks").glob("*.py"),
    ]:
        assert not imports(path) & set(PARENT_ONLY), path


def test_core_imports_nothing_of_qtool():
    assert imports(PACKAGE / "core.py") == set()


def test_no_code_below_the_sweep_knows_a_recipe_by_name():
    names = {recipe.name for recipe in recipes.load_all()} - {
        *core.BASELINES.values(),
        "bf16",
        "fp16",
    }  # the last two are types too
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in names, (path, node.value)


@pytest.mark.parametrize("name", plugins.names("methods"))
def test_every_method_file_keeps_the_contract(name):
    method = plugins.load("methods", name)
    assert isinstance(method.PACKAGES, tuple)
    assert method.Options.model_config["extra"] == "forbid"
    assert callable(method.build)


@pytest.mark.parametrize("name", plugins.names("runtimes"))
def test_every_runtime_file_keeps_the_contract(name):
    runtime = plugins.load("runtimes", name)
    assert isinstance(runtime.PACKAGES, tuple)
    assert runtime.Options.model_config["extra"] == "forbid"
    assert callable(runtime.open_model)
    assert callable(runtime.wrap)


@pytest.mark.parametrize("name", plugins.names("tasks"))
def test_every_task_file_keeps_the_contract(name):
    file = plugins.load("tasks", name)
    assert file.TASKS
    for task in file.TASKS:
        assert task.score in task.metrics
    assert callable(file.load)
    assert callable(file.reachable)
