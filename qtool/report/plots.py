"""`frontier.svg` and `frontier.png`: two panels a group, with intervals and the frontier as a step line.

Readable in black and white: recipes differ by marker and label, frontier members are filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.core import METRICS
from qtool.report import text
from qtool.units import peak_name, unit

MARKERS = "osD^vP*Xphd8"
PANEL_INCHES = (6.4, 4.6)
DOTS_PER_INCH = 160
# Where a label may stand around its point, in degrees and points of the page: near first, right before left.
ANGLES = (40, -40, 140, -140, 20, -20, 160, -160, 90, -90)
DISTANCES = (11, 17, 26, 40, 56)


@dataclass(frozen=True)
class Point:
    recipe: str
    marker: str
    on_frontier: bool
    x: dict[str, Any]
    y: dict[str, Any]


def draw(summary: dict[str, Any], run_dir: Path) -> None:
    """Write both files into `run_dir`; the same summary gives the same bytes of SVG."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = [g for g in summary["frontier"] if _ok(summary, g)] or summary["frontier"][:1] or [None]
    size = (2 * PANEL_INCHES[0], PANEL_INCHES[1] * len(groups) + 0.5)
    # Text stays text in the SVG: small, searchable, and the same on every machine.
    with mpl.rc_context({"svg.hashsalt": "qtool", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=size, layout="constrained", dpi=DOTS_PER_INCH)
        FigureCanvasAgg(figure)
        axes = figure.subplots(len(groups), 2, squeeze=False)
        for row, group in zip(axes, groups, strict=True):
            for axis, (x, y) in zip(row, _panels(summary, group), strict=True):
                _panel(axis, summary, group, x, y)
        figure.supxlabel(
            "filled: on the frontier of all objectives · line: best of the filled in these two · bars: 95 % "
            "interval of each recipe alone; differences are paired and tighter, see the table",
            fontsize=9,
        )
        figure.canvas.draw()
        # The layout is settled: names that are placed by hand must not move it again.
        figure.set_layout_engine("none")
        for axis in axes.flat:
            _label(axis)
        figure.savefig(run_dir / "frontier.png", metadata={"Software": None})
        figure.savefig(run_dir / "frontier.svg", metadata={"Date": None, "Creator": None})


def _ok(summary: dict[str, Any], group: dict[str, Any] | None) -> list[text.Row]:
    if group is None:
        return []
    return [row for row in text.group_rows(summary, group) if row["status"] == "ok"]


def _panels(summary: dict[str, Any], group: dict[str, Any] | None) -> list[tuple[str, str]]:
    peak, metric = peak_name(group["device"] if group else "cpu"), summary["metric"]
    if metric is None:
        return [("latency_p50_s", peak), ("latency_p50_s", "disk_bytes")]
    return [("latency_p50_s", metric), (peak, metric)]


def _panel(axis: Any, summary: dict[str, Any], group: dict[str, Any] | None, x: str, y: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    points = [
        Point(
            row["recipe"],
            MARKERS[number % len(MARKERS)],
            row["on_frontier"],
            row["metrics"][x],
            row["metrics"][y],
        )
        for number, row in enumerate(_ok(summary, group))
        if row["metrics"][x]["value"] is not None and row["metrics"][y]["value"] is not None
    ]
    axis.set_title(
        f"{text.group_title(group)}: {_title(y)} against {_title(x)}" if group else "", fontsize=11
    )
    axis.set_xlabel(_axis_title(x, "left"))
    axis.set_ylabel(_axis_title(y, "up" if METRICS[y].better == "higher" else "down"))
    axis.grid(True, color="0.9", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    if not points:
        axis.text(0.5, 0.5, "nothing to draw", ha="center", va="center", transform=axis.transAxes)
        return
    for point in points:
        axis.errorbar(
            _scale(x, point.x["value"]),
            _scale(y, point.y["value"]),
            xerr=_error(x, point.x),
            yerr=_error(y, point.y),
            fmt=point.marker,
            markersize=8,
            color="black",
            markerfacecolor="black" if point.on_frontier else "white",
            ecolor="0.6",
            elinewidth=1,
            capsize=2,
            zorder=3,
            label=point.recipe,
        )
    axis.margins(0.1)
    xs = [point.x["value"] for point in points]
    if min(xs) > 0 and max(xs) / min(xs) > 8:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_locator(NullLocator())
    _step(axis, [point for point in points if point.on_frontier], x, y)


def _title(name: str) -> str:
    return {"latency_p50_s": "latency p50", "disk_bytes": "size on disk"}.get(name, METRICS[name].label)


def _axis_title(name: str, better: str) -> str:
    return ", ".join(filter(None, (_title(name), unit(name)))) + f" ({better} is better)"


def _scale(name: str, value: float) -> float:
    return value * {"ms": 1e3, "MB": 1e-6, "%": 100.0}.get(unit(name), 1.0)


def _error(name: str, cell: dict[str, Any]) -> list[list[float]] | None:
    if cell["low"] is None or cell["high"] is None:
        return None
    return [[_scale(name, cell["value"] - cell["low"])], [_scale(name, cell["high"] - cell["value"])]]


def _step(axis: Any, members: list[Point], x: str, y: str) -> None:
    """The staircase of the members that no other beats in both of these two, out to the panel's edges."""
    sign = 1 if METRICS[y].better == "higher" else -1
    best, stairs = -math.inf, []
    for point in sorted(members, key=lambda p: (p.x["value"], -sign * p.y["value"])):
        if sign * point.y["value"] > best:
            best = sign * point.y["value"]
            stairs.append((_scale(x, point.x["value"]), _scale(y, point.y["value"])))
    if not stairs:
        return
    right, (bottom, top) = axis.get_xlim()[1], axis.get_ylim()
    stairs = [(stairs[0][0], bottom if sign > 0 else top), *stairs, (right, stairs[-1][1])]
    axis.autoscale(False)
    axis.step(*zip(*stairs, strict=True), where="post", color="0.35", linewidth=1.4, linestyle="--", zorder=1)


def _label(axis: Any) -> None:
    """Names beside the points: each takes the first place that touches no marker and no earlier name."""
    from matplotlib.transforms import Bbox

    figure = axis.figure
    renderer, dots = figure.canvas.get_renderer(), figure.dpi / 72
    places = [(container.get_label(), container[0].get_xydata()[0]) for container in axis.containers]
    spots = [axis.transData.transform(place) for _, place in places]
    taken = [Bbox.from_bounds(x - 6 * dots, y - 6 * dots, 12 * dots, 12 * dots) for x, y in spots]
    frame = axis.get_window_extent(renderer)
    for name, place in places:
        note = axis.annotate(
            name,
            xy=place,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=9,
            va="center",
            zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.4},
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5},
        )
        note.set_in_layout(False)
        distance, box = _free_place(note, renderer, taken, frame)
        note.arrow_patch.set_visible(distance > DISTANCES[1])
        taken.append(box)


def _free_place(note: Any, renderer: Any, taken: list[Any], frame: Any) -> tuple[float, Any]:
    """Move `note` to the place with the fewest collisions, the nearest of equals; its distance and box."""
    from matplotlib.text import Text

    found = []
    for distance in DISTANCES:
        for angle in ANGLES:
            x, y = distance * math.cos(math.radians(angle)), distance * math.sin(math.radians(angle))
            side = "left" if x > 1 else "right" if x < -1 else "center"
            note.set_position((x, y))
            note.set_horizontalalignment(side)
            note.update_positions(renderer)
            box = Text.get_window_extent(note, renderer).padded(2)
            outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
            collisions = sum(box.overlaps(other) for other in taken) + outside
            found.append((collisions, len(found), distance, x, y, side, box))
            if not collisions:
                break
        if not found[-1][0]:
            break
    _, _, distance, x, y, side, box = min(found, key=lambda place: place[:2])
    note.set_position((x, y))
    note.set_horizontalalignment(side)
    return distance, box
