"""Runs every CUDA path once and checks what comes back: statuses, and the figures that only a GPU has.

    python benchmarks/gpu_check.py [--out DIR]

Target: every recipe that lists cuda is ok, with peak memory, utilisation and energy, in under six minutes.
Sweeps the demo where it is installed, else a small model with random weights; asks no network. Exits 0 when
all is well or no GPU is visible (which it says), else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qtool import demo, host, recipes
from qtool.core import QtoolError, Unavailable

FIGURES = {"peak_vram_bytes": 1.0, "gpu_utilization_ratio": 0.0, "energy_j": 0.0}
"""Metrics that need a GPU, and the least value that a real forward pass on one can have."""
LIMIT_ROWS = 128
CHILD_TIMEOUT_S = 150


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="keep the run folder here")
    options = parser.parse_args()
    gpus = host.gpus()
    if not gpus:
        print("no CUDA GPU is visible\nnot run on a GPU")
        return
    print(f"GPU: {gpus[0]}")
    names = [recipe.name for recipe in recipes.load_all() if "cuda" in recipe.devices]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        code = sweep(pick_model(Path(folder)), names, out)
        if not (out / "summary.json").is_file():
            raise SystemExit(f"the sweep ended with {code} and without a summary")
        rows = json.loads((out / "summary.json").read_text())["rows"]
    for row in rows:
        print(describe(row))
    found = problems(rows, names)
    print("\n".join(found))
    print(f"{len(names)} recipes on a GPU in {time.monotonic() - started:.0f} s: {len(found)} problems")
    sys.exit(1 if found else 0)


def problems(rows: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What is wrong with the summary's `rows`, one sentence each, given the recipes that should have run.

    A skip is fine only where the GPU itself is too old for the recipe.
    """
    found = []
    on_gpu = {row["recipe"]: row for row in rows if row["device"] == "cuda"}
    for name in names:
        row = on_gpu.get(name)
        if row is None:
            found.append(f"{name}: no row on cuda")
        elif row["status"] == "skipped" and "capability" in (row["cause"] or ""):
            continue
        elif row["status"] != "ok":
            found.append(f"{name}: {row['status']}: {row['cause']}")
        else:
            for figure, least in FIGURES.items():
                metric = row["metrics"][figure]
                if metric["value"] is None:
                    found.append(f"{name}: no {figure}: {metric.get('reason')}")
                elif metric["value"] <= least:
                    found.append(f"{name}: {figure} is {metric['value']}, expected more than {least:g}")
    return found


def describe(row: dict[str, Any]) -> str:
    """One line of the table: speed and the GPU's figures, or why there are none."""
    if row["status"] != "ok":
        return f"{row['recipe']:24} {row['status']}: {row['cause']}"
    value = {name: metric["value"] for name, metric in row["metrics"].items()}
    return f"{row['recipe']:24} " + " ".join(
        f"{name} {'-' if value.get(name) is None else format(value[name], '.4g')}"
        for name in ("latency_p50_s", "speedup", "agreement", *FIGURES)
    )


def pick_model(scratch: Path) -> str:
    """The demo where its base package and its own files are installed, else a small random model."""
    try:
        demo.find_base()
    except (Unavailable, QtoolError) as error:
        print(f"a random model stands in for the demo: {error}")
    else:
        if demo.DELTA.is_file():
            return "demo"
        print(f"a random model stands in for the demo: no {demo.DELTA.name}")
    write_random(scratch / "random")
    return str(scratch / "random")


def write_random(folder: Path) -> None:
    """A BERT of MiniLM's shape with random weights over the words of the demo's texts."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted(set(demo.EVAL_TABLE.read_text("utf-8").lower().split()))
    vocabulary = {word: index for index, word in enumerate([*special, *words])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    raw.normalizer, raw.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.WhitespaceSplit()
    raw.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokens = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, model_max_length=512, **tokens)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    BertForSequenceClassification(config).eval().save_pretrained(folder)


def sweep(model: str, names: list[str], out: Path) -> int:
    """Run the command line as a user does, offline, and give back its exit code."""
    command = [sys.executable, "-m", "qtool.cli", "sweep", model, "--task", "demo", "--device", "cuda"]
    command += ["--rounds", "1", "--limit", str(LIMIT_ROWS)]
    command += ["--timeout", str(CHILD_TIMEOUT_S), "--out", str(out)]
    command += [word for name in names for word in ("--recipe", name)]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return subprocess.run(command, env=env, check=False).returncode


if __name__ == "__main__":
    main()
