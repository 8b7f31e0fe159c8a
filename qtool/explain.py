"""Why a trial is as fast or as slow as it is: sentences with their numbers, from what was measured and the host.

Pure functions over the summary's rows and the run's record. Where the numbers do not carry a claim, nothing is
said. Knows no recipe's name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from qtool import precision, roofline
from qtool.core import BASELINE
from qtool.host import FLAGS
from qtool.roofline import Line, Work
from qtool.traits import TRAITS
from qtool.units import significant, with_unit

MOST = 4
LEAST_TOKENIZE_SHARE = 0.3
LEAST_HARNESS_SHARE = 0.01
LEAST_CONSTANT_SHARE = 0.5
LEAST_BATCH_RATIO = 1.3
# Within one round nothing bounds the noise between processes, which reached 1.8 times here.
ONE_ROUND_RATIO = 2.0
# Below FAR of the time a ceiling does not explain it, above NEAR it explains most of it.
FAR, NEAR = 0.3, 0.5

Row = Mapping[str, Any]
Reason = tuple[float, str]
"""How telling it is, about the share of the time that it accounts for, and the sentence."""


@dataclass(frozen=True)
class Case:
    """A row of `run` and the format its linear layers multiply in, None where that cannot be told."""

    row: Row
    run: Mapping[str, Any]
    recipe: Mapping[str, Any]
    audit: Mapping[str, Any]
    arithmetic: str | None

    @property
    def name(self) -> str:
        return self.row["recipe"]

    @property
    def p50_s(self) -> float:
        return self.row["metrics"]["latency_p50_s"]["value"]


def explain(
    row: Row,
    rows: Sequence[Row],
    run: Mapping[str, Any],
    *,
    latency_s: Mapping[int, Sequence[float]],
    tokens_by_call: Sequence[int] | None = None,
    ceilings: Mapping[str, Any] | None = None,
    overhead_s: float | None = None,
) -> list[str]:
    """At most `MOST` sentences, the most telling first; none for a row that is not ok.

    `row` and `rows` (all of the run) as in summary.json, `run` as in run.json; `latency_s` by round, where
    sample i belongs to call i % len(tokens_by_call); `ceilings` as `ceilings.take` gives them; `overhead_s` is
    the harness' null call. Old runs lack some of these, and say less.
    """
    if row["status"] != "ok" or not (row["metrics"].get("latency_p50_s") or {}).get("value"):
        return []
    case, tokens = _case(row, run), tokens_by_call or []
    line, on_cpu = roofline.fit(tokens, latency_s) if tokens else None, row["device"] == "cpu"
    work = None
    if on_cpu and tokens and ceilings:
        work = roofline.work(case.audit, median(tokens), ceilings, run.get("model_info") or {})
    # Other work lengthens calls by itself, and the ceilings were taken at another moment.
    quiet = not row.get("contended")
    constant = list(_constant(case, line, work)) if quiet else []
    reasons = [
        *_disturbed(row),
        *constant,
        *_tokenising(case),
        *_batch(case, rows),
        *_harness(case, overhead_s),
    ]
    if on_cpu:
        reasons += [*_instructions(case, rows), *_conversion(case, rows)]
    if work and ceilings and quiet:
        reasons += _bounds(case, work, ceilings, overhead_told=bool(constant))
    return [sentence for _, sentence in sorted(reasons, key=lambda reason: -reason[0])][:MOST]


def _case(row: Row, run: Mapping[str, Any]) -> Case:
    recipe = (run.get("recipes") or {}).get(row["recipe"]) or {}
    audit = row.get("audit") or {}
    return Case(row, run, recipe, audit, precision.arithmetic(recipe, audit, _flags(run)))


def _flags(run: Mapping[str, Any]) -> frozenset[str]:
    return frozenset((run.get("host") or {}).get("cpu_flags") or ())


def _instructions(case: Case, rows: Sequence[Row]) -> Iterator[Reason]:
    """Whether the CPU has instructions for the arithmetic: its lack, or its use where the recipe gains by it."""
    flags, kind, gain = _flags(case.run), case.arithmetic, _gain(case, rows)
    if not flags or gain is None or kind not in ("int8", "bfloat16", "float16"):
        return
    faster, told = gain
    if present := precision.present(kind, flags):
        if faster:
            native = f"in {kind}, which this CPU does natively ({', '.join(present)})"
            yield 0.6, f"Linear layers multiply {native}: {told}."
        return
    trait = next(trait for trait in TRAITS if kind in trait.formats)
    family = next(family for family, names in FLAGS.items() if flags & set(names))
    lacking = f"This CPU has no {trait.name} ({' or '.join(trait.flags[family])})"
    if kind == "int8":
        yield 0.9, f"{lacking}, so each int8 product takes several steps: {told}."
    elif not faster:
        yield 0.95, f"{lacking}, so {kind} is emulated: {told}."


def _gain(case: Case, rows: Sequence[Row]) -> tuple[bool, str] | None:
    """Whether it is clearly faster than float32 in the same engine, else than the baseline, and by how much."""
    peer, baseline = _plain(case, rows, "float32"), case.run.get("baseline", BASELINE)
    speedup = case.row["metrics"].get("speedup") or {}
    known = speedup.get("value") is not None and case.name != baseline
    if peer and not (known and peer.name == baseline):  # what is paired round by round is sharper
        ratio = f"{significant(peer.p50_s / case.p50_s)}x the speed of {peer.name}"
        return _order(case.row, peer.row, "latency_p50_s") < 0, f"{ratio}, the same engine in float32"
    if not known:
        return None
    low = speedup["low"] if speedup["low"] is not None else speedup["value"] / ONE_ROUND_RATIO
    engine = ((case.run.get("recipes") or {}).get(baseline) or {}).get("runtime")
    same = "" if engine == case.recipe.get("runtime") else ", what the engine changes included"
    end = ", the same engine in float32" if peer else same
    return low > 1, f"{significant(speedup['value'])}x the speed of {baseline}{end}"


def _conversion(case: Case, rows: Sequence[Row]) -> Iterator[Reason]:
    """Weights whose stored type is not the one that is multiplied, and what that costs against one that is."""
    stored, into = precision.stored(case.audit), case.arithmetic
    if not precision.converted(case.audit, into) or stored is None or into is None:
        return
    count = significant(precision.linear_elements(case.audit) / 1e6)
    done = "widened" if precision.BYTES[stored] < precision.BYTES[into] else "cast"
    name = precision.stored_name(case.audit)
    fact = f"{count} million weights are stored as {name} and {done} to {into} at every call"
    peer = _plain(case, rows, into)
    if peer is None:
        yield 0.5, f"{fact}: {_ms(case.p50_s)}."
        return
    order = _order(case.row, peer.row, "latency_p50_s")
    times = f"{_ms(case.p50_s)} against {_ms(peer.p50_s)} for {peer.name}"
    if order > 0:
        yield 1 - peer.p50_s / case.p50_s, f"{fact}: {times}, which needs none of that."
    elif order < 0:
        yield 0.5, f"{fact}, and reading fewer bytes outweighs it: {times}, which needs none of that."
    else:
        yield 0.3, f"{fact}; what that costs is not told apart from noise: {times}, which needs none of it."


def _plain(case: Case, rows: Sequence[Row], kind: str) -> Case | None:
    """Another recipe of the same engine, compilation, device and batch that stores and multiplies in `kind`."""
    for row in rows:
        if row["status"] != "ok" or row["recipe"] == case.name:
            continue
        other = _case(row, case.run)
        alike = all(row[name] == case.row[name] for name in ("device", "batch_size"))
        parts = (
            (other.recipe.get(name), case.recipe.get(name)) for name in ("runtime", "compile", "placement")
        )
        alike = alike and bool(other.recipe) and all(own == its for own, its in parts)
        if alike and precision.stored(other.audit) == other.arithmetic == kind:
            return other
    return None


def _constant(case: Case, line: Line | None, work: Work | None) -> Iterator[Reason]:
    """The part of a call that does not grow with its text, where it is most of it beyond the fit's error."""
    if line is None or line.constant_s > 1.2 * case.p50_s:
        return
    if line.constant_s - 2 * line.constant_error_s < LEAST_CONSTANT_SHARE * case.p50_s:
        return
    if work and case.arithmetic == "float32" and line.constant_s + work.products_s > 1.05 * case.p50_s:
        return  # products that fill this time do grow with the text: the line does not hold down to no text
    share = min(1.0, line.constant_s / case.p50_s)
    fact = (
        f"{_ms(line.constant_s)} of the {_ms(case.p50_s)} ({100 * share:.0f} %) do not grow with the text"
        f" (least squares over {line.calls} calls of {line.fewest} to {line.most} tokens)"
    )
    if work is None:
        yield share, f"{fact}: overhead or the reading of weights takes most of the time."
        return
    once = f"reading the weights once takes {_ms(work.reading_s)} at the copy ceiling"
    if line.constant_s >= 2 * work.reading_s:
        also = "converting weights and by " if precision.converted(case.audit, case.arithmetic) else ""
        yield (
            share,
            f"{fact} and {once}: bound by {also}overhead of the call (starting operators, waking threads).",
        )
    elif line.constant_s <= 1.3 * work.reading_s:
        yield share, f"{fact} and {once}: bound by the reading of weights."
    else:
        yield share, f"{fact}, {once}: overhead and the reading of weights share it."


