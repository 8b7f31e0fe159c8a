"""The page as a file: what is escaped, what it may load, and that it tells the summary's numbers."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from qtool import units
from qtool.report import page, text
from qtool.report.page import curve
from tests.page_runs import (
    IMAGE,
    LABELS,
    SCRIPT,
    data_of,
    facts,
    hostile,
    large,
    made,
    put_texts,
    recipes,
    shown,
    wrong,
)
from tests.run_folder import Made, write_run

VOID = {"meta", "link", "br", "input"}


class Reader(HTMLParser):
    """Start tags with their attributes, text by the tag it stands in, and table rows of the results."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def inside(self, tag: str) -> list[str]:
        return [words for own, words in self.texts if own == tag]

    def all_text(self) -> str:
        return " ".join(" ".join(w for t, w in self.texts if t not in ("script", "style")).split())


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("page"), recipes(), labels=LABELS, run=facts())
    put_texts(folder)
    return folder


@pytest.fixture(scope="module")
def both(run):
    return shown(run)


def test_hostile_strings_stay_text(tmp_path):
    _, html = shown(hostile(tmp_path))
    reader = Reader(html)
    assert not [tag for tag, _ in reader.tags if tag in ("img", "b:", "iframe", "object", "base", "form")]
    assert [tag for tag, _ in reader.tags].count("script") == 3
    assert not [name for _, attributes in reader.tags for name in attributes if name.startswith("on")]
    told = reader.all_text()
    assert SCRIPT in told
    assert IMAGE in told
    assert SCRIPT in json.dumps(data_of(html))


def test_no_text_of_the_data_block_can_end_it(tmp_path):
    _, html = shown(hostile(tmp_path))
    block = html.partition('id="data">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(block)
    assert page.to_json("a < b & c\u2028") == '"a \\u003c b \\u0026 c "'


def test_control_characters_and_turned_text_do_not_reach_the_page(tmp_path):
    _, html = shown(hostile(tmp_path))
    assert "turned" in html
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]", html.split("<script>")[0]
    )


def test_only_the_scripts_of_the_file_may_run_and_nothing_is_fetched(both):
    _, html = both
    reader = Reader(html)
    policy = next(a["content"] for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    assert len(digests) == 2
    assert f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}';" in policy
    assert policy.startswith("default-src 'none';")
    links = [a[key] for _, a in reader.tags for key in ("href", "src", "action", "data") if key in a]
    assert links
    assert all(link.startswith("#") or link == "data:," for link in links)
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html.partition("<script")[0])


