"""What a placement turned out to be worth: the verdict of a placed trial, from what was measured.

Pure functions. Offload solves fit, not latency: what does not lie where it is computed comes over a link at
every pass, and the verdict names the bytes and what they cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from qtool import topology
from qtool.claims import Exact, Rounds
from qtool.core import METRICS
from qtool.rows import Trial, speedup
from qtool.stats import Interval
from qtool.units import significant

NEAR = 0.5
"""Bytes that at the link's ceiling take this share of the call bind it: as `explain.NEAR`."""
LOW_USE = 0.5
"""A GPU that is busy less than this share of the time waits for something."""
SIZES = ("resident_bytes", "cpu_bytes", "disk_bytes", "moved_bytes")
PROSE = ("name", "description", "source", "expect", "devices", "requires", "placement")
"""Parts of a recipe in which a twin may differ."""


@dataclass(frozen=True)
class Seen:
    """What was measured of a placed trial. `against` is what it is held against, the plain twin or the baseline.

    `speedup` and `tail` (p95 over the other's p95) have no ends after one round, and are None where there is no
    common round. `utilization_ratio` is the GPU's, None on a CPU or where the board does not tell.
    """

    status: str
    device: str
    placement: Mapping[str, Any] | None
    p50_s: float | None
    against: str | None = None
    against_status: str = "ok"
    speedup: Interval | None = None
    tail: Interval | None = None
    utilization_ratio: float | None = None
    cause: str | None = None


def see(trial: Trial, other: Trial | None) -> Seen:
    """The numbers of `trial` against those of `other`, in the rounds that both have."""
    placements = [line.values.get("placement") for line in trial.rounds.values()]
    placed = next((each for each in placements if _whole(each)), None)
    own, uses = trial.p50_s(), trial.values("gpu_utilization_ratio")
    ratio = speedup(trial, other) if other else None
    return Seen(
        trial.status,
        trial.group.device,
        placed,
        Rounds(list(own.values())).value if own else None,
        other.recipe if other else None,
        other.status if other else "ok",
        ratio.interval() if isinstance(ratio, Rounds | Exact) else None,
        _tail(trial, other) if other else None,
        mean(uses.values()) if uses else None,
        trial.cause,
    )


def _whole(placement: Any) -> bool:
    """Whether it is what `runtimes._offload.found` gives: a run folder may come from somebody else."""
    if not isinstance(placement, dict) or not isinstance(placement.get("device_map"), dict):
        return False
    gpus = placement.get("gpus") or []
    if not isinstance(gpus, list) or not all(isinstance(number, int) for number in gpus):
        return False
    return all(isinstance(placement.get(name), int) for name in SIZES)


def _tail(trial: Trial, other: Trial) -> Interval | None:
    own, its = (each.series("latency_p95_s") or {} for each in (trial, other))
    shared = sorted(own.keys() & its.keys())
    return Rounds([own[r] / its[r] for r in shared]).interval() if shared else None


