"""The child of `qtool load --real`: an artifact under real traffic, in process, by the policy that was simulated.

An open loop: arrival times are fixed beforehand, and a request's time counts from when it was to arrive, whether or
not the server was free to see it (no coordinated omission). One thread serves; there is no network and no second
process, so what is measured is queueing, batching, tokenising and the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qtool import contention, measure, prepare, reload, timing
from qtool.core import QtoolError, Recipe
from qtool.queueing import Policy, next_start, waiting

WARM_S = 2.0
LEAD_S = 0.05
"""From the end of the warm-up to the clock's zero."""


def drive(
    arrivals_s: Sequence[float],
    serve: Callable[[int, int], Any],
    policy: Policy,
    clock: Callable[[], float],
    sleep: Callable[[float], Any],
) -> dict[str, list[float]]:
    """Serve every request as `queueing.simulate` does, on a real clock that reads 0 when the traffic starts.

    `serve(first, size)` answers requests first to first + size - 1. Seconds from that zero for each batch:
    `starts_s`, `finishes_s`, its `sizes`, and `late_s`, by which the start missed what the policy says.
    """
    found: dict[str, list[float]] = {"starts_s": [], "finishes_s": [], "sizes": [], "late_s": []}
    first = 0
    while first < len(arrivals_s):
        due = next_start(arrivals_s, first, clock(), policy)
        while (left := due - clock()) > 0:
            sleep(left)
        start = clock()
        # whoever came while the sleep overran is served too, as a server would
        size = waiting(arrivals_s, first, start, policy)
        serve(first, size)
        for name, value in zip(found, (start, clock(), size, start - due), strict=True):
            found[name].append(value)
        first += size
    return found


def open_loop(spec: dict[str, Any]) -> dict[str, Any]:
    """Open, warm up, time each measured batch size in a closed loop, then serve `spec["arrivals_s"]`.

    The closed loop gives this process's own service times: processes of one artifact differ, and with them what a
    prediction misses for that reason is told apart from what the model of the queue misses.
    Raises QtoolError for batches where the tokenizer cannot pad.
    """
    from transformers import AutoTokenizer

    recipe, data = Recipe(**spec["recipe"]), Path(spec["data"])
    meta = json.loads((data / "meta.json").read_text("utf-8"))
    policy = Policy(spec["max_batch"], spec["max_wait_s"])
    arrivals_s: list[float] = spec["arrivals_s"]
    tokenizer = AutoTokenizer.from_pretrained(spec["model_dir"])
    alone = measure.tokenize_as_served(tokenizer, meta, 1)
    padded = measure.tokenize_as_served(tokenizer, meta, policy.max_batch)
    if alone is None or padded is None:
        raise QtoolError("this tokenizer has no padding token: it serves one text a call. Use --max-batch 1.")
    texts, pairs = measure.timed_texts(data, len(arrivals_s), 1)[0]
    loaded = reload.open_artifact(spec, recipe)
    rows, _ = prepare.load_ragged(data / "inputs.npz")

    def serve(first: int, size: int) -> None:
        batch = (texts[first : first + size], pairs[first : first + size] if pairs else None)
        loaded.predict((alone if size == 1 else padded)(batch)).argmax(axis=1)

    own: dict[str, list[float]] = {}
    for size in spec["measured_sizes"]:
        batches = measure.timed_batches(rows, meta, size)
        timing.warm_up(loaded.predict, batches, max_time_s=measure.WARM_UP_MAX_S)
        asked = measure.timed_texts(data, size, len(batches))
        times = measure.back_to_back(asked, alone if size == 1 else padded, loaded)
        own[str(size)] = times["end_to_end_s"]
    for size in range(1, policy.max_batch + 1):
        _warm(serve, len(texts), size)
    before = contention.snapshot()
    zero = time.perf_counter() + LEAD_S
    batches_served = drive(arrivals_s, serve, policy, lambda: time.perf_counter() - zero, time.sleep)
    disturbance = contention.between(before, contention.snapshot())
    return {
        "own": own,
        "contended": disturbance["contended"],
        "reason": disturbance["reason"],
        **batches_served,
    }


def _warm(serve: Callable[[int, int], Any], texts: int, size: int) -> None:
    """One pass in batches of `size`, or WARM_S of it: engines pay once for every new shape, sizes between too."""
    until = time.perf_counter() + WARM_S
    for first in range(0, max(1, texts - size + 1), size):
        serve(first, size)
        if time.perf_counter() > until:
            return
