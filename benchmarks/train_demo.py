"""Train the demo classifier and write everything that `qtool/demo/` ships beside its code.

    python benchmarks/train_demo.py [--data DIR | --sdist vaderSentiment-3.3.2.tar.gz]

Only the movie snippets of VADER are used. All choices are made on a validation part of the training rows: the
encoder is trained without that part, its change is cut to several ranks, and the best rank there is kept.
Then the same recipe runs on all training rows, and the evaluation rows are scored once that model exists.

The tables are the snippets of the sdist's additional_resources/hutto_ICWSM_2014.tar.gz whose mean rating is
0.5 or more away from zero, label 1 for a rating above zero; --sdist reads them from there and takes the 1,000
held-out ids from the `eval.tsv` that is already shipped.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import io
import json
import math
import random
import tarfile
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file, save
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from qtool import demo
from qtool.core import file_hash

REPO = Path(__file__).resolve().parents[1]
LABELS = ("negative", "positive")
SEED = 0
EPOCHS = 3
LEARNING_RATE = 1e-4
BATCH = 32
RANKS = (8, 16, 24, 32)
VALIDATION_ROWS = 1000
CALIBRATION_ROWS = 256
THREADS = 2


class Row(NamedTuple):
    id: str
    label: int
    rating: float
    text: str


def main() -> None:
    parser = argparse.ArgumentParser(description="train the demo classifier and write qtool/demo/")
    parser.add_argument(
        "--data", type=Path, default=REPO.parent / "shared/data/vader", help="folder of the tables"
    )
    parser.add_argument("--sdist", type=Path, help="vaderSentiment-3.3.2.tar.gz, instead of --data")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)

    train_rows, eval_rows = read_sdist(args.sdist) if args.sdist else read_tables(args.data)
    if {row.text for row in train_rows} & {row.text for row in eval_rows}:
        raise SystemExit("a text stands in both the training and the evaluation rows")
    print(f"{len(train_rows)} training rows, {len(eval_rows)} evaluation rows", flush=True)

    validation = balanced(train_rows, VALIDATION_ROWS, SEED)
    rest = [row for row in train_rows if row not in set(validation)]
    print(f"choose the rank: train on {len(rest)} rows, score {len(validation)} validation rows", flush=True)
    by_rank = score_ranks(train(rest), validation)
    rank = max(RANKS, key=lambda r: (by_rank[f"rank {r}"], -r))  # of equals the smallest
    print(f"chosen: rank {rank}\ntrain on all {len(train_rows)} rows", flush=True)
    weights = train(train_rows)
    on_eval = score_ranks(weights, eval_rows)

    demo.DELTA.write_bytes(save(low_rank(weights, rank)))
    calibration = balanced(train_rows, CALIBRATION_ROWS, SEED + 1)
    write_table(demo.EVAL_TABLE, eval_rows)
    write_table(demo.CALIBRATION_TABLE, calibration)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "demo"
        demo.build_model(folder)
        correct = count_correct(BertForSequenceClassification.from_pretrained(folder), eval_rows)
        model_hash = file_hash(folder / "model.safetensors")
    print(f"shipped: rank {rank}, {demo.DELTA.stat().st_size} bytes, {correct} of {len(eval_rows)} correct")

    provenance = {
        "script": "benchmarks/train_demo.py",
        "base": {"package": demo.BASE_PACKAGE, "model_sha256": demo.BASE_SHA256},
        "data": "vaderSentiment 3.3.2, movie review snippets, absolute mean rating of 0.5 or more",
        "rows": {
            "train": len(train_rows),
            "validation": len(validation),
            "evaluation": len(eval_rows),
            "calibration": len(calibration),
        },
        "training": {
            "seed": SEED,
            "epochs": EPOCHS,
            "learning_rate": LEARNING_RATE,
            "batch_size": BATCH,
            "autocast": "bfloat16",
            "frozen": "embedding tables",
            "threads": THREADS,
        },
        "rank": rank,
        "correct": correct,
        "accuracy": correct / len(eval_rows),
        "validation_correct": by_rank,
        "evaluation_correct": on_eval,
        "delta_bytes": demo.DELTA.stat().st_size,
        "delta_sha256": file_hash(demo.DELTA),
        "model_sha256": model_hash,
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("numpy", "safetensors", "tokenizers", "torch", "transformers")
        },
    }
    path = demo.DELTA.with_name("provenance.json")
    path.write_text(json.dumps(provenance, indent=2) + "\n", encoding="utf-8")


def read_tables(folder: Path) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows from the two laid-out tables (tab separated, no quoting)."""

    train_rows, eval_rows = (
        [
            Row(name, int(label), float(rating), text)
            for name, label, rating, text in read_lines(folder / table)
        ]
        for table in ("vader_movie_train.tsv", "vader_movie_eval1000.tsv")
    )
    return train_rows, eval_rows


def read_lines(path: Path) -> list[list[str]]:
    """The fields of each line below the header."""
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [line.split("\t") for line in lines[1:]]


def read_sdist(path: Path) -> tuple[list[Row], list[Row]]:
    """The same rows from vaderSentiment's sdist; the ids held out are those of the shipped eval.tsv."""
    with tarfile.open(path) as outer:
        inner = outer.extractfile("vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz")
        assert inner is not None
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(inner.read()))) as archive:
            file = archive.extractfile("hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt")
            assert file is not None
            lines = file.read().decode("utf-8").split("\r\n")
    rows = {}
    for line in filter(None, lines):
        name, rating, text = line.split("\t")
        if abs(float(rating)) >= 0.5:
            rows[name] = Row(name, int(float(rating) > 0), float(rating), text)
    eval_rows = [rows.pop(name) for name, *_ in read_lines(demo.EVAL_TABLE)]
    return list(rows.values()), eval_rows