def twin(name: str, recipes: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The recipe without a placement that is otherwise the same, of those in `recipes` (as in run.json)."""

    def content(recipe: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in recipe.items() if key not in PROSE}

    own = recipes.get(name) or {}
    return next(
        (
            other
            for other, recipe in recipes.items()
            if other != name and not recipe.get("placement") and content(recipe) == content(own)
        ),
        None,
    )


def judge(
    trial: Trial,
    others: Mapping[str, Trial],
    run: Mapping[str, Any],
    baseline: str,
    ceilings: Mapping[str, Any] | None,
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """A trial's placement and its verdict, both None where nothing was placed and memory was enough.

    `others` are the trials of the same device and batch size by recipe; `run` is run.json.
    """
    recipes = run.get("recipes") or {}
    if trial.status != "oom" and not (recipes.get(trial.recipe) or {}).get("placement"):
        return None, None
    plain = twin(trial.recipe, recipes) or baseline
    seen = see(trial, others.get(plain) if plain != trial.recipe else None)
    placement = dict(seen.placement) if seen.placement else None
    return placement, verdict(seen, ceilings, (run.get("host") or {}).get("topology"))


def verdict(
    seen: Seen, ceilings: Mapping[str, Any] | None = None, joined: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """`kind`, `against` and `sentence`; None for a trial that was not measured for another reason than memory.

    `ceilings` as `ceilings.take` gives them, `joined` as `topology.read` does. Kinds: 'fits and faster', 'fits, no
    faster', 'fits only by offload', 'transfer-bound', 'does not fit'.
    """
    if seen.status == "oom":
        return _told("does not fit", seen, seen.cause or "out of memory")
    if seen.status != "ok" or not seen.placement or not seen.p50_s:
        return None
    if not seen.placement["moved_bytes"]:
        return _resident(seen, joined or {})
    return _offloaded(seen, seen.placement, ceilings or {})


def _told(kind: str, seen: Seen, *clauses: str) -> dict[str, Any]:
    words = ", ".join(clause for clause in clauses if clause)
    return {"kind": kind, "against": seen.against, "sentence": f"{kind}: {words}." if words else f"{kind}."}


def _resident(seen: Seen, joined: Mapping[str, Any]) -> dict[str, Any]:
    assert seen.placement is not None
    gpus = [place for place in seen.placement["device_map"] if place.startswith("cuda:")]
    across = topology.joined(joined, seen.placement.get("gpus"), len(gpus)) if len(gpus) > 1 else ""
    if seen.speedup is None:
        why = (
            f"{seen.against} is {seen.against_status}"
            if seen.against_status != "ok"
            else "nothing to compare with"
        )
        return _told("fits, no faster", seen, why, across)
    told = f"{_times(seen.speedup)} the speed of {seen.against}"
    faster = seen.speedup.low is not None and seen.speedup.low > 1
    return _told("fits and faster" if faster else "fits, no faster", seen, told, across)


def _offloaded(seen: Seen, placement: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, Any]:
    p50_s, moved = seen.p50_s or 0.0, placement["moved_bytes"]
    link, rate = _link(seen.device, placement, ceilings)
    cost, bytes_ = _cost(seen), f"{_size(moved)} {_way(seen.device, placement)} at each pass"
    share = moved / rate / p50_s if rate else 0.0
    waits = seen.device == "cpu" or (seen.utilization_ratio is not None and seen.utilization_ratio < LOW_USE)
    slower = seen.tail is None or (seen.tail.low or seen.tail.value) > 1
    if rate and share >= NEAR and waits and slower:
        used = (
            ""
            if seen.utilization_ratio is None
            else f"the GPU busy {100 * seen.utilization_ratio:.0f} % of the time"
        )
        near = f"{significant(moved / p50_s / 1e9)} GB/s of the {significant(rate / 1e9)} GB/s that {link} gives at most"
        return _told("transfer-bound", seen, cost, bytes_, near, used)
    return _told("fits only by offload", seen, cost, bytes_, _without(seen))


def _cost(seen: Seen) -> str:
    """How much worse the tail is; where no p95 is shared, how much slower the median."""
    if seen.against is None or (seen.tail is None and seen.speedup is None):
        return ""
    if seen.tail is None:
        return f"{_times(seen.speedup)} the speed of {seen.against} at the median" if seen.speedup else ""
    low = seen.tail.low if seen.tail.low is not None else seen.tail.value
    if low > 1:
        return f"p95 {_times(seen.tail)} worse than {seen.against}'s"
    return f"p95 {_times(seen.tail)} that of {seen.against}"


def _without(seen: Seen) -> str:
    if seen.against is None:
        return ""
    if seen.against_status == "oom":
        return f"{seen.against} does not fit"
    return f"without this placement {seen.against} fits here whole" if seen.against_status == "ok" else ""


def _times(ratio: Interval | None) -> str:
    """2.3x [2.1, 2.5]; one round has no ends, and shows nothing."""
    if ratio is None:
        return "not known"
    ends = (
        " (one round)"
        if ratio.low is None or ratio.high is None
        else f" [{significant(ratio.low)}, {significant(ratio.high)}]"
    )
    return f"{significant(ratio.value)}{METRICS['speedup'].unit}{ends}"


def _size(size: float) -> str:
    return f"{significant(size / 1e9)} GB" if size >= 1e9 else f"{significant(size / 1e6)} MB"


def _way(device: str, placement: Mapping[str, Any]) -> str:
    if device == "cpu":
        return f"come from {_storage(placement)}"
    if not placement["disk_bytes"]:
        return "cross the bus"
    return f"cross the bus, those on disk from {_storage(placement)}"


def _cached(placement: Mapping[str, Any]) -> bool | None:
    """Whether what is on disk came from the page cache, and not from storage; None where neither was shown."""
    read = placement.get("storage_read_bytes")
    if read is None or not placement["disk_bytes"]:
        return None
    return read < NEAR * min(placement["disk_bytes"], placement["moved_bytes"])


def _storage(placement: Mapping[str, Any]) -> str:
    names = {True: "the disk's page cache", False: "the disk itself", None: "the disk or its page cache"}
    return names[_cached(placement)]


def _link(device: str, placement: Mapping[str, Any], ceilings: Mapping[str, Any]) -> tuple[str, float | None]:
    """The slowest link that most of the moved bytes take, and its ceiling in bytes a second."""
    from_disk = placement["disk_bytes"] >= placement["cpu_bytes"]
    cached = _cached(placement)
    if from_disk and cached is False:
        return "the disk", ceilings.get("disk_read_bytes_per_s")
    if device == "cuda":
        return "a copy from pageable memory", ceilings.get("pageable_copy_bytes_per_s")
    return "the page cache", ceilings.get("page_cache_read_bytes_per_s") if cached else None
