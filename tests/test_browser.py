"""The page in a real browser, Debian's Chromium without a head: what it draws, sorts, filters and tells by keyboard.

Screenshots go to the test's folder, and to $QTOOL_SCREENSHOTS where that names a folder.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from qtool import evidence, summary, units
from qtool.report import page
from tests.conftest import need
from tests.page_runs import IMAGE, LABELS, SCRIPT, facts, hostile, large, put_texts, recipes
from tests.run_folder import Made, write_run

EXAMPLE = Path(__file__).parents[1] / "reports" / "example"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chromium():
    need("playwright")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Opened:
    """A page opened from disk without a network, and everything it complained of or asked for."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,
            offline=True,
            reduced_motion="reduce",
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.page.on(
            "console", lambda m: self.complaints.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("dialog", self._dismiss)
        self.page.goto(path.as_uri())

    def _dismiss(self, dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open_recipes(self, which: str = "details.recipe") -> None:
        """Open parts and wait for what their script adds: a browser tells it of the opening a moment later."""
        for part in self.page.locator(which).all():
            part.locator("summary").first.click()
        for part in self.page.locator(which).all():
            self.page.wait_for_function("part => part.dataset.made", arg=part.element_handle())

    def chart_text(self) -> str:
        return self.page.locator("#chart > svg").inner_html()

    def column(self, title: str) -> list[str]:
        """The column's cells, of the rows that are shown, from top to bottom."""
        return self.page.evaluate(
            """title => {
              const table = document.getElementById("results");
              const column = [...table.tHead.rows[0].cells].findIndex((cell) => cell.textContent === title);
              const shown = [...table.tBodies[0].rows].filter((row) => !row.hidden);
              return shown.map((row) => row.cells[column].dataset.v ?? row.cells[column].textContent.trim());
            }""",
            title,
        )


@pytest.fixture
def visit(chromium):
    opened: list[Opened] = []

    def visit(path: Path, **more) -> Opened:
        opened.append(Opened(chromium, path, **more))
        return opened[-1]

    yield visit
    for each in opened:
        each.context.close()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("small"), recipes(), labels=LABELS, run=facts())
    put_texts(folder)
    return page.write(folder), summary.of(evidence.load(folder))


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    folder = large(tmp_path_factory.mktemp("big"))
    return page.write(folder), summary.of(evidence.load(folder))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    folder = tmp_path_factory.mktemp("example") / "run"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("*.svg", "*.png", "draws"))
    return page.write(folder)


def test_it_opens_from_disk_without_complaint_or_request(visit, small):
    opened = visit(small[0])
    opened.page.locator("#chart > svg").wait_for()
    opened.open_recipes()
    assert opened.page.locator("[data-rounds] svg").count() == 4
    assert opened.complaints == []
    assert opened.dialogs == []
    assert opened.requests == [small[0].as_uri()]


def test_other_axes_and_groups_are_drawn_when_chosen(visit, small):
    opened = visit(small[0])
    before = opened.chart_text()
    assert "latency p50, ms (lower is better)" in before
    assert "change of accuracy, points (higher is better)" in before
    assert "size on disk" not in before
    opened.page.select_option("#axis-y", "disk_bytes")
    after = opened.chart_text()
    assert "size on disk, MB (lower is better)" in after
    assert "change of accuracy, points (" not in after
    opened.page.select_option("#axis-x", "speedup")
    assert "speed-up, x (higher is better)" in opened.chart_text()
    opened.page.select_option("#chart-group", "1")
    assert opened.page.locator("#chart > svg").get_attribute("aria-label") == (
        "size on disk against speed-up, cpu, batch 8: 2 recipes"
    )
    opened.page.select_option("#axis-y", "load_s")
    assert opened.complaints == []


def test_a_button_of_the_header_sorts_and_says_so(visit, small):
    path, told = small
    opened = visit(path)
    p50 = [row["metrics"]["latency_p50_s"]["value"] for row in told["rows"] if row["status"] == "ok"]
    head = opened.page.locator("#results thead th", has_text="p50 ms").first
    assert head.get_attribute("aria-sort") == "none"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert [float(v) for v in opened.column("p50 ms")[:4]] == sorted(p50)
    assert opened.column("p50 ms")[4:] == ["-", "-"]
    head.locator("button").press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert [float(v) for v in opened.column("p50 ms")[:4]] == sorted(p50, reverse=True)
    assert opened.column("p50 ms")[4:] == ["-", "-"]
    opened.page.locator("#results thead th", has_text="recipe").locator("button").click()
    assert opened.column("recipe") == ["absent", "fp32", "fp32", "odd", "quick", "quick"]
    assert opened.page.locator("[aria-sort=ascending], [aria-sort=descending]").count() == 1
    assert opened.page.locator("#shown").inner_text() == "6 of 6 rows, sorted by recipe, ascending"


