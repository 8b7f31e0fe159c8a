"""Run folders for the tests of the page: a small one counted by hand, a hostile one and a large one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np

from qtool import evidence, summary
from qtool.report import page
from tests.run_folder import STARTED, Made, write_run

LABELS = [0, 1] * 200
IMAGE = '"><img src=x onerror="window.pwned=1">'
SCRIPT = "</script><script>window.pwned=1</script>"
CONTROL = "red \x1b[31m, \u202eturned\u202c and \u2028cut"


def wrong(*which: int) -> list[int]:
    return [1 - label if i in which else label for i, label in enumerate(LABELS)]


def made(p50_s, answers, **more):
    right = sum(a == b for a, b in zip(answers, LABELS, strict=True)) / len(LABELS)
    return Made(p50_s, answers, metrics={"accuracy": right}, **more)


def recipes() -> dict[str, Made]:
    return {
        "fp32": made((0.0108, 0.0110, 0.0109), wrong(*range(10))),
        "quick": made((0.00270, 0.00272, 0.00271), wrong(*range(2, 11)), disk_bytes=23_400_000),
        "odd": Made((1, 1, 1), bad={"measure-1": ("failed", "no <b>kernel</b> for it", "see the log")}),
        "absent": Made((1, 1, 1), bad={"plan": ("skipped", "needs a GPU", "run it on one")}),
        "fp32@8": made((0.08, 0.081, 0.082), wrong(*range(10)), batch_size=8),
        "quick@8": made((0.030, 0.031, 0.032), wrong(*range(2, 11)), disk_bytes=23_400_000, batch_size=8),
    }


def facts(**more):
    return {
        "recipes": {"fp32": {"runtime": "pytorch"}, "quick": {"runtime": "openvino", "method": "cast"}},
        "data": {"rows": len(LABELS), "class_names": ["bad", "good"]},
        "started_at": STARTED,
        **more,
    }


def put_texts(folder: Path, texts=None, pairs=None, second=None) -> None:
    texts = [f"text number {i}" for i in range(len(LABELS))] if texts is None else texts
    content = {"texts": texts, "pairs": pairs} | ({} if second is None else {"second": second})
    (folder / "texts.json").write_text(json.dumps(content))


def hostile(folder: Path) -> Path:
    """A run in which every string from outside tries to be markup."""
    name = IMAGE.replace("/", "")
    every = {
        "fp32": made((0.01, 0.011), wrong(1)),
        name: made((0.005, 0.0051), wrong(2, 3)),
        "odd": Made((1, 1), bad={"measure-1": ("failed", SCRIPT + CONTROL, IMAGE)}),
    }
    write_run(
        folder,
        every,
        labels=LABELS,
        run=facts(
            model=SCRIPT,
            host={"cpu_model": IMAGE, SCRIPT: CONTROL},
            versions={IMAGE: SCRIPT},
            notes=[SCRIPT, IMAGE + CONTROL],
            recipes={name: {"runtime": SCRIPT, "source": IMAGE, "description": SCRIPT, "method": IMAGE}},
            data={"rows": len(LABELS), "class_names": [SCRIPT, IMAGE]},
        ),
    )
    put_texts(folder, [SCRIPT + IMAGE + CONTROL] * len(LABELS))
    return folder


def large(folder: Path) -> Path:
    """As much as 25 recipes on 3 devices at 5 batch sizes: 38 on the 2 devices there are, long texts that change."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 2, 872)
    base = np.where(generator.random(872) < 0.1, 1 - labels, labels)
    every = {}
    for number in range(38):
        own = np.random.default_rng(number)
        answers = (
            base
            if number == 0
            else np.where(own.random(872) < (0.004 if number % 4 == 1 else 0.08), 1 - base, base)
        )
        speed = 1 if number == 0 else math.exp(own.normal(-0.3, 0.5))
        for device, factor in (("cpu", 1.0), ("cuda", 0.1)):
            for batch in (1, 4, 8, 16, 32):
                name = "fp32" if number == 0 else f"recipe-with-a-long-name-{number:02}"
                peak = {"peak_vram_bytes": 3e8 * speed} if device == "cuda" else {}
                every[f"{name}@{device}{batch}"] = Made(
                    [0.01 * factor * speed * batch**0.8 * math.exp(own.normal(0, 0.02)) for _ in range(3)],
                    answers.tolist(),
                    peak_bytes=[4e8 * (0.5 + speed / 2)] * 3,
                    disk_bytes=int(9e7 * (0.3 + 0.7 * speed)),
                    metrics={"accuracy": float(np.mean(answers == labels))},
                    batch_size=batch,
                    device=device,
                    values=peak,
                )
    names = [*dict.fromkeys(name.partition("@")[0] for name in every)]
    known = {name: {"runtime": ("pytorch", "onnxruntime", "openvino")[i % 3]} for i, name in enumerate(names)}
    write_run(folder, every, labels=labels.tolist(), calls=662, run={"recipes": known, "started_at": STARTED})
    put_texts(folder, [f"{i}: " + "some words of a long review " * 12 for i in range(872)])
    return folder


def shown(folder: Path) -> tuple[dict, str]:
    found = evidence.load(folder)
    told = summary.of(found)
    return told, page.render(found, told)


def data_of(html: str) -> dict:
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    assert block
    return json.loads(block[1])