def _bounds(case: Case, work: Work, ceilings: Mapping[str, Any], *, overhead_told: bool) -> Iterator[Reason]:
    """Roofline: the linear layers' work at the ceilings against the p50."""
    took, rate = _ms(case.p50_s), ceilings["fp32_flop_per_s"]
    memory, compute = work.reading_s / case.p50_s, work.products_s / case.p50_s
    # What is narrower than fp32 has a higher ceiling, which was not taken.
    own = compute if case.arithmetic == "float32" else 0.0
    copy = f"{significant(ceilings['copy_bytes_per_s'] / 1e9)} GB/s"
    size = with_unit("weight_bytes", work.weight_bytes)
    reading = f"reading {size} of linear weights takes {_ms(work.reading_s)} at the copy ceiling of {copy}"
    products = (
        f"the products of linear weights with {work.tokens:.0f} tokens take {_ms(work.products_s)} at the fp32 ceiling of"
        f" {_gflop(rate)}"
    )
    if compute > 1.05:
        if case.arithmetic != "float32" and precision.present(case.arithmetic or "", _flags(case.run)):
            reached = f"Linear layers reach {_gflop(work.flop / case.p50_s)}"
            yield (
                0.55,
                f"{reached}, above the fp32 ceiling of {_gflop(rate)}: {case.arithmetic} does more at once.",
            )
    elif overhead_told:
        return
    elif memory >= NEAR and memory > own:
        cached = ", caches helping" if memory > 1.05 else ""
        yield min(memory, 1.0), f"Memory-bound: {reading}, {100 * memory:.0f} % of its {took}{cached}."
    elif own >= NEAR:
        yield own, f"Compute-bound: {products}, {100 * own:.0f} % of its {took}."
    elif max(memory, own) >= FAR:
        kind, fact = ("memory", reading) if memory > own else ("arithmetic", products)
        share = max(memory, own)
        yield share, f"Nearer to the bound of {kind}: {fact}, {100 * share:.0f} % of its {took}."
    elif compute < FAR:
        yield (
            0.5,
            f"Far from both ceilings: {reading}, {products}, and it takes {took}: the rest is other work.",
        )


