"""The wheel is whole: an installation finds recipes, demo and metrics without the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from qtool import __version__
from tests.conftest import need

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow

# A finder that stands before all others: to the import system these packages do not exist.
WITHOUT = """\
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
def find_spec(name, package=None):
    return None if name.partition(".")[0] in {names!r} else real(name, package)
importlib.util.find_spec = find_spec
"""
HEAVY = {
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "accelerate",
    "datasets",
    "evaluate",
} | {
    *(
        "sklearn",
        "torchao",
        "bitsandbytes",
        "onnx",
        "onnxscript",
        "onnxruntime",
        "openvino",
        "nncf",
        "pynvml",
    ),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    need("build", "hatchling")
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = out.glob("qtool-*.whl")
    return made


@pytest.fixture(scope="module")
def stranger(wheel, tmp_path_factory):
    """Run a fresh environment's Python, with this one's libraries and without the checkout.

    The environment's own packages come first and a `.pth` file adds the folder of the libraries. That
    folder's own `.pth` files, the editable installation's among them, are not read.
    """
    root = tmp_path_factory.mktemp("stranger")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(root / "venv")], check=True, timeout=100
    )
    own = next((root / "venv").glob("lib/python3*/site-packages"))
    python = root / "venv" / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        str(wheel),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (root / "elsewhere").mkdir()
    (root / "bare").mkdir()
    (root / "bare" / "sitecustomize.py").write_text(WITHOUT.format(names=HEAVY))

    def run(*command: str, bare: bool = False) -> subprocess.CompletedProcess:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        env |= {"QTOOL_CACHE": str(root / "cache")} | ({"PYTHONPATH": str(root / "bare")} if bare else {})
        return subprocess.run(
            [str(python.parent / command[0]), *command[1:]],
            cwd=root / "elsewhere", env=env, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    return run


def test_the_wheel_holds_recipes_metrics_and_the_demo_and_nothing_of_the_tests(wheel):
    with zipfile.ZipFile(wheel) as file:
        held = set(file.namelist())
    wanted = {f"qtool/recipe_book/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    wanted |= {
        str(path.relative_to(ROOT))
        for path in (ROOT / "qtool").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(wanted) > 60
    assert wanted <= held
    others = {name for name in held if not name.startswith(("qtool/", f"qtool-{__version__}.dist-info/"))}
    assert not others


def test_the_installed_command_finds_its_recipes_from_any_folder(stranger):
    where = stranger("python", "-c", "import qtool; print(qtool.__file__)").stdout
    assert "venv" in where
    assert str(ROOT) not in where
    assert stranger("qtool", "--version").stdout == f"qtool {__version__}\n"
    listed = stranger("qtool", "recipes")
    assert listed.returncode == 0, listed.stderr
    names = {
        line.partition(":")[0]
        for line in listed.stdout.splitlines()
        if line and not line.startswith((" ", "=="))
    }
    assert names == {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(names) >= 8
    shown = stranger("qtool", "recipes", "bnb-nf4")
    assert "method: bitsandbytes" in shown.stdout


def test_the_base_installation_says_which_extra_a_recipe_needs(stranger):
    listed = stranger("qtool", "recipes", bare=True)
    assert listed.returncode == 0, listed.stderr
    here = [line for line in listed.stdout.splitlines() if line.startswith("  here")]
    assert len(here) == len(list((ROOT / "recipes").glob("*.yaml")))
    install = r"(in an environment of its own, )?pip install (-c [\w.-]+ )?'qtool\[\w+\]'"
    wrong = [line for line in here if not re.fullmatch(rf"  here     no: needs [\w.]+: {install}", line)]
    assert not wrong
    baseline = stranger("qtool", "recipes", "fp32", bare=True).stdout
    assert re.search(r"no: needs (torch|accelerate): pip install 'qtool\[pytorch\]'", baseline), baseline


def test_a_sweep_of_the_base_installation_is_refused_with_the_line_that_helps(stranger):
    done = stranger("qtool", "sweep", "demo", bare=True)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stderr.startswith("qtool: ")
    assert re.search("needs (torch|accelerate)", done.stderr)
    assert "pip install 'qtool[pytorch]'" in done.stderr
