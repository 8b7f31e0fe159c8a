"""The server of a folder of runs, asked over a socket: what it shows, and everything it must refuse."""

from __future__ import annotations

import contextlib
import html
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from qtool import evidence
from qtool.core import QtoolError
from qtool.report import serve, trend
from qtool.report.shelf import Shelf
from qtool.summary import summarise
from tests.conftest import qtool
from tests.run_folder import Made, contents, write_regression, write_run

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


@contextlib.contextmanager
def serving(folder):
    made_server = serve.make_server(folder, 0)
    thread = threading.Thread(target=made_server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made_server
    finally:
        made_server.shutdown()
        made_server.server_close()
        thread.join()


def asker(server):
    def one(path, method="GET", body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    return one


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as made_server:
        yield made_server


@pytest.fixture
def ask(server):
    return asker(server)


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


def regression(folder, day):
    told = {"started_at": f"2026-11-{day:02}T12:00:00+00:00", "host": {"hash": "h1", "cpu_model": "A CPU"}}
    return write_regression(folder, told)


def test_a_regression_is_shown_and_no_file_appears_or_changes(tmp_path):
    for day, name in enumerate(("one", "two", "three"), 1):
        regression(tmp_path / name, day)
    before = contents(tmp_path)
    pages = ("/", "/run/one/", "/compare?run=one&run=two", "/compare?run=one&run=two&run=three")
    with serving(tmp_path) as server:
        for path in (*pages, "/trend?recipe=int8"):
            assert asker(server)(path)[0].status == 200, path
    shown = Shelf(tmp_path).book("one").summary
    assert contents(tmp_path) == before
    # the command line stores what the server does not, and says the same
    assert summarise(tmp_path / "one") == shown
    assert len(list((tmp_path / "one" / "predictions" / "draws").iterdir())) == 2


@pytest.mark.parametrize("cut", [0, 20, 1000])
def test_stored_draws_are_read_and_broken_ones_are_made_anew_and_left(tmp_path, cut):
    expected = summarise(regression(tmp_path / "run", 1))
    stored = min((tmp_path / "run" / "predictions" / "draws").iterdir())
    whole = stored.read_bytes()
    np.save(stored, np.load(stored) + 1)
    before = contents(tmp_path)
    assert Shelf(tmp_path).book("run").summary != expected
    assert contents(tmp_path) == before
    stored.write_bytes(whole[:cut])
    before = contents(tmp_path)
    assert Shelf(tmp_path).book("run").summary == expected
    assert contents(tmp_path) == before


def test_the_ticked_runs_come_back_by_their_names_whatever_is_in_them(tmp_path):
    # percent-encoded by hand, after https://www.rfc-editor.org/rfc/rfc3986#section-2.1
    names = {
        b"a\xc2\xa0b": "a%C2%A0b",
        b"a\nb": "a%0Ab",
        b"100%25": "100%2525",
        b"x&run=y": "x%26run%3Dy",
        b"+\xff\"'": "%2B%FF%22%27",
    }
    for name in names:
        write(tmp_path / os.fsdecode(name))
    with serving(tmp_path) as server:
        text = asker(server)("/")[1]
        ticked = [html.unescape(v) for v in re.findall(r'type="checkbox" name="run" value="([^"]*)"', text)]
        assert sorted(ticked) == sorted(names.values())
        answer, text = asker(server)(f"/compare?{urlencode([('run', value) for value in ticked])}")
        assert answer.status == 200
        assert "5 runs side by side" in text
        for value in ticked:
            query = urlencode([("run", value), ("run", "100%2525" if value != "100%2525" else "a%0Ab")])
            assert asker(server)(f"/compare?{query}")[0].status == 200
            assert asker(server)(f"/run/{value}/")[0].status == 200


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    reports, outside = tmp_path / "reports", tmp_path / "outside"
    write(reports / "inside")
    write(outside / "run", model="outside-model")
    (reports / "again").symlink_to(reports / "inside")
    (reports / "linked").symlink_to(outside / "run")
    (reports / "group").symlink_to(outside)
    (outside / "texts.json").write_text('{"texts": [' + ", ".join(['"a secret"'] * 400) + "]}")
    for name, file in (
        ("texts", "texts.json"),
        ("scores", "predictions/int8-cpu.npz"),
        ("lines", "run.json"),
    ):
        write(reports / name)
        (reports / name / file).unlink(missing_ok=True)
        source = outside / "texts.json" if name == "texts" else outside / "run" / file
        (reports / name / file).symlink_to(source)
    (reports / "loop").symlink_to(reports / "loop")
    with serving(reports) as server:
        ask = asker(server)
        listed = ask("/")[1]
        names = re.findall(r'<th scope="row">(?:<a[^>]*>)?([^<]*)<', listed)
        assert sorted(names) == ["again", "inside", "lines", "linked", "scores", "texts"]
        assert listed.count("is a link that leads out of") == 4
        for name in ("linked", "texts", "scores", "lines"):
            for path in (f"/run/{name}/", f"/compare?run=inside&run={name}"):
                answer, text = ask(path)
                assert answer.status == 422, path
                assert "a secret" not in text
                assert "outside-model" not in text
        assert "outside-model" not in listed + ask("/trend?recipe=int8")[1]
        assert ask("/run/again/")[0].status == 200
        # a copy in the link's place is shown
        (reports / "texts" / "texts.json").unlink()
        (reports / "texts" / "texts.json").write_bytes((outside / "texts.json").read_bytes())
        assert "a secret" in ask("/run/texts/")[1]


@pytest.mark.parametrize("absolute", [True, False])
def test_a_run_names_no_predictions_outside_its_folder(tmp_path, monkeypatch, absolute):
    run, other = write(tmp_path / "run"), write(tmp_path / "other")
    name = f"{other}/predictions/int8-cpu.npz" if absolute else "../other/predictions/int8-cpu.npz"
    lines = (run / "results.jsonl").read_text()
    assert lines.count('"predictions/int8-cpu.npz"') == 1
    (run / "results.jsonl").write_text(lines.replace("predictions/int8-cpu.npz", name))
    monkeypatch.chdir(run)
    for folder in (run, run.relative_to(run)):
        (scores,) = evidence.load(folder, keep=False).scores.values()
        assert scores.problems == {"int8": "its predictions are not in the run's folder"}
        assert set(scores.predictions) == {"fp32"}


def test_a_template_that_fails_is_an_error_page(server, ask, monkeypatch, capfd):
    from jinja2 import UndefinedError

    real = server.page

    def failing(template, **words):
        if template == "runs.html":
            raise UndefinedError("'x' is undefined")
        return real(template, **words)

    monkeypatch.setattr(server, "page", failing)
    answer, text = ask("/")
    assert answer.status == 500
    assert "the terminal of qtool says why" in words(text)
    assert "'x' is undefined" in capfd.readouterr().err


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