def _disturbed(row: Row) -> Iterator[Reason]:
    """A GPU that slowed its clocks, or that somebody else computed on: such a time is not the recipe's alone."""
    if row.get("gpu_shared"):
        yield 2.0, "Another process computed on this GPU: its times are those of a shared one."
    if names := row.get("throttled_by"):
        yield (
            2.0,
            f"The GPU slowed its clocks while it worked ({', '.join(names)}): at full clocks it is faster.",
        )


def _tokenising(case: Case) -> Iterator[Reason]:
    share = (case.row["metrics"].get("tokenize_share") or {}).get("value")
    if share is not None and share > LEAST_TOKENIZE_SHARE:
        yield share, f"Tokenising takes {100 * share:.0f} % of the time from text to answer."


def _harness(case: Case, overhead_s: float | None) -> Iterator[Reason]:
    """The null call, where it is not negligible."""
    share = (overhead_s or 0.0) / case.p50_s
    if overhead_s is not None and share > LEAST_HARNESS_SHARE:
        null = f"{significant(overhead_s * 1e6)} us"
        yield (
            share,
            f"{null} of its {_ms(case.p50_s)} ({100 * share:.1f} %) are the harness, by a call that does nothing.",
        )


def _batch(case: Case, rows: Sequence[Row]) -> Iterator[Reason]:
    """A larger batch of the same recipe that answers clearly more texts a second."""
    own = case.row
    alike = [
        row
        for row in rows
        if row["status"] == "ok" and (row["recipe"], row["device"]) == (case.name, own["device"])
    ]
    larger = [
        row
        for row in alike
        if row["batch_size"] > own["batch_size"] and _order(row, own, "throughput_per_s") > 0
    ]
    if not larger:
        return
    best = max(larger, key=lambda row: row["metrics"]["throughput_per_s"]["value"])
    most, now = (row["metrics"]["throughput_per_s"]["value"] for row in (best, own))
    if most / now >= LEAST_BATCH_RATIO:
        yield (
            1 - now / most,
            f"A batch of {own['batch_size']} is too small to use the device well: a batch of {best['batch_size']}"
            f" answers {significant(most)} texts/s against {significant(now)} ({significant(most / now)}x).",
        )


def _order(first: Row, second: Row, metric: str) -> int:
    """-1, 0 or 1: `first` clearly lower, not told apart, clearly higher, by intervals that do not overlap.

    Without intervals the ratio must exceed what noise between processes reached.
    """
    a, b = (row["metrics"].get(metric) or {} for row in (first, second))
    if a.get("value") is None or b.get("value") is None:
        return 0
    if a["low"] is None or b["low"] is None:
        ratio = a["value"] / b["value"]
        return (ratio > ONE_ROUND_RATIO) - (ratio < 1 / ONE_ROUND_RATIO)
    return (a["low"] > b["high"]) - (a["high"] < b["low"])


def _ms(seconds: float) -> str:
    return with_unit("latency_p50_s", seconds)


def _gflop(per_s: float) -> str:
    return f"{significant(per_s / 1e9)} GFLOP/s"
