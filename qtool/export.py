"""Copies an artifact out of the cache, ready to deploy: model, tokenizer, a load script and a README."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from qtool import plugins, store
from qtool.core import QtoolError, Recipe, cache_dir, did_you_mean
from qtool.summary import summarise
from qtool.sweep import is_whole

DEFAULT_OPENER = """\
model = AutoModelForSequenceClassification.from_pretrained(HERE, dtype="auto", device_map="cpu").eval()"""


def export(run_dir: Path, name: str, to: Path) -> str:
    """Fill the new folder `to`; a sentence on what is there. Whole or not at all.

    Raises QtoolError for an unknown or failed recipe, an artifact gone from the cache, a folder in use.
    """
    run, summary = store.read_run(run_dir), summarise(run_dir)
    rows = [row for row in summary["rows"] if row["recipe"] == name]
    if not rows:
        known = {row["recipe"] for row in summary["rows"]}
        raise QtoolError(f"run {run_dir} has no recipe '{name}'.{did_you_mean(name, known)}")
    row = next((row for row in rows if row["status"] == "ok"), None)
    if row is None:
        raise QtoolError(
            f"recipe '{name}' was {rows[0]['status']} in {run_dir} ({rows[0]['cause']}). Choose an ok one."
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise QtoolError(f"{to} exists and is not empty. Give a new folder.")
    lines = store.latest(store.read(run_dir)).values()
    artifact = next(m.values["artifact"] for m in lines if m.stage == "build" and m.recipe == name)
    place = cache_dir() / "artifacts" / artifact
    if not is_whole(place):
        raise QtoolError(
            f"the artifact of '{name}' is no longer whole in the cache {place.parent}. Sweep again with --resume."
        )
    recipe = Recipe(**run["recipes"][name])
    script = load_script(recipe, row["device"])
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            made = Path(scratch) / "made"
            shutil.copytree(place / "model", made)
            shutil.copytree(place / "tokenizer", made, dirs_exist_ok=True)
            (made / "load.py").write_text(script)
            (made / "README.md").write_text(_readme(recipe, run, row))
            if to.is_dir():
                to.rmdir()
            made.rename(to)
    except OSError as error:
        raise QtoolError(f"cannot write to {to}: {error.strerror}. Choose another folder.") from None
    return f"{name} is in {to}: try `python {to / 'load.py'} 'a fine film'`"


def load_script(recipe: Recipe, device: str) -> str:
    """The runtime's script with the recipe's settings; a method with its own format brings its own opener.

    Raises QtoolError for runtime options that the script could not repeat.
    """
    runtime, method = plugins.load("runtimes", recipe.runtime), plugins.load("methods", recipe.method)
    options, script = runtime.Options(**recipe.runtime_options), runtime.LOAD_SCRIPT
    if "$OPTIONS" not in script and options != runtime.Options():
        raise QtoolError(
            f"recipe '{recipe.name}' sets runtime_options {recipe.runtime_options}, which a load script of"
            f" runtime {recipe.runtime} cannot repeat. Export a recipe without them."
        )
    opening = DEFAULT_OPENER
    if own := getattr(method, "open_model", None):
        source = inspect.getsource(own).replace("-> Any:", "-> object:")
        opening = f'\n\n{source}\n\nmodel = open_model(HERE, "cpu")'
    for name, text in (
        ("OPEN_MODEL", opening),
        ("OPTIONS", repr(options.model_dump())),
        ("DEVICE", repr(device)),
    ):
        script = script.replace(f"${name}", text)
    return script


def _readme(recipe: Recipe, run: dict[str, Any], row: dict[str, Any]) -> str:
    threads, metric = run["args"]["threads"], run["metric"]
    p50_s = row["metrics"]["latency_p50_s"]["value"]
    facts = [f"- p50 latency {p50_s * 1e3:.2f} ms at batch {row['batch_size']} on {row['device']}"]
    if metric and row["metrics"][metric]["value"] is not None:
        facts.insert(0, f"- {metric} {row['metrics'][metric]['value']:.4f} on {run['task']}")
    if recipe.compile:
        facts.append("- measured compiled by `torch.compile`; `load.py` runs the model eagerly")
    classes = [f"{index} {label}" for index, label in run["model_info"]["id2label"].items()]
    return textwrap.dedent(
        """\
        # {model} as {recipe}

        {description}

        Measured by qtool on {cpu} with {threads}:

        {facts}

        `load.py` loads the model and gives one row of logits a text, in the order {classes}. Try
        `python load.py "a fine film"`. It needs

            pip install {needs}
        """
    ).format(
        model=Path(run["model"]).name,
        recipe=recipe.name,
        description=recipe.description,
        cpu=run["host"]["cpu_model"],
        threads="1 thread" if threads == 1 else f"{threads} threads",
        facts="\n".join(facts),
        classes=", ".join(classes),
        needs=_needs(recipe, run["versions"]),
    )


def _needs(recipe: Recipe, versions: dict[str, str]) -> str:
    """Arguments of pip for the measured versions of what the load script imports."""
    runtime, method = plugins.load("runtimes", recipe.runtime), plugins.load("methods", recipe.method)
    packages = ["transformers", *runtime.PACKAGES]
    if "torch" in runtime.PACKAGES:
        # a module is made of its method's classes, while an engine's file stands alone
        packages += method.PACKAGES
    pins = [f"{package}=={versions[package]}" for package in dict.fromkeys(packages) if package in versions]
    # a build such as 2.13.0+cpu is on PyTorch's own index only
    builds = {pin.partition("+")[2] for pin in pins if pin.startswith("torch==") and "+" in pin}
    return " ".join(
        [*pins, *(f"--extra-index-url https://download.pytorch.org/whl/{build}" for build in builds)]
    )
