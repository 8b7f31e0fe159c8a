"""Copies an artifact out of the cache, ready to deploy: model, tokenizer, a load script and a README."""

from __future__ import annotations

import inspect
import re
import shutil
import tempfile
import textwrap
from pathlib import Path
from string import Template
from typing import Any

from qtool import checkpoint, plugins, store
from qtool.artifacts import built, is_whole
from qtool.checkpoint import Sentence
from qtool.core import QtoolError, Recipe, cache_dir, did_you_mean
from qtool.summary import summarise

POOLINGS = {
    "mean": "answer = (states * mask).sum(1) / mask.sum(1)",
    "max": "answer = torch.where(mask > 0, states, -1e9).amax(1)",
    "cls": "answer = states[:, 0]",
}
"""`checkpoint.embed` in the words of a script."""


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
    place = built(store.latest(store.read(run_dir)).values(), name)
    if place is None or not is_whole(place):
        raise QtoolError(
            f"the artifact of '{name}' is no longer whole in the cache {cache_dir() / 'artifacts'}."
            " Sweep again with --resume."
        )
    recipe = Recipe(**run["recipes"][name])
    max_tokens, sentence = run["data"]["max_tokens"], checkpoint.read_sentence(place / "model")
    token_types = run["model_info"].get("token_types", True)
    script = load_script(recipe, row["device"], max_tokens, sentence, token_types)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}-", dir=to.parent) as scratch:
            made = Path(scratch) / "made"
            shutil.copytree(place / "model", made)
            shutil.copytree(place / "tokenizer", made, dirs_exist_ok=True)
            (made / "load.py").write_text(script, "utf-8")
            (made / "README.md").write_text(_readme(recipe, run, row), "utf-8")
            if to.is_dir():
                to.rmdir()
            made.rename(to)
    except OSError as error:
        raise QtoolError(f"cannot write to {to}: {error.strerror}. Choose another folder.") from None
    return f"{name} is in {to}: try `python {to / 'load.py'} 'a fine film'`"


def load_script(
    recipe: Recipe, device: str, max_tokens: int, sentence: Sentence | None = None, token_types: bool = True
) -> str:
    """The runtime's script with the recipe's settings; a method with its own format brings its own opener.

    `max_tokens` is where texts were cut when they were scored and timed; `token_types`: the model takes
    `token_type_ids`.
    """
    runtime = plugins.load("runtimes", recipe.runtime)
    options, script = runtime.Options(**recipe.runtime_options).model_dump(), runtime.LOAD_SCRIPT
    auto_class = "AutoModelForSequenceClassification" if sentence is None else "AutoModel"
    parts = {
        "ANSWERS": "logits" if sentence is None else "embeddings",
        "AUTO_CLASS": auto_class,
        "OPEN_MODEL": _opening(recipe, device, auto_class),
        "OPTIONS": repr(options),
        "CONTEXT": "torch.inference_mode()" + _autocast(device, options.get("autocast")),
        "ANSWER": _answer(sentence),
        "DEVICE": repr(device),
        "MAX_TOKENS": str(max_tokens),
        "NO_TYPES": "" if token_types else ", return_token_type_ids=False",
    }
    return Template(script).substitute(parts)


def _opening(recipe: Recipe, device: str, auto_class: str) -> str:
    """Lines that make `model` ready, compiled as it was measured."""
    method = plugins.load("methods", recipe.method)
    if own := getattr(method, "open_model", None):
        source = inspect.getsource(own).replace("-> Any:", "-> object:")
        opening = f"\n\n{source}\n\nmodel = open_model(HERE, {device!r})"
    else:
        placed: dict[str, Any] = {"device_map": device}
        if recipe.placement:
            placed = plugins.load("runtimes", recipe.runtime).exported_placement(recipe, device)
        where = ", ".join(f"{name}={value!r}" for name, value in placed.items())
        opening = f'model = {auto_class}.from_pretrained(HERE, dtype="auto", {where}).eval()'
    if device == "cuda" and (suit := getattr(method, "suit", None)):
        source = re.sub(r"\bAny\b", "object", inspect.getsource(suit))
        opening += f"\n\n\n{source}\n\nsuit(model, {device!r})"
    if recipe.compile:
        settings = plugins.load("runtimes", recipe.runtime).Compile(**recipe.compile)
        named = [f"{name}={value!r}" for name, value in settings if value is not None]
        opening += f"\nmodel.compile({', '.join(['fullgraph=True', *named])})"
    return opening


def _autocast(device: str, dtype: str | None) -> str:
    return f", torch.autocast({device!r}, dtype=torch.{dtype})" if dtype else ""


def _answer(sentence: Sentence | None) -> str:
    """Lines that make `answer` from `model` and `batch`."""
    if sentence is None:
        return "answer = model(**batch).logits"
    lines = [
        'states, mask = model(**batch).last_hidden_state.float(), batch["attention_mask"][..., None]',
        POOLINGS[sentence.pooling],
        *(["answer = torch.nn.functional.normalize(answer, dim=1)"] if sentence.normalize else []),
    ]
    return "\n        ".join(lines)


def _readme(recipe: Recipe, run: dict[str, Any], row: dict[str, Any]) -> str:
    threads, metric = run["args"]["threads"], run["metric"]
    p50_s = row["metrics"]["latency_p50_s"]["value"]
    facts = [f"- p50 latency {p50_s * 1e3:.2f} ms at batch {row['batch_size']} on {row['device']}"]
    if metric and row["metrics"][metric]["value"] is not None:
        facts.insert(0, f"- {metric} {row['metrics'][metric]['value']:.4f} on {run['task']}")
    if recipe.compile:
        facts.append("- compiled by `torch.compile`, as in `load.py`: its first calls take their time")
    classes = [f"{index} {label}" for index, label in run["model_info"]["id2label"].items()]
    answers = f"row of logits a text, in the order {', '.join(classes)}"
    if run["model_info"].get("embeds"):
        answers = "sentence embedding a text; the score compares two by their cosine"
    return textwrap.dedent(
        """\
        # {model} as {recipe}

        {description}

        Measured by qtool on {cpu} with {threads}:

        {facts}

        `load.py` loads the model and gives one {answers}. Try
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
        answers=answers,
        needs=needs(recipe, run["versions"]),
    )


def needs(recipe: Recipe, versions: dict[str, str]) -> str:
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