def balanced(rows: list[Row], count: int, seed: int) -> list[Row]:
    """`count` rows, as many of either label, in the order of `rows`."""
    draw = random.Random(seed)
    chosen: set[Row] = set()
    for label in range(len(LABELS)):
        chosen.update(draw.sample([row for row in rows if row.label == label], count // len(LABELS)))
    return [row for row in rows if row in chosen]


def write_table(path: Path, rows: list[Row]) -> None:
    """Columns id, sentence and label for a reader that splits at tabs and knows no quoting."""
    lines = ["id\tsentence\tlabel"]
    for row in rows:
        if row.text != " ".join(row.text.splitlines()).replace("\t", " "):
            raise SystemExit(f"row {row.id} holds a tab or a line break")
        lines.append(f"{row.id}\t{row.text}\t{LABELS[row.label]}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def base_tensors() -> dict[str, np.ndarray]:
    return load_file(demo.find_base() / "model.safetensors")


def empty_model() -> BertForSequenceClassification:
    """The classifier with the base encoder and a freshly drawn head."""
    config = BertConfig.from_pretrained(demo.DELTA.with_name("config.json"))
    model = BertForSequenceClassification(config)
    load(model, demo.merge(base_tensors(), {}))
    return model


def load(model: BertForSequenceClassification, weights: dict[str, np.ndarray]) -> None:
    model.load_state_dict({name: torch.from_numpy(x) for name, x in weights.items()}, strict=False)


def encode(rows: list[Row]) -> list[list[int]]:
    """Token ids of each row, at most 128."""
    tokenizer = AutoTokenizer.from_pretrained(demo.find_base())
    return tokenizer([row.text for row in rows], truncation=True, max_length=128, padding=False)["input_ids"]


def pad(tokens: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, tokens))
    ids = torch.tensor([t + [0] * (longest - len(t)) for t in tokens])
    mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in tokens])
    return {"input_ids": ids, "attention_mask": mask}


def train(rows: list[Row]) -> dict[str, np.ndarray]:
    """Fine-tune all but the embedding tables; the weights by name afterwards."""
    torch.manual_seed(SEED)
    model = empty_model().train()
    for name, parameter in model.named_parameters():
        # The tables would ship whole: their change is not of low rank.
        parameter.requires_grad = not name.endswith("_embeddings.weight")
    trained = [p for p in model.parameters() if p.requires_grad]
    tokens = encode(rows)
    steps = EPOCHS * math.ceil(len(rows) / BATCH)
    warm_up = steps // 16
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, (steps - step) / (steps - warm_up))
    )
    draw = random.Random(SEED)
    started = time.monotonic()
    for epoch in range(EPOCHS):
        losses = []
        for batch in batches([len(t) for t in tokens], draw):
            target = torch.tensor([rows[i].label for i in batch])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(**pad([tokens[i] for i in batch])).logits
            loss = cross_entropy(logits.float(), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        spent = time.monotonic() - started
        print(f"epoch {epoch + 1} of {EPOCHS}: mean loss {np.mean(losses):.4f}, {spent:.0f} s", flush=True)
    return {name: x.detach().numpy().copy() for name, x in model.named_parameters()}


def batches(lengths: list[int], draw: random.Random) -> list[list[int]]:
    """One epoch's row numbers, shuffled; a batch holds rows of like length to save padding."""
    order = list(range(len(lengths)))
    draw.shuffle(order)
    made = []
    for start in range(0, len(order), BATCH * 32):
        pool = sorted(order[start : start + BATCH * 32], key=lambda i: lengths[i])
        made += [pool[i : i + BATCH] for i in range(0, len(pool), BATCH)]
    draw.shuffle(made)
    return made


def low_rank(weights: dict[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """The delta to ship: per encoder matrix the best two fp16 factors of its change, else the fp32 tensor."""
    base = demo.merge(base_tensors(), {})
    delta = {}
    for name, tensor in weights.items():
        if name in base and np.array_equal(tensor, base[name]):
            continue
        if tensor.ndim == 2 and name in base:
            up, size, down = np.linalg.svd(tensor - base[name], full_matrices=False)
            half = np.sqrt(size[:rank])
            delta[f"{name}.up"] = (up[:, :rank] * half).astype(np.float16)
            delta[f"{name}.down"] = (half[:, None] * down[:rank]).astype(np.float16)
        else:
            delta[name] = tensor
    return delta


def score_ranks(weights: dict[str, np.ndarray], rows: list[Row]) -> dict[str, int]:
    """How many rows the full fine-tune and its change cut to each rank get right, in fp32."""
    model = empty_model()
    correct = {}
    for rank in (None, *RANKS):
        load(model, demo.merge(base_tensors(), low_rank(weights, rank)) if rank else weights)
        what = f"rank {rank}" if rank else "full"
        correct[what] = count_correct(model, rows)
        print(f"{what}: {correct[what]} of {len(rows)} correct, {correct[what] / len(rows):.4f}", flush=True)
    return correct


def count_correct(model: BertForSequenceClassification, rows: list[Row]) -> int:
    model.eval()
    rows = sorted(rows, key=lambda row: len(row.text))
    tokens = encode(rows)
    correct = 0
    with torch.inference_mode():
        for start in range(0, len(rows), BATCH):
            found = model(**pad(tokens[start : start + BATCH])).logits.argmax(-1)
            correct += int((found == torch.tensor([row.label for row in rows[start : start + BATCH]])).sum())
    return correct


if __name__ == "__main__":
    main()