def test_filters_hide_the_other_rows(visit, small):
    opened = visit(small[0])
    assert opened.page.locator("select[data-filter=device]").count() == 0
    opened.page.select_option("select[data-filter=batch]", "8")
    assert opened.column("recipe") == ["fp32", "quick"]
    opened.page.select_option("select[data-filter=runtime]", "openvino")
    assert opened.column("recipe") == ["quick"]
    opened.page.select_option("select[data-filter=batch]", "")
    assert opened.column("recipe") == ["quick", "quick"]
    opened.page.select_option("select[data-filter=runtime]", "")
    opened.page.check("input[data-filter=frontier]")
    assert opened.column("recipe") == [row["recipe"] for row in small[1]["rows"] if row["on_frontier"]]


def test_a_device_can_be_chosen_where_there_are_two(visit, big):
    path, told = big
    opened = visit(path)
    opened.page.select_option("select[data-filter=device]", "cuda")
    opened.page.select_option("select[data-filter=batch]", "16")
    opened.page.select_option("select[data-filter=runtime]", "onnxruntime")
    # recipes 1, 4, ..., 37
    assert len(opened.column("recipe")) == 13
    opened.page.select_option("#axis-x", "peak_rss_bytes")
    opened.page.select_option("#chart-group", str(len(told["frontier"]) - 1))
    assert opened.page.input_value("#axis-x") == "peak_vram_bytes"
    assert opened.complaints == []


def test_the_keyboard_reaches_every_mark_and_shows_its_numbers(visit, small):
    path, told = small
    opened = visit(path)
    quick = next(row for row in told["rows"] if row["recipe"] == "quick")["metrics"]
    tip = opened.page.locator("#chart .tip")
    assert not tip.is_visible()
    opened.page.focus("#chart-group")
    opened.page.keyboard.press("Tab")
    assert tip.locator("b").inner_text() == "quick"
    cells = [line.locator("td").all_inner_texts() for line in tip.locator("tr").all()]
    assert cells[0][:2] == ["latency p50", units.with_unit("latency_p50_s", quick["latency_p50_s"]["value"])]
    low, high = (units.number("latency_p50_s", quick["latency_p50_s"][key]) for key in ("low", "high"))
    assert cells[0][2] == f"[{low}, {high}]"
    # one more of 400 is right now
    assert cells[1][:2] == ["change of accuracy", "+0.25 points"]
    label = opened.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("quick, cpu, batch 1: latency p50 2.71 ms [")
    assert "recommended" in label
    opened.page.keyboard.press("ArrowRight")
    assert tip.locator("b").inner_text() == "fp32"
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()
    opened.page.keyboard.press("Home")
    assert tip.locator("b").inner_text() == "quick"
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_url("**/report.html#recipe-1")
    assert opened.page.locator("#recipe-1").get_attribute("open") is not None
    assert opened.page.evaluate("location.hash") == "#recipe-1"


def test_a_pointer_shows_the_same_tip_and_takes_it_away(visit, small):
    opened = visit(small[0])
    opened.page.locator("#chart a").nth(1).hover()
    assert opened.page.locator("#chart .tip b").inner_text() == "fp32"
    opened.page.mouse.move(5, 5)
    assert not opened.page.locator("#chart .tip").is_visible()


@pytest.mark.parametrize("which", ["small", "big"])
def test_the_script_writes_every_number_as_the_other_reports_do(visit, request, which):
    path, told = request.getfixturevalue(which)
    opened = visit(path)
    written = opened.page.evaluate(
        "data.rows.map(([, , , cells]) => Object.entries(named(cells)).filter(([, cell]) => cell).map(([name, cell]) =>"
        " [name, number(name, cell[0]), interval(name, cell)]))"
    )
    ok = [row["metrics"] for row in told["rows"] if row["status"] == "ok"]
    for row, metrics in zip(written, ok, strict=True):
        for name, value, interval in row:
            cell = metrics[name]

            def write(x, name=name):
                return units.change(told["metric"], x) if name == "score_delta" else units.number(name, x)

            assert value == write(cell["value"]), (name, cell)
            exact = cell["low"] == cell["high"]
            assert interval == ("" if exact else units.between(cell, write).strip()), (name, cell)


