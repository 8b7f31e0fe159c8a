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
    lines += [_curve(row) for row in rows if len(row["curve"]) > 1]
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
    rivals = [row["largest_rate_per_s"] or 0 for row in found["rows"] if row is not best]
    # one that carries more, and yet breaks the SLA while traffic is as thin as was asked
    most = "carries most" if all(best["largest_rate_per_s"] >= rival for rival in rivals) else "fits best"
    most = f"{best['recipe']} {most}: {_largest(best)} within the SLA"
    tied = ", ".join(found["not_told_apart"])
    more = f"; not told apart from {tied}" if tied else ""
    if rivals and best["rounds"] == 1:
        more = "; one measured process tells none apart"
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
            f"in {row['rounds_without_bound']} of {row['rounds']} measured processes the queue {UNBOUNDED}"
        )
    elif (row["simulation_error_ratio"] or 0) > 0.1:
        told.append(f"the simulated p95 is known to {100 * row['simulation_error_ratio']:.0f} % at this load")
    p95 = row["p95_s"]
    if p95["low"] is not None and p95["low"] <= found["sla_s"] <= p95["high"]:
        told.append("the SLA lies inside the p95's interval: a close call")
    if not row["meets"]:
        told += _why_not(found, row)
    return told


def _why_not(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    p95_s, sla_s = row["p95_s"]["value"], found["sla_s"]
    if p95_s is not None and p95_s <= sla_s:
        most = f"{100 * found['most_load_ratio']:.0f} %"
        return [f"a load of {100 * row['load_ratio']:.0f} %: above {most} no rate is called safe"]
    if row["lone_service_p95_s"] > sla_s:
        more = "" if row["replicas"] else ": more replicas do not help"
        return [
            f"even a lone request breaks the SLA, it takes {ms(row['lone_service_p95_s'])} ms (p95){more}"
        ]
    if row["lone_p95_s"] > sla_s:
        return [
            f"a lone request waits max-wait in vain and is answered after {ms(row['lone_p95_s'])} ms (p95),"
            " beyond the SLA"
        ]
    if row["largest_rate_per_s"] is None:
        return ["one replica keeps the SLA at no rate, for requests come together; a lone one is fast enough"]
    return []


def _curve(row: Mapping[str, Any]) -> str:
    """Latency and throughput by batch size, of the model alone."""
    points = []
    for point in row["curve"]:
        tail = "" if point["p95_s"] is None else f", p95 {ms(point['p95_s'])}"
        many = NONE if point["throughput_per_s"] is None else significant(point["throughput_per_s"])
        points.append(f"batch {point['batch_size']}: p50 {ms(point['p50_s'])}{tail} ms, {many} texts/s")
    return f"{row['recipe']}, model alone: {'; '.join(points)}"


def _next(found: Mapping[str, Any]) -> list[str]:
    """When one process is enough, and when a dedicated server is the next step."""
    best = next((row for row in found["rows"] if row["recipe"] == found["best"]), None)
    if best is None:
        able = [row for row in found["rows"] if row["replicas"]]
        return (
            _step(found, min(able, key=lambda row: row["replicas"]))
            if able
            else [_no_replica(found, found["rows"])]
        )
    largest, asked = best["largest_rate_per_s"], found["arrival_per_s"]
    share, own = (f"{100 * value:.0f} %" for value in (largest / best["capacity_per_s"], best["load_ratio"]))
    if not best["meets"] and asked <= largest:
        lines = [
            f"{best['recipe']} keeps the SLA at a load of {share}, but not at {own}, {rate(asked)}:"
            " batches wait max-wait and do not fill"
        ]
    else:
        safe = " (no higher load is called safe)" if best["at_most_load"] else ""
        lines = [f"{best['recipe']} keeps the SLA up to a load of {share}{safe}; {rate(asked)} is {own}"]
    return lines + _step(found, best)


def _no_replica(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """What helps where no number of replicas does."""
    if any(row["lone_service_p95_s"] <= found["sla_s"] < row["lone_p95_s"] for row in rows):
        return "next: a shorter max-wait; replicas make traffic thinner, and batches wait longer to fill"
    if all(row["lone_service_p95_s"] > found["sla_s"] for row in rows):
        return (
            "next: a faster recipe, a shorter text or another device; a server in front does not make a lone request"
            " faster"
        )
    return "next: a faster recipe or a looser SLA; no number of replicas that was simulated keeps it"


def _step(found: Mapping[str, Any], row: Mapping[str, Any]) -> list[str]:
    """The next step with one recipe, and the server that fits it."""
    asked, needed, fit = found["arrival_per_s"], row["replicas"], found["replicas_that_fit"]
    if needed is None:
        return [_no_replica(found, [row])]
    if row["meets"]:
        largest = rate(row["largest_rate_per_s"])
        lines = [
            f"next: nothing yet. One process is enough up to {largest}; above it run replicas behind a server"
        ]
    elif fit is not None and needed <= fit:
        lines = [
            f"next: {needed} replicas, each with 1/{needed} of the traffic ({rate(asked / needed)});"
            f" {found['physical_cores']} cores fit {fit}. They share caches and memory, which was not measured"
        ]
    else:
        here = f", and this host's {found['physical_cores']} cores fit {fit}" if fit is not None else ""
        lines = [
            f"next: a dedicated server over several machines. It needs {needed} replicas, each with 1/{needed} of the"
            f" traffic ({rate(asked / needed)}){here}"
        ]
    server = SERVERS.get(found["runtimes"].get(row["recipe"]) or "")
    if server:
        settings = (
            f"max_batch_size {row['max_batch']}, max_queue_delay_microseconds {1e6 * row['max_wait_s']:.0f}"
        )
        lines.append(f"server: {server} fits {row['recipe']} (Triton: {settings}); {GENERATION}")
    return lines


def _method(found: Mapping[str, Any]) -> list[str]:
    what = "from text to class" if found["samples"] == "end_to_end_s" else "of the model alone"
    few, many = (pick(row["rounds"] for row in found["rows"]) for pick in (min, max))
    spread = "from one measured process, so without an interval"
    if many > 1:
        count = str(many) if few == many else f"each recipe's {few} to {many}"
        spread = f"the median over {count} measured processes, [low, high] is its 95 % interval"
    lines = [
        f"simulated: {found['pattern_told']}; {POLICY}",
        f"batches take the run's stored times {what}, between two measured sizes interpolated linearly; {spread}",
        "load is the rate over what full batches take, busy the share of time a replica works, wait the mean until a"
        " batch starts; requests spread over replicas at random",
    ]
    if all(row["after_pause"] for row in found["rows"]):
        lines.append("a batch that finds the replica idle takes the run's times of calls after a pause")
    else:
        lines.append(
            "the run's calls follow each other without a pause; a processor that idled between requests is slower,"
            " most of all at low load on a shared machine: sweep again to measure it"
        )
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
        _kept(found),
        f"p95 predicted over real {_ratio(found['predicted_over_real']['p95_s'])} from the run,"
        f" {_ratio(found['predicted_own_over_real']['p95_s'])} from this process's own calls without pauses,"
        f" {_ratio(found['predicted_served_over_real']['p95_s'])} from its calls as they were served (the queue alone)",
        f"this process's calls without pauses took {_sizes(found['own_over_run'])} times the run's; as they were served,"
        f" with pauses between them, {found['served_over_own']:.2f} times its own",
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


def _kept(found: Mapping[str, Any]) -> str:
    p95_s, error = found["real"]["p95_s"], found["real_error_ratio"] or 0.0
    close = abs(p95_s - found["sla_s"]) <= error * p95_s
    verdict = "was kept" if found["meets"] else "was broken"
    return f"the SLA ({_limit(found)}) {verdict}: the real p95 was {ms(p95_s)} ms" + (
        ", a close call" if close else ""
    )


def _real_table(found: Mapping[str, Any]) -> Sequence[str]:
    lines = [f"{'ms':<34}{'p50':>8}{'p95':>8}{'p99':>8}"]
    for name, key in (
        ("real", "real"),
        ("predicted from the run", "predicted"),
        ("predicted from its own calls", "predicted_own"),
        ("predicted from calls as served", "predicted_served"),
    ):
        values = [found[key][p] for p in ("p50_s", "p95_s", "p99_s")]
        told = [ms(value["value"] if isinstance(value, Mapping) else value) for value in values]
        lines.append(f"{name:<34}" + "".join(f"{cell:>8}" for cell in told))
    return lines


def _ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _sizes(ratios: Mapping[str, float]) -> str:
    return ", ".join(f"{ratio:.2f} (batch {size})" for size, ratio in ratios.items())
