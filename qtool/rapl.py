"""Energy of a CPU run by RAPL: the counters of the processor packages, read before and after a pass of its own.

Linux shows them as `intel-rapl:N` under /sys/class/powercap, on AMD too
(https://docs.kernel.org/power/powercap/powercap.html). Only packages are summed: cores and uncore are inside them,
psys holds them, and DRAM is not told everywhere. What is not told is None with a reason, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.procfs import ROOT, text
from qtool.timing import whole_passes

FOLDER = "sys/class/powercap"
PASS_S = 2.0
"""The counters step every millisecond (Khan et al. 2018, "RAPL in Action", https://doi.org/10.1145/3177754)."""


class NoCounters(Exception):
    """The counters cannot be read; the message says which file and what would allow it."""


def sample(
    predict: Callable[[Any], Any], batches: Sequence[Any], min_time_s: float = PASS_S, root: Path = ROOT
) -> dict[str, Any]:
    """Run whole passes for `min_time_s`: energy_j a call and power_w (mean), or both None with their reason.

    It is the energy of whole packages: idle power and whatever else runs on them included.
    """
    try:
        packages = find(root)
        before = read(packages)
        calls, seconds = whole_passes(predict, batches, min_time_s)
        after = read(packages)
        joules = spent_j(before, after, packages)
        if joules <= 0:  # some virtual machines have the files and nothing behind them
            raise NoCounters(f"the energy counters of /{FOLDER} did not move in {seconds:.1f} s of work")
    except NoCounters as error:
        return {name: None for name in ("energy_j", "power_w")} | {
            f"{name}_reason": str(error) for name in ("energy_j", "power_w")
        }
    return {
        "energy_j": joules / calls,
        "power_w": joules / seconds,
        "energy_source": "rapl",
        "energy_domains": sorted(text(path / "name") or path.name for path in packages),
    }


def find(root: Path = ROOT) -> dict[Path, int]:
    """Folder of each package's counter: the number (microjoules) at which it starts again from 0.

    The same packages seen through memory-mapped registers (intel-rapl-mmio) are left out.
    Raises NoCounters where there are none.
    """
    folder = root / FOLDER
    zones = sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else []
    if not zones:
        raise NoCounters(
            "no energy counters: there is no /sys/class/powercap/intel-rapl:0 here, as in most containers and"
            " virtual machines. Run on the machine itself (Linux, module intel_rapl_msr)"
        )
    names = {zone: text(zone / "name") or "" for zone in zones}
    packages = [zone for zone, name in names.items() if name.startswith("package")]
    if not packages:
        told = ", ".join(sorted(set(names.values()))) or "nothing"
        raise NoCounters(f"no energy counter of a whole processor: /sys/class/powercap has {told} alone")
    return {zone: _number(zone / "max_energy_range_uj") for zone in packages}


def read(packages: Mapping[Path, int]) -> dict[Path, int]:
    """Microjoules of each package now. Raises NoCounters where one may not be read."""
    return {zone: _number(zone / "energy_uj") for zone in packages}


def spent_j(before: Mapping[Path, int], after: Mapping[Path, int], ranges: Mapping[Path, int]) -> float:
    """Joules between two readings. A counter that went back has passed its range once.

    A range lasts for minutes at full power, and a pass for seconds.
    """
    spent_uj = 0
    for zone, was in before.items():
        went = after[zone] - was
        spent_uj += went if went >= 0 else went + ranges[zone]
    return spent_uj / 1e6


def _number(path: Path) -> int:
    shown = f"/{FOLDER}/{path.parent.name}/{path.name}"
    try:
        return int(path.read_text())
    except PermissionError:
        # readable by root alone since CVE-2020-8694
        raise NoCounters(
            f"{shown} may be read by root alone: sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj allows it"
        ) from None
    except (OSError, ValueError) as error:
        raise NoCounters(f"{shown} cannot be read: {error}") from None
