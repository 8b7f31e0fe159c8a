"""`qtool report DIR --serve`: the runs of a folder in a browser of this machine. Reads files, writes none.

A server on localhost is reachable by every page that the user's browser shows. Hence: bound to 127.0.0.1; a request
whose Host is not this machine's own name is refused (DNS rebinding, https://owasp.org/www-community/attacks/DNS_Rebinding);
GET and HEAD alone; folders are looked up in the listing by name, no path is made from an address, and no link is
followed out of the folder.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback
from collections.abc import Mapping
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote_to_bytes, urlsplit

from qtool.core import QtoolError, did_you_mean
from qtool.report.shelf import BROKEN, Book, Shelf, facts, label, only_elsewhere, side_by_side, told
from qtool.report.text import one_line

HERE = Path(__file__).parent
ADDRESS = "127.0.0.1"
OWN_NAMES = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d{1,5})?", re.IGNORECASE)
MOST_COMPARED = 12
MOST_DISCARDED = 65536
SILENCE_S = 30.0
ALLOWED = "GET, HEAD"
OWN_POLICY = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
# report.html names its scripts by their hashes in a policy of its own; a browser keeps to both
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; base-uri 'none';"
    " form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Refused(Exception):
    """An answer that is not the page asked for: its status and a sentence."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


