"""`qtool load` in words: the table, the recipe that carries most, and when a dedicated server is the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qtool.report.text import one_line
from qtool.units import NONE, significant

POLICY = (
    "first come first served, one batch at a time; it starts when the replica is free and either max-batch requests"
    " wait or the oldest has waited max-wait"
)
UNBOUNDED = "grows without bound"
SERVERS = {
    "openvino": "OpenVINO Model Server, or Triton with its OpenVINO backend,",
    "onnxruntime": "Triton with its ONNX Runtime backend",
    "pytorch": "Triton with its PyTorch or Python backend",
}
GENERATION = "vLLM, TGI and TensorRT-LLM batch the tokens of generated text; a classifier has none"


def render(found: Mapping[str, Any]) -> str:
    """Lines for a terminal or a log."""
    rows = found["rows"]
    lines = _lead(found)
    lines += ["", *_table(found), ""]
    lines += [f"{row['recipe']}: {told}" for row in rows for told in _remarks(found, row)]
    lines += [f"note: {note}" for note in found["notes"]]
    lines += [f"left out: {name}: {why}" for name, why in found["left_out"].items()]
    lines += ["", *_next(found), "", *_method(found)]
    return "\n".join(map(one_line, lines))


def rate(value: float) -> str:
    return f"{significant(value)}/s"


def ms(value: float | None) -> str:
    return NONE if value is None else significant(1e3 * value)


def _limit(found: Mapping[str, Any]) -> str:
    return f"p95 <= {ms(found['sla_s'])} ms from arrival to answer"


def _lead(found: Mapping[str, Any]) -> list[str]:
    asked = f"{rate(found['arrival_per_s'])} ({found['pattern']}), {_limit(found)}, {_where(found)}"
    best = next((row for row in found["rows"] if row["recipe"] == found["best"]), None)
    if best is None:
        return [f"no recipe keeps the SLA on one replica, at any rate: {asked}"]
    most = f"{best['recipe']} carries most: {_largest(best)} within the SLA"
    tied = ", ".join(found["not_told_apart"])
    more = f"; not told apart from {tied}" if tied else ""
    verdict = "keeps" if best["meets"] else "does not keep"
    return [f"{most}{more}", f"one replica {verdict} it at {asked}"]


def _where(found: Mapping[str, Any]) -> str:
    threads = found["threads"]
    return found["device"] + (f", {threads} thread{'s' if threads != 1 else ''} a replica" if threads else "")


def _largest(row: Mapping[str, Any]) -> str:
    if not row["largest_rate_per_s"]:
        return "none"
    return rate(row["largest_rate_per_s"])


def _table(found: Mapping[str, Any]) -> list[str]:
    header = ["recipe", "max-batch", "max-wait ms", "p50 ms", "p95 ms", "p99 ms", "wait ms", "busy %"]
    header += ["load %", "largest rate", "replicas"]
    body = [_cells(row) for row in found["rows"]]
    widths = [max(len(line[i]) for line in [header, *body]) for i in range(len(header))]
    lines = []
    for line in [header, *body]:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return lines


def _cells(row: Mapping[str, Any]) -> list[str]:
    p95 = row["p95_s"]
    bounds = "" if p95["low"] is None else f" [{ms(p95['low'])}, {ms(p95['high'])}]"
    told = UNBOUNDED if p95["value"] is None else ms(p95["value"]) + bounds
    no_bound = p95["value"] is None
    busy = NONE if no_bound else significant(100 * row["busy_ratio"])
    return [
        row["recipe"],
        str(row["max_batch"]),
        f"{1e3 * row['max_wait_s']:g}",
        ms(row["p50_s"]["value"]),
        told,
        ms(row["p99_s"]["value"]) + ("?" if row["p99_reason"] and not no_bound else ""),
        NONE if no_bound else ms(row["mean_wait_s"]),
        busy,
        significant(100 * row["load_ratio"]),
        _largest(row),
        NONE if row["replicas"] is None else str(row["replicas"]),
    ]


def _remarks(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    told = []
    if row["p95_s"]["value"] is None:
        told.append(
            f"{rate(found['arrival_per_s'])} is {row['load_ratio']:.2f} times what full batches take"
            f" ({rate(row['capacity_per_s'])}): the queue {UNBOUNDED}"
        )
    elif row["rounds_without_bound"]:
        told.append(
            f"in {row['rounds_without_bound']} of {found['rounds']} measured processes the queue {UNBOUNDED}"
        )
    elif (row["simulation_error_ratio"] or 0) > 0.1:
        told.append(f"the simulated p95 is known to {100 * row['simulation_error_ratio']:.0f} % at this load")
    p95 = row["p95_s"]
    if p95["low"] is not None and p95["low"] <= found["sla_s"] <= p95["high"]:
        told.append("the SLA lies inside the p95's interval: a close call")
    if row["largest_rate_per_s"] is None:
        told.append("even a lone request breaks the SLA: more replicas do not help")
    return told


def _next(found: Mapping[str, Any]) -> list[str]:
    """When one process is enough, and when a dedicated server is the next step."""
    best = next((row for row in found["rows"] if row["recipe"] == found["best"]), None)
    if best is None:
        return [
            "next: a faster recipe, a shorter text or another device; a server in front does not make a lone request faster"
        ]
    largest, fit = best["largest_rate_per_s"], found["replicas_that_fit"]
    share = largest / best["capacity_per_s"]
    lines = [
        f"{best['recipe']} keeps the SLA up to a load of {100 * share:.0f} %"
        + (" (no higher load is called safe)" if best["at_most_load"] else "")
        + f"; {rate(found['arrival_per_s'])} is {100 * best['load_ratio']:.0f} %"
    ]
    needed = best["replicas"]
    if needed is None:
        return lines
    if needed == 1:
        lines.append(
            f"next: nothing yet. One process is enough up to {rate(largest)}; above it run replicas behind a server"
        )
    elif fit is not None and needed <= fit:
        lines.append(
            f"next: {needed} replicas, each with 1/{needed} of the traffic ({rate(found['arrival_per_s'] / needed)});"
            f" {found['physical_cores']} cores fit {fit}. They share caches and memory, which was not measured"
        )
    else:
        here = f", and this host's {found['physical_cores']} cores fit {fit}" if fit is not None else ""
        lines.append(
            f"next: a dedicated server over several machines. It needs {needed} replicas, each with 1/{needed} of the"
            f" traffic ({rate(found['arrival_per_s'] / needed)}){here}"
        )
    server = SERVERS.get(found["runtimes"].get(best["recipe"]) or "")
    if server:
        settings = (
            f"max_batch_size {best['max_batch']}, max_queue_delay_microseconds {1e6 * best['max_wait_s']:.0f}"
        )
        lines.append(f"server: {server} fits {best['recipe']} (Triton: {settings}); {GENERATION}")
    return lines


def _method(found: Mapping[str, Any]) -> list[str]:
    what = "from text to class" if found["samples"] == "end_to_end_s" else "of the model alone"
    rounds = found["rounds"]
    spread = (
        f"the median over {rounds} measured processes, [low, high] is its 95 % interval"
        if rounds > 1
        else "from one measured process, so without an interval"
    )
    lines = [
        f"simulated: {found['pattern_told']}; {POLICY}",
        f"batches take the run's stored times {what}, between two measured sizes interpolated linearly; {spread}",
        "load is the rate over what full batches take, busy the share of time a replica works, wait the mean until a"
        " batch starts; requests spread over replicas at random",
    ]
    if any(row["p99_reason"] for row in found["rows"]):
        lines.append("? a p99 that rests on fewer stored times than a p99 of theirs needs (662)")
    return lines


def render_real(found: Mapping[str, Any]) -> str:
    """Predicted beside real, and what parts them."""
    policy = f"max-batch {found['max_batch']}, max-wait {1e3 * found['max_wait_s']:g} ms"
    lines = [
        f"{found['recipe']} on {_where(found)}: {rate(found['arrival_per_s'])} ({found['pattern']}), {policy},"
        f" load {100 * found['load_ratio']:.0f} %, {found['requests']:,} requests after the warm-up",
        "",
        *_real_table(found),
        "",
        f"p95 predicted over real {_ratio(found['predicted_over_real']['p95_s'])} from the run,"
        f" {_ratio(found['predicted_own_over_real']['p95_s'])} from this process's own calls",
        f"this process's calls took {_sizes(found['own_over_run'])} times the run's; under load they took"
        f" {found['served_over_own']:.2f} times its own",
        f"busy {100 * found['busy_ratio']:.0f} %, {found['mean_batch']:.2f} requests a batch, batches started"
        f" {ms(found['late_p50_s'])} ms late (p95 {ms(found['late_p95_s'])} ms)",
    ]
    if found["real_error_ratio"] is not None:
        lines.append(
            f"the real p95 is known to {100 * found['real_error_ratio']:.0f} % (ten blocks of requests)"
        )
    if found["contended"]:
        lines.append(f"other work used the CPUs meanwhile: {found['contention']}")
    lines.append("times count from the intended arrival, one thread serves, there is no network")
    return "\n".join(map(one_line, lines))


def _real_table(found: Mapping[str, Any]) -> Sequence[str]:
    lines = [f"{'ms':<34}{'p50':>8}{'p95':>8}{'p99':>8}"]
    for name, key in (
        ("real", "real"),
        ("predicted from the run", "predicted"),
        ("predicted from its own calls", "predicted_own"),
    ):
        values = [found[key][p] for p in ("p50_s", "p95_s", "p99_s")]
        told = [ms(value["value"] if isinstance(value, Mapping) else value) for value in values]
        lines.append(f"{name:<34}" + "".join(f"{cell:>8}" for cell in told))
    return lines


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _sizes(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{ratio:.2f} (batch {size})" for size, ratio in ratios.items())
