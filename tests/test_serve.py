"""The server of a folder of runs, asked over a socket: what it shows, and everything it must refuse."""

from __future__ import annotations

import html
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import quote

import pytest

from qtool.core import QtoolError
from qtool.report import serve, trend
from qtool.report.shelf import Shelf
from tests.conftest import qtool
from tests.run_folder import Made, write_run

pytest.importorskip("jinja2")
LABELS = [0, 1] * 200
EVIL = "<script>alert('x')</script>"


def made(p50_s, wrong=range(40), **more):
    answers = [1 - label if i in wrong else label for i, label in enumerate(LABELS)]
    return Made(p50_s, answers, metrics={"accuracy": 1 - len(wrong) / 400}, **more)


def write(folder, int8_s=0.0027, day=1, versions="2.13.0", host="h1", **run):
    recipes = {
        "fp32": made((0.0108, 0.0110, 0.0109), disk_bytes=91_100_000),
        "int8": made((int8_s * 0.99, int8_s, int8_s * 1.01), range(2, 42), disk_bytes=23_400_000),
        "odd": Made((1, 1, 1), bad={"build": ("failed", f"no {EVIL}", None)}),
    }
    told = {
        "started_at": f"2026-11-{day:02}T12:00:00+00:00",
        "versions": {"torch": versions},
        "host": {"hash": host, "cpu_model": "A CPU"},
        "model_info": {"content": "c"},
    }
    return write_run(folder, recipes, labels=LABELS, run=told | run)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    reports = tmp_path_factory.mktemp("served") / "reports"
    write(reports / "first", day=1)
    write(reports / "second", 0.0030, day=2)
    write(reports / "third", 0.0020, day=3, versions="2.14.0")
    write(reports / "evil", day=4, model=EVIL, host=EVIL)
    write(reports / "group" / "inner #1", day=5)
    (reports / "broken").mkdir()
    (reports / "broken" / "run.json").write_text("{")
    (reports / "not-a-run").mkdir()
    write(reports.parent / "outside", day=6)
    return reports


@pytest.fixture(scope="module")
def server(folder):
    made_server = serve.make_server(folder, 0)
    thread = threading.Thread(target=made_server.serve_forever, daemon=True)
    thread.start()
    yield made_server
    made_server.shutdown()
    made_server.server_close()
    thread.join()