def test_latency_and_throughput_are_drawn_over_batch_sizes(visit, small):
    path, told = small
    opened = visit(path)
    chart = opened.page.locator("#curve-chart > svg")
    assert chart.get_attribute("aria-label") == "throughput against latency over batch sizes, cpu: 2 recipes"
    assert "latency p50, ms (lower is better)" in chart.inner_html()
    assert "texts/s (higher is better)" in chart.inner_html()
    links = chart.locator("a")
    rows = sorted(
        (row for row in told["rows"] if row["status"] == "ok"),
        key=lambda row: (row["recipe"], row["batch_size"]),
    )
    assert [link.get_attribute("aria-label").partition(":")[0] for link in links.all()] == [
        f"{row['recipe']}, cpu, batch {row['batch_size']}" for row in rows
    ]
    # farther right is slower, farther up is more: the marks stand in the order of the summary's values
    for name, place, sign in (("latency_p50_s", "cx", 1), ("throughput_per_s", "cy", -1)):
        at = [sign * float(c.get_attribute(place)) for c in links.locator("circle").all()]
        values = [row["metrics"][name]["value"] for row in rows]
        assert sorted(range(4), key=at.__getitem__) == sorted(range(4), key=values.__getitem__)
    assert chart.locator("text.name").all_text_contents()[:2] == ["quick, 8", "fp32, 8"]
    assert sorted(chart.locator("text.name").all_text_contents()[2:]) == ["1", "1"]
    opened.page.select_option("#curve-recipe", label="quick")
    assert links.count() == 2
    opened.page.select_option("#curve-recipe", "")
    assert links.count() == 4
    assert opened.complaints == []


def test_the_keyboard_moves_along_the_lines_and_the_tip_tells_their_numbers(visit, small):
    path, told = small
    opened = visit(path)
    tip = opened.page.locator("#curve-chart .tip")
    opened.page.focus("#curve-recipe")
    opened.page.keyboard.press("Tab")
    assert tip.locator("b").inner_text() == "quick, batch 1"
    opened.page.keyboard.press("ArrowRight")
    assert tip.locator("b").inner_text() == "quick, batch 8"
    row = next(r for r in told["rows"] if (r["recipe"], r["batch_size"]) == ("quick", 8))["metrics"]
    cells = [line.locator("td").all_inner_texts() for line in tip.locator("tr").all()]
    # 8 * 3 / (0.030 + 0.031 + 0.032) texts a second
    assert cells[2][:2] == ["texts/s", "258"]
    assert cells[0][:2] == ["latency p50", units.with_unit("latency_p50_s", row["latency_p50_s"]["value"])]
    for cell, name in ((cells[0], "latency_p50_s"), (cells[2], "throughput_per_s")):
        assert cell[2] == units.between(row[name], lambda x, name=name: units.number(name, x)).strip()
    # the line that the mark is on
    assert opened.page.locator("#curve-chart .traced").get_attribute("d").count("L") == 1
    opened.page.keyboard.press("Escape")
    assert not tip.is_visible()
    assert not opened.page.locator("#curve-chart .traced").get_attribute("d")
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_url("**/report.html#recipe-1")
    assert opened.page.locator("#recipe-1").get_attribute("open") is not None
    opened.page.locator("#curve-chart a").first.hover()
    assert tip.locator("b").inner_text() == "fp32, batch 1"


def test_lines_of_another_device_are_drawn_when_chosen(visit, big):
    path, told = big
    opened = visit(path)
    chart = opened.page.locator("#curve-chart > svg")
    assert chart.get_attribute("aria-label").endswith("cpu: 38 recipes")
    assert chart.locator("a").count() == 38 * 5
    # a line of the grid without its number cannot be read
    words = chart.locator("[aria-label$='tick label'] text").all_text_contents()
    assert len(words) > 8
    assert all(words)
    # whatever lies on top, the arrow keys go along a line and then to the next one
    taken = next(g["recommended"] for g in told["frontier"] if (g["device"], g["batch_size"]) == ("cpu", 1))
    names = list(dict.fromkeys(row["recipe"] for row in told["rows"]))
    opened.page.focus("#curve-recipe")
    opened.page.keyboard.press("Tab")
    said = []
    for _ in range(6):
        said.append(opened.page.locator("#curve-chart .tip b").inner_text())
        opened.page.keyboard.press("ArrowRight")
    after = names[names.index(taken) + 1]
    assert said == [*(f"{taken}, batch {size}" for size in (1, 4, 8, 16, 32)), f"{after}, batch 1"]
    opened.page.select_option("#curve-recipe", "3")
    assert chart.locator("a").count() == 5
    opened.page.select_option("#curve-device", "cuda")
    assert chart.get_attribute("aria-label").endswith("cuda: 1 recipe")
    assert opened.page.input_value("#curve-recipe") == "3"
    assert opened.complaints == []


