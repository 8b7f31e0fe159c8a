"""A gate's verdict for people (text, Markdown) and for CI (JUnit XML)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from qtool import gate, policy, store
from qtool.core import METRICS, QtoolError
from qtool.report.markdown import escape
from qtool.report.text import one_line, place
from qtool.units import between, change, number, with_unit

RATIOS = {
    "reference_speedup": "speed-up against the reference's",
    "reference_memory": "peak memory against the reference's",
    "reference_disk": "size on disk against the reference's",
}
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"


def hold(run_dir: Path, path: Path, reference: Path | None = None) -> dict[str, Any]:
    """The verdict of the policy in `path`, written into the run folder too."""
    found = gate.gate(run_dir, policy.read(path), reference)
    write(found, run_dir)
    return found


def write(found: Mapping[str, Any], run_dir: Path) -> None:
    """`gate.json`, `gate.md` and `gate.xml` (JUnit) into the run folder, and the Markdown into CI's summary.

    Raises QtoolError when CI's summary file cannot be written to.
    """
    store.write_json(run_dir / "gate.json", found)
    told = markdown(found)
    (run_dir / "gate.md").write_text(told, "utf-8")
    ElementTree.ElementTree(junit(found)).write(run_dir / "gate.xml", encoding="utf-8", xml_declaration=True)
    if path := os.environ.get(SUMMARY_VARIABLE):
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(told)
        except OSError as error:
            raise QtoolError(
                f"cannot write to {SUMMARY_VARIABLE}={path}: {error.strerror}. Unset it, or make it writable."
            ) from None


def render(found: Mapping[str, Any]) -> str:
    """One line a check, the worst first, then notes and the verdict."""
    order = {"fail": 0, "inconclusive": 1, "pass": 2}
    lines = [
        f"{entry['verdict'].upper():12} {_who(entry)}: {_what(found, entry)}"
        for entry in sorted(found["checks"], key=lambda entry: order[entry["verdict"]])
    ]
    lines += [f"note: {note}" for note in found["notes"]]
    return "\n".join(map(one_line, [*lines, _verdict(found)]))


def markdown(found: Mapping[str, Any]) -> str:
    """A heading with the verdict and a table of checks, in GitHub's Markdown."""
    lines = [f"## qtool gate: {found['verdict']}", "", escape(_verdict(found)), ""]
    lines += ["| verdict | recipe | check |", "| :-- | :-- | :-- |"]
    for entry in found["checks"]:
        lines.append(f"| {entry['verdict']} | {escape(_who(entry))} | {escape(_what(found, entry))} |")
    if found["notes"]:
        lines += ["", *(f"- {escape(note)}" for note in found["notes"])]
    return "\n".join(lines) + "\n"


def junit(found: Mapping[str, Any]) -> ElementTree.Element:
    """JUnit XML as CI systems read it: a test case a check; inconclusive is skipped, or failed if policy says so."""
    strict = found["inconclusive"] == "fail"
    failed = [e for e in found["checks"] if _fails(e, strict)]
    skipped = [e for e in found["checks"] if e["verdict"] == "inconclusive" and not strict]
    counts = {"tests": len(found["checks"]), "failures": len(failed), "errors": 0, "skipped": len(skipped)}
    attributes = {"name": "qtool gate", **{key: str(count) for key, count in counts.items()}}
    root = ElementTree.Element("testsuites", attributes)
    suite = ElementTree.SubElement(root, "testsuite", attributes)
    for entry in found["checks"]:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _xml(_who(entry)), "name": entry["limit_name"]}
        )
        told = _xml(_what(found, entry))
        if _fails(entry, strict):
            ElementTree.SubElement(case, "failure", {"message": told, "type": entry["verdict"]})
        elif entry["verdict"] == "inconclusive":
            ElementTree.SubElement(case, "skipped", {"message": f"inconclusive: {told}"})
    if found["notes"]:
        ElementTree.SubElement(suite, "system-out").text = _xml("\n".join(found["notes"]))
    return root


def _fails(entry: Mapping[str, Any], strict: bool) -> bool:
    return entry["verdict"] == "fail" or (strict and entry["verdict"] == "inconclusive")


def _xml(words: str) -> str:
    """XML 1.0 has no place for most control characters, escaped or not."""
    return "".join(c if c in "\n\t" or c.isprintable() else " " for c in words)


def _who(entry: Mapping[str, Any]) -> str:
    return f"{entry['recipe']} on {place(entry)} batch {entry['batch_size']}"


def _what(found: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    name, metric, value = entry["limit_name"], entry["metric"], entry["value"]
    why = f", {entry['why']}" if entry["why"] else ""
    if metric is None:
        return f"did not finish{why}"
    cell = {"low": entry["low"], "high": entry["high"]}
    exact = entry["low"] == entry["high"]
    if name in RATIOS:
        told = (
            "" if value is None else f"{value:.3f}x" + ("" if exact else between(cell, lambda x: f"{x:.3f}"))
        )
        return f"{RATIOS[name]} {told}, limit {entry['limit']:g}x{why}"
    if metric == "score_delta":
        told = "unknown" if value is None else change(found["metric"], value)
        interval = "" if value is None else between(cell, lambda x: change(found["metric"], x))
        return f"{name}: change of {found['metric']} {told}{interval}, limit {change(found['metric'], entry['limit'])}{why}"
    told = "unknown" if value is None else with_unit(metric, value)
    interval = "" if value is None or exact else between(cell, lambda x: number(metric, x))
    mean = "" if exact or metric == "speedup" else " (geometric mean of the rounds)"
    return f"{name}: {METRICS[metric].label} {told}{interval}{mean}, limit {with_unit(metric, entry['limit'])}{why}"


def _verdict(found: Mapping[str, Any]) -> str:
    counts = {v: sum(e["verdict"] == v for e in found["checks"]) for v in ("pass", "fail", "inconclusive")}
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    strict = " (which the policy counts as a violation)" if found["inconclusive"] == "fail" else ""
    strict = strict if found["verdict"] == "inconclusive" else ""
    own = " unless a recipe has its own" if found["own_confidence"] else ""
    return f"gate: {found['verdict']}{strict}: {told}, at {100 * found['confidence']:g} % confidence{own}"
