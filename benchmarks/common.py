"""What the benchmarks share: a prepared model, fresh children of qtool and of peers, ratios and verdicts.

Knows the public stages of `qtool.worker` through `qtool.isolate`, as a sweep does, and nothing of any peer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from qtool import demo, host, isolate, measure, prepare, recipes
from qtool.core import Batch, QtoolError, Unavailable

T = TypeVar("T")
CHILD_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Bench:
    """A checked model and its tokenised texts, as the probe left them in `data`. Children log into `logs`."""

    model_dir: Path
    data: Path
    logs: Path
    threads: int

    @property
    def meta(self) -> dict[str, Any]:
        return json.loads((self.data / "meta.json").read_text())

    def build(self, recipe: str) -> Path:
        """The folder of a newly built artifact. Raises SystemExit with the child's error."""
        artifact = self.logs / recipe
        self.child("build", recipe, out=str(artifact))
        return artifact

    def measure(self, recipe: str) -> list[float]:
        """Seconds of every timed call at batch size 1, from a measuring child of its own as in a sweep."""
        answer = self.child("measure", recipe, artifact=str(self.logs / recipe), batch_size=1)
        if answer["values"]["contended"]:
            print(f"note: {recipe} shared its cores while it was timed", flush=True)
        return answer["samples"]["latency_s"]

    def child(self, stage: str, recipe: str, **spec: Any) -> dict[str, Any]:
        """What one worker stage answers. Raises SystemExit with the child's error."""
        whole = {
            "recipe": recipes.find(recipe)[0].model_dump(),
            "model_dir": str(self.model_dir),
            "data": str(self.data),
            "device": "cpu",
            "threads": self.threads,
            **spec,
        }
        return _run(stage, whole, self.logs, self.threads, offline=True)

    def batches(self) -> list[Batch]:
        """The batches of one text that a measuring child times, in its order: int64 arrays (1, tokens)."""
        rows, _ = prepare.load_ragged(self.data / "inputs.npz")
        return measure.timed_batches(rows, self.meta, 1)

    def save_batches(self) -> Path:
        """Those batches for a process without qtool: an .npz with an entry NAME.INDEX for each input."""
        import numpy as np

        path = self.logs / "batches.npz"
        batches = enumerate(self.batches())
        np.savez(path, **{f"{name}.{i}": array for i, batch in batches for name, array in batch.items()})
        return path


def positive(text: str) -> int:
    """A whole number from 1 for argparse, which turns the ValueError into its own message."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range, expected 1 or more")
    return number


def parser(docstring: str | None, *, rounds: int = 5) -> argparse.ArgumentParser:
    """MODEL and the flags of every benchmark that times a model."""
    made = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = made.add_argument
    add("model", metavar="MODEL", nargs="?", default="demo", help="a folder, a hub id or demo (default)")
    add("--data", metavar="DIR", help="SST-2 in GLUE's TSV form; default the demo's texts")
    add("--limit", metavar="N", type=positive, help="use only N texts")
    add("--threads", metavar="N", type=positive, default=host.physical_cores(), help="default the cores")
    add("--rounds", metavar="N", type=positive, default=rounds, help=f"default {rounds}")
    return made


def prepare_model(
    options: argparse.Namespace,
    scratch: Path,
    *,
    seq_len: int | None = None,
    calibration_rows: int = 0,
    score: bool = False,
) -> Bench:
    """Let a probe child check the model and tokenise the texts. Raises SystemExit with the child's error."""
    data = scratch / "data"
    spec = {
        **dict.fromkeys(("revision", "text", "text_pair", "label", "metric", "split", "calibration")),
        "model": options.model,
        "data": options.data,
        "task": "sst2" if options.data else "demo",
        "limit": options.limit,
        "seq_len": seq_len,
        "score": score,
        "seed": 0,
        "calibration_rows": calibration_rows,
        "data_out": str(data),
    }
    probed = _run("probe", spec, scratch, options.threads, offline=False)
    print(f"{options.model}: {probed['data']['rows']} texts, {options.threads} threads", flush=True)
    return Bench(Path(probed["model"]["folder"]), data, scratch, options.threads)


def _run(stage: str, spec: dict[str, Any], logs: Path, threads: int, *, offline: bool) -> dict[str, Any]:
    log = logs / f"{stage}.log"
    outcome = isolate.run(stage, spec, log=log, timeout_s=CHILD_TIMEOUT_S, threads=threads, offline=offline)
    if outcome.status != "ok":
        raise SystemExit(f"{stage}: {outcome.status}: {outcome.error}")
    return outcome.values


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


def run_script(
    script: str,
    *arguments: object,
    threads: int,
    python: Path | str = sys.executable,
    folder: Path | None = None,
) -> Any:
    """Run a program in a fresh process, in `folder`, and read the JSON on the last line that it prints.

    Raises SystemExit with the end of its output where it fails.
    """
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = run_apart([python, "-c", script, *map(str, arguments)], env, folder)
    if done.returncode:
        raise SystemExit(f"the peer's process ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_apart(
    command: Sequence[Any], env: dict[str, str], folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a peer to its end in a session of its own, its output captured."""
    # Linux shares the CPUs between sessions (sched_autogroup) and qtool's children lead one each: a peer in
    # the benchmark's own session would be given another share of a busy machine.
    return subprocess.run(
        command, capture_output=True, text=True, env=env, cwd=folder, check=False, start_new_session=True
    )


def alternate(rounds: int, peers: dict[str, Callable[[], T]]) -> dict[str, list[T]]:
    """One run of each peer a round, every second round backwards so that none always goes first."""
    found: dict[str, list[T]] = {name: [] for name in peers}
    for number in range(rounds):
        for name in list(peers) if number % 2 == 0 else reversed(peers):
            found[name].append(peers[name]())
    return found


def ratios(ours: Sequence[float], peers: Sequence[float]) -> list[float]:
    """Ours over the peer's, round by round."""
    return [mine / theirs for mine, theirs in zip(ours, peers, strict=True)]


def verdict(
    what: str, found: Sequence[float], *, least: float | None = None, most: float | None = None
) -> str:
    """One line: the median of the rounds, their lowest and highest, and whether a target is met, if any."""
    middle = statistics.median(found)
    line = f"{what}: {middle:.3f} (rounds {min(found):.3f} to {max(found):.3f})"
    bounds = [f"at least {least:g}"] if least is not None else []
    bounds += [f"at most {most:g}"] if most is not None else []
    if not bounds:
        return line
    met = (least is None or middle >= least) and (most is None or middle <= most)
    return f"{line}, target {' and '.join(bounds)}: {'met' if met else 'missed'}"