def test_a_run_of_one_batch_size_has_no_curve(visit, example):
    opened = visit(example)
    assert opened.page.locator("#curve, #curve-chart, a[href='#curve']").count() == 0
    assert opened.complaints == []


SEEN = """() => addEventListener("beforeprint", () => {
  const parts = [...document.querySelectorAll("details.recipe")];
  window.seen = {
    open: parts.filter((part) => part.open).map((part) => Number(part.dataset.recipe)),
    drawn: parts.filter((part) => part.querySelector("[data-rounds] svg")).map((part) => Number(part.dataset.recipe)),
    changed: document.querySelectorAll("[data-flips] tbody tr").length,
    closed: document.querySelectorAll("details:not(.recipe):not([open])").length,
    note: document.getElementById("on-paper").textContent,
  };
})"""


def test_paper_shows_every_part_of_a_small_run_and_the_screen_is_as_before(visit, small):
    opened = visit(small[0])
    before = opened.page.locator("details[open]").count()
    opened.page.evaluate(SEEN)
    opened.page.pdf()
    # fp32, quick, odd (failed), absent (skipped); quick changes three answers
    assert opened.page.evaluate("seen") == {
        "open": [0, 1, 2, 3],
        "drawn": [0, 1],
        "changed": 3,
        "closed": 0,
        "note": "",
    }
    assert opened.page.locator("details[open]").count() == before
    assert opened.page.locator("details.recipe[open]").count() == 0
    assert opened.page.locator("html.paper").count() == 0
    assert opened.complaints == []


def test_paper_shows_the_telling_parts_of_a_large_run_and_says_so(visit, big):
    path, told = big
    opened = visit(path)
    opened.open_recipes("#recipe-3")
    opened.page.evaluate(SEEN)
    opened.page.pdf()
    seen = opened.page.evaluate("seen")
    names = list(dict.fromkeys(row["recipe"] for row in told["rows"]))
    telling = {names.index(group["recommended"]) for group in told["frontier"] if group["recommended"]}
    wanted = sorted(telling | {names.index(told["baseline"]), 3})
    assert len(wanted) < 38
    assert seen["open"] == seen["drawn"] == wanted
    assert f"those left open; {38 - len(wanted)} more stand in the table" in seen["note"]
    assert opened.page.locator("details.recipe[open]").count() == 1
    opened.page.emulate_media(media="print")
    opened.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert opened.page.locator("#on-paper").is_visible()
    assert opened.page.locator("details.recipe:visible").count() == len(wanted)
    opened.page.evaluate("dispatchEvent(new Event('afterprint'))")
    opened.page.emulate_media(media="screen")
    assert opened.page.locator("details.recipe:visible").count() == 38
    assert not opened.page.locator("#on-paper").is_visible()
    assert opened.complaints == []


def test_changed_outputs_of_embeddings_are_listed_with_both_sentences(visit, tmp_path):
    labels = [i / 200 for i in range(200)]
    other = [v - 0.3 if i == 2 else v for i, v in enumerate(labels)]
    every = {
        "fp32": Made((1, 1), labels, metrics={"spearman": 1.0}),
        "other": Made((1, 1), other, metrics={"spearman": 0.99}),
        "same": Made((1, 1), labels, metrics={"spearman": 1.0}),
    }
    folder = write_run(tmp_path, every, labels=labels, metric="spearman")
    put_texts(folder, [f"first {i}" for i in range(200)], second=[f"second {i}" for i in range(200)])
    opened = visit(page.write(folder))
    opened.open_recipes()
    flips = opened.page.locator("#recipe-1 [data-flips]")
    assert flips.locator("h4").inner_text() == "Outputs that changed"
    assert "1 outputs differ" not in flips.inner_text()
    assert "1 output differs from the baseline's" in flips.inner_text()
    (line,) = [line.locator("td").all_inner_texts() for line in flips.locator("tbody tr").all()]
    assert line == ["first 2\nsecond 2", "0.0100", "0.0100", "-0.290"]
    same = opened.page.locator("#recipe-2 [data-flips]").inner_text()
    assert "None: every output is the baseline's." in same
    assert opened.complaints == []