@pytest.fixture
def ask(server):
    def one(path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    return one


def words(text):
    """What a reader sees."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", text)).split())


def test_the_list_has_every_run_newest_first_and_the_broken_one_with_its_error(ask):
    answer, text = ask("/")
    assert answer.status == 200
    names = re.findall(r'<th scope="row">(?:<a[^>]*>)?([^<]*)<', text)
    assert names == ["group/inner #1", "evil", "third", "second", "first", "broken"]
    shown = words(text)
    assert "run.json is not valid JSON" in shown
    assert "int8 cpu, batch 1" in shown
    assert "not-a-run" not in shown
    assert "outside" not in shown


def test_a_run_is_its_report_and_nothing_is_written(ask, folder):
    before = sorted(folder.rglob("*"))
    answer, text = ask("/run/first/")
    assert answer.status == 200
    assert "int8" in text
    assert ask("/run/first")[0].status == 200
    for path in ("/", "/compare?run=first&run=second", "/trend?recipe=int8"):
        assert ask(path)[0].status == 200
    assert sorted(folder.rglob("*")) == before


def test_a_run_of_several_models_is_found_by_its_quoted_name(ask):
    assert ask("/run/group%2Finner%20%231/")[0].status == 200
    assert 'href="/run/group%2Finner%20%231/"' in ask("/")[1]
    assert ask("/run/group/inner/")[0].status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/run/../outside/",
        "/run/..%2Foutside/",
        "/run/%2e%2e%2foutside/",
        "/run/..%5Coutside/",
        "/run/first%2F..%2F..%2Foutside/",
        "/run/%2Fetc%2Fpasswd/",
        "/run/first%00/",
        "/run/",
        "/../outside/run.json",
        "/first/run.json",
        "/run/first/results.jsonl",
        "//outside/",
    ],
)
def test_no_path_leads_out_of_the_listing(ask, path):
    answer, text = ask(path)
    assert answer.status == 404
    assert "trial_id" not in text


def test_a_name_outside_the_listing_cannot_be_compared(ask):
    assert ask("/compare?run=first&run=../outside")[0].status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND", "get"])
def test_there_is_no_method_but_get_and_head(ask, method):
    answer, _ = ask("/", method, body="x" * 100 if method in ("POST", "PUT") else None)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


def test_head_has_the_headers_of_get_and_no_body(ask):
    get, text = ask("/")
    head, nothing = ask("/", "HEAD")
    assert nothing == ""
    assert head.status == 200
    assert head.headers["Content-Length"] == get.headers["Content-Length"] == str(len(text.encode()))


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8750", "127.0.0.1.evil.example", "localhost@evil", ""]
)
def test_a_request_for_another_host_is_refused(ask, host):
    answer, text = ask("/", Host=host)
    assert answer.status == 403
    assert "first" not in text


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1", "127.0.0.1:8750", "[::1]", "[::1]:8750"]
)
def test_this_machine_by_any_of_its_names_is_answered(ask, host):
    assert ask("/", Host=host)[0].status == 200


def test_a_request_without_a_host_is_refused(server):
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert client.recv(64).split()[1] == b"403"


def test_it_listens_on_this_machine_alone(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path", ["/", "/run/first/", "/compare?run=first&run=second", "/nothing", "/style.css"]
)
def test_every_answer_is_kept_by_nobody_sniffed_by_nobody_and_framed_by_nobody(ask, path):
    headers = ask(path)[0].headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")
    assert "frame-ancestors 'none'" in policy
    if path != "/run/first/":
        assert "script-src" not in policy
        assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/", "/run/evil/", "/compare?run=first&run=evil", "/trend?recipe=int8"])
def test_a_hostile_name_stays_text(ask, path):
    answer, text = ask(path)
    assert answer.status == 200
    assert "<script>alert" not in text


def test_a_question_is_not_given_back_as_markup(ask):
    for path in (
        f"/trend?recipe={quote(EVIL)}",
        f"/run/{quote(EVIL, safe='')}/",
        f"/compare?run={quote(EVIL)}",
    ):
        answer, text = ask(path)
        assert answer.status in (400, 404)
        assert "<script" not in text


def test_two_runs_show_the_change_and_why_it_is_missing(ask):
    text = words(ask("/compare?run=first&run=second")[1])
    assert "2.70 3.00 1.11x" in text
    text = words(ask("/compare?run=first&run=third")[1])
    assert 'not the same library versions: A {"torch": "2.13.0"}, B {"torch": "2.14.0"}' in text
    assert "no change of p50 ms: not the same library versions" in text


def test_three_runs_leave_a_column_blank_that_may_not_be_compared(ask):
    text = ask("/compare?run=first&run=second&run=third")[1]
    part = text[text.index("<h2>p50 ms on cpu") :].split("</section>")[0]
    line = re.search(r'<th scope="row">int8</th>(.*?)</tr>', part, re.DOTALL)
    assert line
    cells = [cell.split(" [")[0] for cell in re.findall(r"<td>([^<]*)</td>", line[1])]
    assert cells == ["2.70", "3.00", "-"]
    assert part.count("not the same library versions") == 1
    assert "<h2>Δ score points on cpu, batch 1</h2>" in text
    disk = text[text.index("<h2>disk MB on cpu") :].split("</section>")[0]
    assert re.search(r"int8</th><td>23.4</td><td>23.4</td><td>23.4</td>", disk)


@pytest.mark.parametrize(("query", "count"), [("", 0), ("?run=first", 1), ("?run=first&run=first", 1)])
def test_one_run_cannot_be_compared(ask, query, count):
    answer, text = ask(f"/compare{query}")
    assert answer.status == 400
    assert f"{count} were chosen" in text


def test_a_broken_run_asked_for_is_a_page_with_its_error(ask):
    answer, text = ask("/run/broken/")
    assert answer.status == 422
    assert "not valid JSON" in words(text)
    assert "Traceback" not in text


def test_a_trend_joins_runs_of_one_host_and_one_set_of_versions_only(folder):
    books = Shelf(folder).books()
    sections = {section.title: section for section in trend.sections(books, "int8")}
    section = sections["a/model, demo: cpu, batch 1"]
    assert [point.book.name for point in section.points] == ["first", "second", "third", "group/inner #1"]
    assert [point.series.letter for point in section.points] == ["A", "A", "B", "A"]
    assert section.series[1].differs == ['library versions: {"torch": "2.13.0"} against {"torch": "2.14.0"}']
    drawn = trend.drawing(section, "latency_p50_s")
    assert drawn is not None
    (line,) = drawn["lines"]
    assert line["points"].count(",") == 3
    assert (
        drawn["marks"][2]["y"] > drawn["marks"][0]["y"] > drawn["marks"][1]["y"]
    )  # 2.0, 2.7 and 3.0 ms, up is more
    assert len(sections) == 2  # the other model has a section of its own


def test_a_trend_page_draws_and_tells_the_values(ask):
    answer, text = ask("/trend?recipe=int8")
    assert answer.status == 200
    assert text.count("<svg") == 6  # p50, score and memory of two models
    assert "2.00" in words(text)
    assert ask("/trend?recipe=odd")[0].status == 200


def test_an_unknown_recipe_gets_a_suggestion(ask):
    answer, text = ask("/trend?recipe=int9")
    assert answer.status == 404
    assert "Did you mean 'int8'?" in words(text)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0019, 0.0031, [0.002, 0.0025, 0.003]),
        (0, 10, [0, 5, 10]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (88.8, 91.2, [89, 90, 91]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert trend.ticks(low, high) == pytest.approx(ticks)


def test_a_run_that_changes_is_read_again(tmp_path):
    write(tmp_path / "run", 0.0027)
    shelf = Shelf(tmp_path)
    assert shelf.book("run") is shelf.book("run")
    write(tmp_path / "run", 0.0054, model="another")
    assert shelf.book("run").summary["model"] == "another"


def test_a_single_run_folder_can_be_served(folder):
    assert list(Shelf(folder / "first").paths()) == ["first"]


def test_an_empty_folder_says_how_to_make_a_run(tmp_path):
    server = serve.make_server(tmp_path, 0)
    try:
        assert "qtool sweep" in server.page("runs.html", books=[], folder="reports")
    finally:
        server.server_close()


def test_a_taken_port_and_a_missing_folder_are_errors_with_advice(server, folder, tmp_path):
    with pytest.raises(QtoolError, match="--port 0"):
        serve.make_server(folder, server.server_port)
    with pytest.raises(QtoolError, match="is no folder"):
        serve.make_server(tmp_path / "none", 0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--serve", "--format", "csv"), "two different things"),
        (("--port", "1"), "--port is for --serve"),
        (("--serve", "--port", "70000"), "0 to 65535"),
        (("--recipe", "int8"), "--recipe is for --format card"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(folder, flags, told):
    done = qtool("report", folder, *flags)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_ctrl_c_ends_it_with_exit_code_0(folder):
    command = [sys.executable, "-m", "qtool.cli", "report", str(folder), "--serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        line = process.stdout.readline()
        port = re.match(r"http://127\.0\.0\.1:(\d+)/ shows 6 runs", line)
        assert port, line
        connection = http.client.HTTPConnection("127.0.0.1", int(port[1]), timeout=60)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr
        assert process.stderr.read() == ""
