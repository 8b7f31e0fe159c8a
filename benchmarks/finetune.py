"""Fine-tune a small encoder on MRPC, CoLA or RTE, so that qtool's tasks can be tried on a real head.

    python benchmarks/finetune.py TASK OUT [--base MODEL_FOLDER] [--data GLUE_FOLDER] [--seed N] [--epochs N]

Writes a plain Hugging Face checkpoint whose classes have the task's names and prints its scores on the dev rows.
The base is MiniLM (the demo's base package) unless given. Nothing is chosen by the dev rows: they are scored once,
after the last epoch. Minutes on one CPU thread; with the same seed, thread count and machine the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from train_demo import BATCH, batches
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from qtool import demo, metrics, tasks
from qtool.tasks._table import Table

REPO = Path(__file__).resolve().parents[1]
EPOCHS = {"mrpc": 3, "cola": 3, "rte": 3}
LEARNING_RATE = 1e-4
TRAINING_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description="fine-tune an encoder on a small GLUE task")
    parser.add_argument("task", choices=sorted(EPOCHS))
    parser.add_argument("out", type=Path, help="new folder of the checkpoint")
    parser.add_argument("--base", type=Path, help="model folder to start from (default: the demo's MiniLM)")
    parser.add_argument("--data", type=Path, default=REPO.parent / "shared/data/glue", help="GLUE folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="passes over the training rows")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.out.exists():
        raise SystemExit(f"{args.out} exists already; name a new folder")
    torch.set_num_threads(args.threads)
    task, file = tasks.find(args.task)
    train_rows, dev_rows = (file.load(task, split, args.data) for split in ("train", "validation"))
    base = args.base or demo.find_base()
    tokenizer = AutoTokenizer.from_pretrained(base)
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(
        base,
        num_labels=len(task.labels or []),
        id2label=dict(enumerate(task.labels or [])),
        label2id={name: index for index, name in enumerate(task.labels or [])},
        dtype=torch.float32,
    )
    started = time.monotonic()
    epochs = args.epochs or EPOCHS[args.task]
    train(model, tokenizer, train_rows, epochs, args.seed)
    training_s = time.monotonic() - started
    # MiniLM's tokenizer pads and cuts to 128 tokens on its own: real lengths are measured
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    said = predict(model, tokenizer, dev_rows)
    scores = {name: metrics.compute(name, said, dev_rows.labels or []) for name in task.metrics}
    facts = {"task": task.name, "seed": args.seed, "epochs": epochs, "threads": args.threads}
    facts |= {"training_rows": len(train_rows), "dev_rows": len(dev_rows), "training_s": round(training_s)}
    print(json.dumps(facts | scores), flush=True)


def train(model: Any, tokenizer: Any, rows: Table, epochs: int, seed: int) -> None:
    """Fine-tune all but the embedding tables with AdamW, a short warm-up and a linear decay."""
    model.train()
    for name, parameter in model.named_parameters():
        # a third of the time and half of the weights, for words that a few thousand rows rarely show
        parameter.requires_grad = "embeddings" not in name
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    encoded = encode(tokenizer, rows, TRAINING_TOKENS)
    steps = epochs * math.ceil(len(rows) / BATCH)
    warm_up = max(1, steps // 10)
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / max(1, steps - warm_up))
    )
    draw = random.Random(seed)
    started = time.monotonic()
    for epoch in range(epochs):
        losses = []
        for batch in batches([len(ids) for ids in encoded["input_ids"]], draw):
            target = torch.tensor([(rows.labels or [])[row] for row in batch])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(**pad(tokenizer, encoded, batch)).logits
            loss = cross_entropy(logits.float(), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        spent = time.monotonic() - started
        print(f"epoch {epoch + 1} of {epochs}: mean loss {np.mean(losses):.4f}, {spent:.0f} s", flush=True)
    model.eval()


def predict(model: Any, tokenizer: Any, rows: Table) -> list[int]:
    """The class of each row, in fp32, in batches of like length."""
    encoded = encode(tokenizer, rows, min(tokenizer.model_max_length, model.config.max_position_embeddings))
    order = sorted(range(len(rows)), key=lambda row: len(encoded["input_ids"][row]))
    said = [0] * len(rows)
    with torch.inference_mode():
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            found = model(**pad(tokenizer, encoded, batch)).logits.argmax(-1).tolist()
            for row, index in zip(batch, found, strict=True):
                said[row] = index
    return said


def encode(tokenizer: Any, rows: Table, longest: int) -> dict[str, list[list[int]]]:
    """Token ids and what goes with them by input name, unpadded, at most `longest` tokens a row."""
    return dict(tokenizer(rows.texts, rows.pairs, truncation=True, max_length=longest, padding=False))


def pad(tokenizer: Any, encoded: dict[str, list[list[int]]], batch: list[int]) -> Any:
    """The inputs of these rows padded to the longest, (rows, tokens) each."""
    chosen = {name: [values[row] for row in batch] for name, values in encoded.items()}
    return tokenizer.pad(chosen, return_tensors="pt")


if __name__ == "__main__":
    main()