def test_changed_answers_are_listed_when_a_recipe_is_opened(visit, small):
    opened = visit(small[0])
    opened.open_recipes("#recipe-1")
    flips = opened.page.locator("#recipe-1 [data-flips]")
    assert "3 changed: 2 gained, 1 lost." in flips.inner_text()
    lines = [line.locator("td").all_inner_texts() for line in flips.locator("tbody tr").all()]
    assert ["text number 10", "bad", "bad 73.1 %", "good 73.1 %", "lost"] in lines
    assert ["text number 1", "good", "bad 73.1 %", "good 73.1 %", "gained"] in lines


def test_hostile_strings_stay_text_and_run_nothing(visit, tmp_path):
    opened = visit(page.write(hostile(tmp_path)))
    opened.open_recipes()
    opened.page.select_option("#axis-y", "speedup")
    opened.page.locator("#chart a").first.hover()
    opened.page.locator("#results thead button").first.click()
    assert opened.page.locator("h1").inner_text() == SCRIPT
    assert SCRIPT in opened.page.title()
    assert IMAGE.replace("/", "") in opened.page.locator("#results").inner_text()
    assert (
        SCRIPT
        in opened.page.locator("[data-flips]").first.inner_text()
        + opened.page.locator("[data-flips]").nth(1).inner_text()
    )
    assert opened.page.evaluate("window.pwned") is None
    assert opened.page.locator("img").count() == 0
    assert opened.dialogs == []
    assert opened.complaints == []


def test_no_injected_script_would_run(visit, small, tmp_path):
    html = small[0].read_text().replace("</main>", "<script>window.pwned = 1</script></main>")
    (tmp_path / "broken.html").write_text(html)
    opened = visit(tmp_path / "broken.html")
    assert opened.page.evaluate("window.pwned") is None
    assert re.search("Content Security Policy", " ".join(opened.complaints))


def test_without_script_the_numbers_are_all_there(chromium, small):
    context = chromium.new_context(java_script_enabled=False)
    opened = context.new_page()
    opened.goto(small[0].as_uri())
    assert opened.locator("#results tbody tr").count() == 6
    assert "Take quick" in opened.locator("#recommendation").inner_text()
    assert not opened.locator(".controls").first.is_visible()
    note = opened.locator(".unscripted")
    assert note.is_visible()
    assert "the answers that changed need JavaScript" in note.inner_text()
    opened.locator("#curve-table > summary").click()
    assert "258" in opened.locator("#curve-table").inner_text()
    opened.locator("#recipe-1 > summary").click()
    told = opened.locator("#recipe-1 .numbers").inner_text()
    quick = next(row for row in small[1]["rows"] if row["recipe"] == "quick")["metrics"]
    for name, cell in quick.items():
        if cell["value"] is not None and name != "score_delta":
            assert units.number(name, cell["value"]) in told, name
    assert not opened.locator("#recipe-1 [data-flips]").is_visible()
    context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("which", ["example", "big"])
def test_screenshots(visit, request, tmp_path, which, width, scheme):
    path = request.getfixturevalue(which)
    opened = visit(path if which == "example" else path[0], width=width, scheme=scheme)
    opened.page.locator("#chart > svg").wait_for()
    recommended = opened.page.locator("#recommendation h2 a").get_attribute("href")
    opened.open_recipes(recommended)
    assert opened.page.locator(f"{recommended} [data-rounds] svg").count() >= 1
    # nothing but the boxes of tables may be wider than the window
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.evaluate("scrollTo(0, 0)")
    wanted = Path(os.environ.get("QTOOL_SCREENSHOTS") or tmp_path)
    wanted.mkdir(parents=True, exist_ok=True)
    for name, whole in (("first", False), ("whole", True)):
        file = wanted / f"{which}-{width}-{scheme}-{name}.png"
        opened.page.screenshot(path=str(file), full_page=whole)
        assert file.stat().st_size > 10_000
    assert opened.complaints == []
