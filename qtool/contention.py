"""Notices who else used the CPUs while something was measured: foreign load, steal, quota, OOM kills.

Two snapshots of the kernel's counters, subtracted: nothing runs beside the measurement. The verdict is
recorded with the samples; it never changes them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.procfs import ROOT, cgroup, text, usable_cpus

# Share of the usable CPUs' time. A foreign process on one of 2 cores reads 0.5 and made a batch take 917
# instead of 192 ms where OpenMP threads spin; daemons and kernel work for this process stay under 0.02.
FOREIGN_CPU_LIMIT = 0.05
# Time the hypervisor gave to another guest: no daemon explains it, so less is tolerated.
STEAL_LIMIT = 0.02
# Share of the time in which a cgroup quota held this process back.
THROTTLED_LIMIT = 0.02
# /proc/stat charges whole ticks of 4 to 10 ms to whatever runs at the tick, each CPU apart: so much may be
# chance whatever the ratio. Bursts of 1 to 9 ms alone on 2 cores read up to 0.018 as foreign over 2 s.
TICK_ERROR_S = 0.02


@dataclass(frozen=True)
class Snapshot:
    """Counters at one moment, in seconds since some start; `between` subtracts two. None: not told here."""

    at_s: float
    own_cpu_s: float | None
    busy_s: dict[int, float]
    steal_s: dict[int, float]
    usable: frozenset[int]
    involuntary_switches: int | None
    throttled_s: float | None
    oom_kills: int | None
    load_1min: float | None


def snapshot(root: Path = ROOT) -> Snapshot:
    """Read the counters. Takes milliseconds: before and after a measurement, never inside it."""
    busy_s, steal_s = _cpu_times(text(root / "proc/stat") or "")
    own_cpu_s, involuntary = _own_usage()
    return Snapshot(
        at_s=time.perf_counter(),
        own_cpu_s=own_cpu_s,
        busy_s=busy_s,
        steal_s=steal_s,
        usable=usable_cpus(),
        involuntary_switches=involuntary,
        throttled_s=_throttled(next(iter(cgroup("cpu", "cpu.stat", root)), "")),
        oom_kills=_counter(text(root / "proc/vmstat") or "", "oom_kill"),
        load_1min=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def between(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """What happened on the CPUs this process may use, from one snapshot to the next.

    `foreign_cpu_ratio` = (busy - own) / (wall x CPUs), not below 0; `steal_ratio` likewise; `throttled_ratio`
    is of the wall time. `contended` is True when one is above its limit, and `reason` says which; where the
    system keeps no such counters the fields are None, `contended` is False and `reason` says that.
    """
    wall_s = after.at_s - before.at_s
    cpus = sorted((before.usable | after.usable) & before.busy_s.keys() & after.busy_s.keys())
    facts: dict[str, Any] = {
        "wall_s": wall_s,
        "own_cpu_s": _difference(before.own_cpu_s, after.own_cpu_s),
        "busy_cpu_s": None,
        "steal_s": None,
        "foreign_cpu_ratio": None,
        "steal_ratio": None,
        "throttled_ratio": None,
        "involuntary_switches_per_s": None,
        "load_1min": after.load_1min,
        "oom_kills": _difference(before.oom_kills, after.oom_kills),
        "contended": False,
        "reason": None,
    }
    if wall_s <= 0:
        return facts | {"reason": "no time passed between the two readings"}
    switches = _difference(before.involuntary_switches, after.involuntary_switches)
    throttled_s = _difference(before.throttled_s, after.throttled_s)
    facts["involuntary_switches_per_s"] = None if switches is None else switches / wall_s
    facts["throttled_ratio"] = None if throttled_s is None else throttled_s / wall_s
    reasons = []
    busy_s = sum(after.busy_s[cpu] - before.busy_s[cpu] for cpu in cpus)
    own_cpu_s = facts["own_cpu_s"] or 0.0
    # gVisor shows a /proc/stat full of zeros: nobody was busy, not even this process.
    counted = bool(cpus) and facts["own_cpu_s"] is not None and (busy_s > 0 or own_cpu_s < 0.1)
    if counted:
        available_s = wall_s * len(cpus)
        steal_s = sum(after.steal_s[cpu] - before.steal_s[cpu] for cpu in cpus)
        foreign_s = max(0.0, busy_s - own_cpu_s)
        facts |= {"busy_cpu_s": busy_s, "steal_s": steal_s}
        facts |= {"foreign_cpu_ratio": foreign_s / available_s, "steal_ratio": steal_s / available_s}
        chance_s = TICK_ERROR_S * len(cpus)
        if foreign_s - chance_s > FOREIGN_CPU_LIMIT * available_s:
            reasons.append(f"other processes used {foreign_s / available_s:.0%} of the CPUs")
        if steal_s - chance_s > STEAL_LIMIT * available_s:
            reasons.append(f"the hypervisor took {steal_s / available_s:.0%} of the CPUs")
    if throttled_s is not None and throttled_s > THROTTLED_LIMIT * wall_s:
        reasons.append(f"a cgroup quota held it back for {throttled_s / wall_s:.0%} of the time")
    if reasons:
        return facts | {"contended": True, "reason": "; ".join(reasons)}
    untold = None if counted else "this system does not count CPU time per CPU: contention cannot be seen"
    return facts | {"reason": untold}


def _cpu_times(stat: str) -> tuple[dict[int, float], dict[int, float]]:
    """Busy and stolen seconds of each CPU from /proc/stat, https://man7.org/linux/man-pages/man5/proc_stat.5.html.

    Busy is user + nice + system + irq + softirq; guest time is already inside user.
    """
    busy_s, steal_s = {}, {}
    if not stat:
        return busy_s, steal_s
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    for line in stat.splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, values[:8])
            busy_s[int(name[3:])] = (user + nice + system + irq + softirq) / ticks_per_s
            steal_s[int(name[3:])] = steal / ticks_per_s
    return busy_s, steal_s


def _own_usage() -> tuple[float | None, int | None]:
    """CPU seconds of this process, its reaped children and its living descendants; involuntary switches."""
    try:
        import resource
    except ImportError:
        return None, None
    import psutil

    own = resource.getrusage(resource.RUSAGE_SELF)
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    total_s = own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime
    for child in psutil.Process().children(recursive=True):
        try:
            total_s += sum(child.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total_s, own.ru_nivcsw


def _throttled(stat: str) -> float | None:
    """Seconds for which a quota held this cgroup back: v2 counts microseconds, v1 nanoseconds."""
    microseconds, nanoseconds = _counter(stat, "throttled_usec"), _counter(stat, "throttled_time")
    if microseconds is not None:
        return microseconds / 1e6
    return None if nanoseconds is None else nanoseconds / 1e9


def _counter(lines: str, name: str) -> int | None:
    for line in lines.splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    return None


def _difference(before: Any, after: Any) -> Any:
    return None if before is None or after is None else after - before
