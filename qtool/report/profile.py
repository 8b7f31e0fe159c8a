"""`qtool profile` as short tables, the lever first. Every number comes from `profile.json`."""

from __future__ import annotations

from typing import Any

from qtool.lever import percent
from qtool.parts import PARTS
from qtool.report.text import one_line
from qtool.units import NONE, significant

TOP = 8
CALLS = {"one": "one text a call", "all": "all texts in one call"}


def render(found: dict[str, Any]) -> str:
    """Lines for a terminal or a log, without control characters."""
    texts, lines = found["texts"], [found["lever"]["sentence"]]
    lines += [f"also: {other}" for other in found["lever"]["also"]]
    if found["contention"]["contended"]:
        lines.append("other work used the processor meanwhile: believe an idle machine")
    lines += [
        "",
        f"{found['model']}: recipe {found['recipe']} on {found['device']}, {found['threads']} thread{'s' if found['threads'] > 1 else ''};"
        f" {texts['rows']:,} texts of {texts['source']}, {texts['mean_tokens']:.0f} tokens on average",
    ]
    for split in found["splits"]:
        lines += ["", *_split(split)]
    lines += ["", *_bulk(found["bulk"]), "", *_tokenizer(found["tokenizer"])]
    if found["padding"]:
        lines += ["", *(_padding(each) for each in found["padding"])]
    lines += ["", *_operators(found["operators"]), "", f"files: {', '.join(found['files'])}"]
    return "\n".join(one_line(line).rstrip() for line in lines)


def aligned(rows: list[list[str]]) -> list[str]:
    """Columns two apart: the first to the left, the others to the right; a last one that is prose stays as it is."""
    width = max(map(len, rows))
    full = [row + [""] * (width - len(row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    return [
        "  ".join(
            word.ljust(size) if n == 0 else word.rjust(size)
            for n, (word, size) in enumerate(zip(row, widths, strict=True))
        )
        for row in full
    ]


def _ms(seconds: float | None) -> str:
    return NONE if seconds is None else significant(1e3 * seconds)


def _split(split: dict[str, Any]) -> list[str]:
    title = f"a request of {split['batch_size']} text{'s' if split['batch_size'] > 1 else ''}"
    if not split["parts"]:
        return [f"{title}: not measured, {split['reason']}"]
    rows = [[f"{title}, {split['calls']} requests", "share %", "mean ms", "p50 ms", "p95 ms"]]
    for name, cell in split["parts"].items():
        share = NONE if cell["share"] is None else f"{100 * cell['share']:.1f}"
        rows.append([f"  {PARTS[name]}", share, *(_ms(cell[f"{key}_s"]) for key in ("mean", "p50", "p95"))])
    rows.append(["  between the parts", f"{100 * split['residual_share']:.1f}"])
    for name, key in (("  the request", "request"), ("  the request undivided", "undivided")):
        cells = [_ms(split[key][f"{figure}_s"]) for figure in ("mean", "p50", "p95")]
        rows.append([name, "100.0" if key == "request" else "", *cells])
    why: dict[str, list[str]] = {}
    for name, cell in split["parts"].items():
        if cell["reason"]:
            why.setdefault(cell["reason"], []).append(PARTS[name])
    return [
        *aligned(rows),
        *(f"  {', '.join(names)}: {reason}" for reason, names in why.items()),
        *([] if split["stable"] else ["  it had not become steady when it was timed"]),
    ]


def _bulk(bulk: dict[str, Any]) -> list[str]:
    title = f"{bulk['texts']} texts in bulk, batches of {bulk['batch_size']}"
    names = list(bulk["orders"]["as they come"]["shares"])
    rows = [[title, *bulk["orders"]]]
    rows.append(
        ["  texts a second", *(significant(order["texts_per_s"]) for order in bulk["orders"].values())]
    )
    for name in names:
        cells = (f"{100 * order['shares'][name]:.1f} %" for order in bulk["orders"].values())
        rows.append([f"  {PARTS[name]}", *cells])
    return [*aligned(rows), f"  by length takes {percent(abs(bulk['sorting_saved_share']))} {_less(bulk)}"]


def _less(bulk: dict[str, Any]) -> str:
    passes = min(order["passes"] for order in bulk["orders"].values())
    word = "less" if bulk["sorting_saved_share"] >= 0 else "more"
    return f"{word} time (measured, {passes} {'pass' if passes == 1 else 'passes'})"


def _tokenizer(tokenizer: dict[str, Any]) -> list[str]:
    rows = [
        [f"tokenizer {tokenizer['class']}, {tokenizer['texts']} texts", "threads", "texts/s", "µs a text"]
    ]
    for variant in tokenizer["variants"]:
        rate = variant["texts_per_s"]
        rows.append(
            [
                f"  {variant['tokenizer']}, {CALLS[variant['call']]}",
                str(variant["threads"]),
                significant(rate),
                significant(1e6 / rate),
            ]
        )
    lines = aligned(rows)
    if tokenizer["slow_reason"]:
        lines.append(f"  no slow tokenizer to compare: {tokenizer['slow_reason']}")
    if tokenizer["differing_texts"]:
        lines.append(f"  fast and slow differ on {tokenizer['differing_texts']} texts")
    return lines


def _padding(found: dict[str, Any]) -> str:
    saved = found["time_saved_share"]
    time = f"{percent(saved)} less time (predicted)" if saved is not None else found["time_saved_reason"]
    return (
        f"padding at batch {found['batch_size']}: {percent(found['padded_share'])} of the tokens,"
        f" {percent(found['sorted_padded_share'])} where texts are sorted by length:"
        f" {percent(found['tokens_saved_share'])} fewer tokens, {time}"
    )


def _operators(operators: dict[str, Any]) -> list[str]:
    if operators["reason"]:
        return [f"operators: not counted, {operators['reason']}"]
    title = f"operators, {operators['calls']} calls at batch {operators['batch_size']}"
    rows = [[title, "share %", "calls", "total ms"]]
    for row in operators["rows"][:TOP]:
        rows.append([f"  {row['name']}", f"{100 * row['share']:.1f}", str(row["calls"]), _ms(row["total_s"])])
    rest = sum(row["share"] for row in operators["rows"][TOP:])
    if rest:
        rows.append([f"  {len(operators['rows']) - TOP} others", f"{100 * rest:.1f}"])
    return aligned(rows)
