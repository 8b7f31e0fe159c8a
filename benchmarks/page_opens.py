"""How long a browser takes to open the page of a large run from disk, and how large that file is.

    python benchmarks/page_opens.py [--loads N]

Target: the drawn frontier stands under 2 seconds after the navigation began, and the file is under 2 MB.
The run has 380 rows, more than 25 recipes at 5 batch sizes on 3 devices have, and texts whose answers changed.
Each load has a browser context of its own, so that nothing is cached; headless Chromium is driven by Playwright,
whose own time is counted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).parents[1]))

TARGET_S, TARGET_MB = 2.0, 2.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loads", metavar="N", type=common.positive, default=9, help="default 9")
    options = parser.parse_args()
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        raise SystemExit("needs Chromium: apt-get install chromium")
    from qtool.report import page
    from tests.page_runs import large

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        file = page.write(large(Path(folder)))
        print(f"the run and its page were written in {time.perf_counter() - start:.0f} s", flush=True)
        seconds = opened(path, file, options.loads)
        megabytes = file.stat().st_size / 1e6
    print(common.verdict("MB of the file", [megabytes], most=TARGET_MB))
    print(common.verdict("seconds until the frontier is drawn", seconds, most=TARGET_S))


def opened(browser_path: str, file: Path, loads: int) -> list[float]:
    """Seconds of each load from the start of the navigation until the frontier's marks have been painted."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for _ in range(loads):
            context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
            tab = context.new_page()
            start = time.perf_counter()
            tab.goto(file.as_uri(), wait_until="commit")
            tab.wait_for_selector("#chart > svg a")
            # a frame's callback runs before it is painted, the next one's after it
            tab.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found.append(time.perf_counter() - start)
            context.close()
        browser.close()
    return found


if __name__ == "__main__":
    main()
