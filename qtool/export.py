"""Copies an artifact out of the cache, ready to deploy: model files, tokenizer, a load script and a README."""

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

DEFAULT_OPENER = "model = AutoModelForSequenceClassification.from_pretrained(HERE, dtype='auto', device_map='cpu').eval()"


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
        raise QtoolError(f"recipe '{name}' was {rows[0]['status']} in {run_dir} ({rows[0]['cause']}). Choose an ok one.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise QtoolError(f"{to} exists and is not empty. Give a new folder.")
    lines = store.latest(store.read(run_dir)).values()
    artifact = next(m.values["artifact"] for m in lines if m.stage == "build" and m.recipe == name)
    place = cache_dir() / "artifacts" / artifact
    if not place.is_dir():
        raise QtoolError(f"the artifact of '{name}' is no longer in the cache {place.parent}. Sweep again with --resume.")
    recipe = Recipe(**run["recipes"][name])
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            made = Path(scratch) / "made"
            shutil.copytree(place / "model", made)
            shutil.copytree(place / "tokenizer", made, dirs_exist_ok=True)
            (made / "load.py").write_text(load_script(recipe))
            (made / "README.md").write_text(_readme(recipe, run, row))
            if to.is_dir():
                to.rmdir()
            made.rename(to)
    except OSError as error:
        raise QtoolError(f"cannot write to {to}: {error.strerror}. Choose another folder.") from None
    return f"{name} is in {to}: try `python {to / 'load.py'} 'a fine film'`"


def load_script(recipe: Recipe) -> str:
    """The runtime's script with the recipe's settings; a method with its own format brings its own opener."""
    runtime, method = plugins.load("runtimes", recipe.runtime), plugins.load("methods", recipe.method)
    opener = getattr(method, "open_model", None)
    if opener is None:
        opening = DEFAULT_OPENER
    else:
        opening = f"\n\n{inspect.getsource(opener)}\n\nmodel = open_model(HERE, 'cpu')".replace("Any", "object")
    options = runtime.Options(**recipe.runtime_options).model_dump()
    script = runtime.LOAD_SCRIPT.replace("$OPEN_MODEL", opening)
    for key, value in options.items():
        script = script.replace(f"${key.upper()}", repr(value))
    return script


def _readme(recipe: Recipe, run: dict[str, Any], row: dict[str, Any]) -> str:
    needed = [*plugins.load("methods", recipe.method).PACKAGES, *plugins.load("runtimes", recipe.runtime).PACKAGES]
    versions = {**run["versions"]}
    pins = " ".join(f"{package}=={versions[package]}" for package in dict.fromkeys(needed) if package in versions)
    metric = run["metric"]
    facts = [f"- p50 latency {row['metrics']['latency_p50_s']['value'] * 1e3:.2f} ms at batch {row['batch_size']} on {row['device']}"]
    if metric:
        facts.insert(0, f"- {metric} {row['metrics'][metric]['value']:.4f} on {run['task']}")
    return textwrap.dedent(
        """\
        # {model} as {recipe}

        {description}

        Measured by qtool on {cpu}, {threads} threads:

        {facts}

        `load.py` loads the model and gives logits: `python load.py "a fine film"`. It needs

            pip install {pins}
        """
    ).format(
        model=Path(run["model"]).name,
        recipe=recipe.name,
        description=recipe.description,
        cpu=run["host"].get("cpu_model", "this machine"),
        threads=run["args"]["threads"],
        facts="\n".join(facts),
        pins=pins,
    )