def serve(folder: Path, port: int) -> int:
    """Serve until interrupted; the exit code 0. Raises QtoolError for no folder or a port that cannot be had."""
    server = make_server(folder, port)
    count = len(server.shelf.paths())
    runs = f"{count} {'run' if count == 1 else 'runs'}"
    print(
        f"http://{ADDRESS}:{server.server_port}/ shows {runs} of {one_line(str(folder))}; Ctrl-C ends it",
        flush=True,
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        # the way a server is meant to end
        return 0
    finally:
        server.server_close()
    return 0


def make_server(folder: Path, port: int) -> Server:
    """Bound and listening. Raises QtoolError as `serve` does."""
    if not folder.is_dir():
        raise QtoolError(f"{folder} is no folder. Give a folder of runs, such as reports.")
    try:
        import jinja2  # noqa: F401 (asked for now, not at the first request)
    except ImportError:
        raise QtoolError("--serve needs jinja2: pip install jinja2.") from None
    try:
        return Server(folder, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise QtoolError(
                f"port {port} is taken. Give another --port, or --port 0 for any free one."
            ) from None
        raise QtoolError(
            f"cannot listen on port {port}: {error.strerror}. Give a --port above 1023."
        ) from None


class Server(ThreadingHTTPServer):
    """The shelf and the templates, shared by the threads of all requests."""

    def __init__(self, folder: Path, port: int) -> None:
        self.shelf = Shelf(folder)
        super().__init__((ADDRESS, port), Handler)

    def server_bind(self) -> None:
        # http.server's own looks up the machine's name, which can take seconds without a network
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    @cached_property
    def templates(self) -> Any:
        from qtool.report import page

        environment = page.templates(HERE / "serve")
        # a folder's name may hold bytes that are no UTF-8
        environment.filters["address"] = lambda name: quote(os.fsencode(name), safe="")
        return environment

    def page(self, template: str, **words: Any) -> str:
        return self.templates.get_template(template).render(words)


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version, sys_version = "qtool", ""
    timeout = SILENCE_S

    def do_GET(self) -> None:
        """Answer; whatever goes wrong is a page too."""
        from jinja2 import TemplateError

        try:
            self._refuse_other_hosts()
            kind, body, policy = self._answer()
            self._send(HTTPStatus.OK, body, kind, policy)
        except Refused as refused:
            self._send_error_page(refused.status, str(refused))
        except QtoolError as error:
            self._send_error_page(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
        except (*BROKEN, TemplateError):
            print("\n".join(map(one_line, traceback.format_exc().splitlines())), file=sys.stderr)
            words = "This page could not be made; the terminal of qtool says why."
            self._send_error_page(HTTPStatus.INTERNAL_SERVER_ERROR, words)

    do_HEAD = do_GET

    def _refuse_other_hosts(self) -> None:
        if not OWN_NAMES.fullmatch(self.headers.get("Host", "")):
            raise Refused(HTTPStatus.FORBIDDEN, "Only requests to localhost are answered.")

    def _answer(self) -> tuple[str, str, str]:
        """Content type, body and policy of what was asked for."""
        try:
            split = urlsplit(self.path)
            asked = parse_qs(split.query, errors="surrogateescape", max_num_fields=64)
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "The address cannot be read.") from None
        html, shelf = "text/html; charset=utf-8", self.server.shelf
        if split.path == "/style.css":
            return "text/css; charset=utf-8", _style(), OWN_POLICY
        if split.path == "/":
            body = self.server.page("runs.html", books=shelf.books(), folder=str(shelf.folder))
        elif split.path == "/compare":
            body = self._compare([_name(word) for word in asked.get("run", [])])
        elif split.path == "/trend":
            body = self._trend(asked.get("recipe", [""])[0])
        elif found := re.fullmatch(r"/run/([^/]+)/?", split.path):
            return html, self._run(_name(found[1])), PAGE_POLICY
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "There is no such page.")
        return html, body, OWN_POLICY

    def _book(self, name: str) -> Book:
        """A run that can be read."""
        try:
            book = self.server.shelf.book(name)
        except KeyError:
            hint = did_you_mean(name, self.server.shelf.paths())
            raise Refused(HTTPStatus.NOT_FOUND, f"There is no run '{name}' here.{hint}") from None
        if book.error:
            raise Refused(HTTPStatus.UNPROCESSABLE_ENTITY, f"Run {name}: {book.error}")
        return book

    def _run(self, name: str) -> str:
        from qtool import evidence
        from qtool.report import page

        book = self._book(name)
        return page.render(evidence.load(book.path, keep=False), book.summary)

    def _compare(self, names: list[str]) -> str:
        from qtool import compare
        from qtool.comparability import differences
        from qtool.report import two_runs

        names = list(dict.fromkeys(names))
        if not 2 <= len(names) <= MOST_COMPARED:
            words = f"Choose 2 to {MOST_COMPARED} runs to compare; {len(names)} were chosen."
            raise Refused(HTTPStatus.BAD_REQUEST, words)
        books = [self._book(name) for name in names]
        if len(books) == 2:
            found = compare.compare(books[0].path, books[1].path, keep=False)
            header, *lines = two_runs.table(found)
            more = [*two_runs.only_in_one(found), *two_runs.reasons(found)]
            return self.server.page(
                "two.html",
                books=books,
                notes=two_runs.notes(found),
                header=header,
                lines=lines,
                legend=two_runs.LEGEND,
                more=more,
            )
        apart = [facts(differences(books[0].run, book.run)) for book in books]
        return self.server.page(
            "several.html", books=books, tables=side_by_side(books), apart=apart, only=only_elsewhere(books)
        )

    def _trend(self, recipe: str) -> str:
        from qtool.report import trend

        books = self.server.shelf.books()
        found = trend.sections(books, recipe)
        if not found:
            known = {row["recipe"] for book in books for row in book.summary["rows"]}
            hint = did_you_mean(recipe, known)
            raise Refused(HTTPStatus.NOT_FOUND, f"No dated run here has a recipe '{recipe}'.{hint}")
        left_out = [book.name for book in books if book.error or book.started is None]
        return self.server.page(
            "trend.html",
            recipe=recipe,
            sections=found,
            drawing=trend.drawing,
            date=trend.date,
            told=told,
            label=label,
            left_out=left_out,
        )

    def _send(
        self, status: HTTPStatus, body: str, kind: str, policy: str, more: Mapping[str, str] = HEADERS
    ) -> None:
        data = body.encode("utf-8", "replace")
        own = {"Content-Type": kind, "Content-Length": str(len(data)), "Content-Security-Policy": policy}
        try:
            self.send_response(status)
            for name, value in (own | dict(more)).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the browser has gone

    def _send_error_page(self, status: HTTPStatus, words: str, more: Mapping[str, str] | None = None) -> None:
        body = self.server.page("error.html", status=f"{status.value} {status.phrase}", words=words)
        self._send(status, body, "text/html; charset=utf-8", OWN_POLICY, HEADERS | dict(more or {}))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself: a method there is no do_... for, or a request it cannot read."""
        if code == HTTPStatus.NOT_IMPLEMENTED:
            length = self.headers.get("Content-Length", "")
            # a body left unread would make the system cut the connection before the answer is seen
            self.rfile.read(min(int(length), MOST_DISCARDED) if length.isdecimal() else 0)
            words = f"Nothing can be changed here: only {ALLOWED} are answered."
            return self._send_error_page(HTTPStatus.METHOD_NOT_ALLOWED, words, {"Allow": ALLOWED})
        return self._send_error_page(HTTPStatus(code), "The request cannot be read.")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal shows the address, and what went wrong."""


def _name(address: str) -> str:
    """A run's name from what the template filter `address` made of it.

    Forms send that too, and not the name: a browser changes line breaks and bytes that are no UTF-8.
    """
    return os.fsdecode(unquote_to_bytes(os.fsencode(address)))


def _style() -> str:
    """The report's own style, and what these pages add to it."""
    return (HERE / "page" / "page.css").read_text("utf-8") + (HERE / "serve" / "serve.css").read_text("utf-8")