def test_every_link_leads_somewhere_and_ids_are_unique(both):
    reader = Reader(both[1])
    ids = [a["id"] for _, a in reader.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {a["href"][1:] for _, a in reader.tags if a.get("href", "").startswith("#")}
    named = {name for _, a in reader.tags for name in (a.get("aria-labelledby") or "").split()}
    assert targets | named <= set(ids)


def test_the_table_tells_the_summarys_numbers(both):
    told, html = both
    rows = re.findall(r'<tr data-device="(\w+)" data-batch="(\d+)"[^>]*>(.*?)</tr>', html, re.S)
    assert len(rows) == len(told["rows"]) == 6
    for (device, batch, cells), row in zip(rows, told["rows"], strict=True):
        assert (device, int(batch)) == (row["device"], row["batch_size"])
        assert f">{row['recipe']}</a>" in cells
        found = re.findall(r'<td class="n[^"]*"(?: data-v="([^"]*)")?>([^<]*)', cells)
        names = text.columns(told["metric"], device)
        assert len(found) == len(names)
        for name, (value, words) in zip(names, found, strict=True):
            known = (row["metrics"].get(name) or {}).get("value")
            assert (float(value) if value else None) == known
            if name != "score_delta":
                assert words == units.number(name, known)


def test_the_drawings_data_tell_the_summarys_numbers(both):
    told, html = both
    data = data_of(html)
    ok = [row for row in told["rows"] if row["status"] == "ok"]
    assert len(data["rows"]) == len(ok) == 4
    for (recipe, group, front, cells), row in zip(data["rows"], ok, strict=True):
        assert data["recipes"][recipe] == row["recipe"]
        assert (data["groups"][group]["device"], data["groups"][group]["batch"]) == (
            row["device"],
            row["batch_size"],
        )
        assert bool(front) == row["on_frontier"]
        for name, found in zip(data["metrics"], cells, strict=True):
            cell = row["metrics"][name]
            if cell["value"] is None:
                assert found is None
                continue
            interval = [] if cell["low"] in (None, cell["high"]) else [cell["low"], cell["high"]]
            assert found == pytest.approx([cell["value"], *interval], rel=1e-9)
        assert {n for n, c in row["metrics"].items() if c["value"] is not None} <= set(data["metrics"])


def test_a_fresh_reader_finds_name_cost_and_evidence_at_the_top(both):
    told, html = both
    top = Reader(html.partition('<section id="frontier"')[0] + "</main></body></html>").all_text()
    # 0.0109 / 0.00271 by rounds: 4, 4.04, 4.02
    for words in (
        "Take quick",
        "4.02x",
        "p50 2.71 ms against 10.9 ms",
        "97.75 % against 97.50 %",
        "23.4 MB",
        "against 90.0 MB (-74 %)",
    ):
        assert words in top
    # 0 and 1 are right now, 10 is wrong now
    assert "2 answers gained and 1 lost on the same 400 examples" in top
    assert told["frontier"][0]["recommended"] == "quick"


def test_the_evidence_counts_the_recommended_recipes_own_rounds(tmp_path):
    every = {
        "fp32": made([0.0108, 0.0110, 0.0109] * 3, wrong(1), peak_bytes=[4e8] * 9),
        "quick": made((0.00270, 0.00272, 0.00271), wrong(1), disk_bytes=23_400_000),
        "noisy": made([0.0108, 0.0120, 0.0100] * 3, wrong(1), peak_bytes=[4e8] * 9),
    }
    told, html = shown(write_run(tmp_path, every, labels=LABELS, run=facts(rounds=3)))
    assert told["harness"]["most_rounds"] == 9
    assert told["frontier"][0]["recommended"] == "quick"
    words = Reader(html).all_text()
    assert "Evidence 3 rounds, each in fresh processes" in words
    assert "3 to 9 rounds" in words


def curve_of(html: str) -> str:
    return html.partition('<section id="curve"')[2].partition("</section>")[0]


def test_latency_and_throughput_stand_in_a_table_over_batch_sizes(both):
    own = curve_of(both[1])
    assert re.findall(r'scope="colgroup"[^>]*>([^<]*)', own) == ["batch 1", "batch 8"]
    lines = {
        re.sub("<[^>]*>", "", head): re.findall(r"<td[^>]*>([^<]*)", cells)
        for head, cells in re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', own)
    }
    # calls lie evenly about the rounds' p50: texts a second are batch * 3 / (the three p50 added);
    # 3 / 0.0327, 24 / 0.243; 3 / 0.00813, 24 / 0.093. The other two recipes did not finish.
    assert lines == {"fp32": ["10.9", "91.7", "81.0", "98.8"], "quick": ["2.71", "369", "31.0", "258"]}
    assert '<a href="#curve">' in both[1]


def test_a_run_of_one_batch_size_has_no_part_on_throughput(tmp_path):
    one = {name: each for name, each in recipes().items() if each.batch_size == 1}
    _, html = shown(write_run(tmp_path, one, labels=LABELS, run=facts()))
    assert 'id="curve' not in html
    assert '"#curve"' not in html


def test_only_a_device_with_two_batch_sizes_has_a_table_and_what_is_missing_is_a_dash(tmp_path):
    every = recipes() | {
        "late@8": made((0.02, 0.02, 0.02), wrong(1), batch_size=8),
        "fp32@cuda": made((0.001, 0.001, 0.001), wrong(1), device="cuda"),
        "quick@cuda8": made((0.004, 0.004, 0.004), wrong(1), device="cuda", batch_size=8),
    }
    told, _ = shown(write_run(tmp_path, every, labels=LABELS, run=facts()))
    (found,) = curve.curves(told, ["fp32", "quick", "odd", "absent", "late"])
    assert (found["device"], found["batches"]) == ("cpu", [1, 8])
    assert [line["recipe"] for line in found["lines"]] == ["fp32", "quick", "late"]
    # 8 / 0.02 s
    assert found["lines"][2] == {
        "recipe": "late",
        "anchor": "recipe-4",
        "cells": [("-", "-"), ("20.0", "400")],
    }


def test_what_failed_stands_with_its_cause_and_next_step(both):
    reader = Reader(both[1])
    told = reader.all_text()
    assert "no <b>kernel</b> for it" in told
    assert "Next see the log" in told
    assert "needs a GPU" in told
    assert "Next run it on one" in told


def test_best_and_tied_values_are_marked_as_in_the_other_reports(both):
    told, html = both
    for group in told["frontier"]:
        own = text.group_rows(told, group)
        _, lines = text.table(told, own, group["device"])
        rows = re.findall(
            rf'<tr data-device="{group["device"]}" data-batch="{group["batch_size"]}"[^>]*>(.*?)</tr>',
            html,
            re.S,
        )
        for cells, line in zip(rows, lines, strict=True):
            marks = [
                set(re.findall("<i>(.)</i>", cell)) for cell in re.findall(r'<td class="n.*?</td>', cells)
            ]
            assert marks == [{m for m, is_so in (("*", c.best), ("~", c.tie)) if is_so} for c in line[3:]]


@pytest.mark.parametrize("kind", ["unscored", "nothing finished", "one round"])
def test_sparse_runs_have_a_page(tmp_path, kind):
    if kind == "unscored":
        folder = write_run(tmp_path, recipes(), metric=None)
    elif kind == "one round":
        folder = write_run(
            tmp_path, {"fp32": made((0.01,), wrong(1)), "b": made((0.02,), wrong(1))}, labels=LABELS
        )
    else:
        folder = write_run(
            tmp_path, {"fp32": Made((1,), bad={"build": ("failed", "broke", None)})}, labels=LABELS
        )
    told, html = shown(folder)
    reader = Reader(html)
    assert not reader.open
    words = {
        "unscored": "Nothing was scored",
        "nothing finished": "No recommendation",
        "one round": "provisional",
    }
    assert words[kind] in reader.all_text()
    assert told["frontier"][0]["reason"] in reader.all_text()


def luminance(color: str) -> float:
    """Relative luminance, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_marks_have_the_contrast_that_wcag_aa_asks_for(scheme):
    style = (page.HERE / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.S)[:2]
    colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})[;\s]", {"light": light, "dark": dark}[scheme]))
    for name in ("ink", "muted", "accent", "good", "bad"):
        for ground in ("paper", "raised"):
            assert contrast(colors[name], colors[ground]) >= 4.5, (name, ground)
    assert contrast(colors["ink"], colors["accent-soft"]) >= 4.5
    assert contrast(colors["accent"], colors["accent-soft"]) >= 4.5
    assert contrast(colors["muted"], colors["accent-soft"]) >= 4.5
    assert contrast(colors["bad"], colors["bad-soft"]) >= 4.5
    assert contrast(colors["paper"], colors["accent"]) >= 4.5
    for name in ("star", "strong"):
        assert contrast(colors[name], colors["paper"]) >= 3, name


@pytest.mark.slow
def test_a_page_of_375_rows_stays_under_two_megabytes(tmp_path):
    told, html = shown(large(tmp_path))
    assert len(told["rows"]) >= 375
    assert len(html.encode()) < 2_000_000
