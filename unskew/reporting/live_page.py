"""Local page on runs in progress: a server on the loopback interface, and the same page as one file."""

from __future__ import annotations

import html
import math
import re
import secrets
import sys
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import parse_qs, urlsplit

from unskew.errors import ConfigError
from unskew.filesystem import make_folder, write_atomic
from unskew.reporting.live_runs import LiveRun
from unskew.reporting.page import csp_hash, escape_script, page_file, to_json
from unskew.reporting.report import check_report_file
from unskew.reporting.run_reader import MOST_RUNS, run_folders
from unskew.version import __version__

HOST = "127.0.0.1"
SECONDS_PER_REQUEST = 0.5
"""Seconds of reading per request; the next request continues."""


class LiveRuns:
    """All runs in or below a folder, each with the version of its last change. Several threads may use it.

    Args:
        folder: Run folder, or folder that contains some; new ones are found later.

    Raises:
        ConfigError: If the folder does not exist.
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            what = "is a file, not a folder" if folder.exists() else "does not exist"
            raise ConfigError(f"{folder} {what}. Name a run folder, or a folder that contains run folders.")
        self.folder = folder
        self.version = 0
        self._session = secrets.token_hex(8)
        self._runs: dict[Path, LiveRun] = {}
        self._found = 0
        self._notes: list[str] = []
        self._waiting: list[LiveRun] = []
        self._lock = threading.Lock()

    def update(self, seconds: float = math.inf) -> None:
        """Read what has changed in the folders.

        Args:
            seconds: Time after which the rest is left to the next call.
        """
        found = run_folders(self.folder)
        self._notes = [f"Only {MOST_RUNS} of {len(found)} runs are shown."] if len(found) > MOST_RUNS else []
        for folder in found[:MOST_RUNS]:
            if folder not in self._runs:
                name = folder.name if folder == self.folder else folder.relative_to(self.folder).as_posix()
                self._runs[folder] = LiveRun(folder, name, self._found)
                self._found += 1
        for folder in self._runs.keys() - {*found[:MOST_RUNS]}:
            del self._runs[folder]
        if not self._waiting:
            self._waiting = list(self._runs.values())
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            run = self._waiting[-1]
            if run.update(until):
                self.version += 1
                run.version = self.version
            if not run.unread:
                self._waiting.pop()

    def changes(self, since: int, seconds: float = SECONDS_PER_REQUEST) -> dict[str, Any]:
        """Return the rows of the runs that changed after a version, and the order of all runs: those in progress first.

        Args:
            since: Version of the previous answer; 0 returns all rows.
            seconds: Seconds of reading after which the rest is left to the next call.
        """
        with self._lock:
            self.update(seconds)
            shown = [run for run in self._runs.values() if run.version]
            shown.sort(key=lambda run: (run.state != "running", run.name))
            return {
                "session": self._session,
                "version": self.version,
                "reading": bool(self._waiting),
                "notes": self._notes,
                "order": [run.number for run in shown],
                "rows": {run.number: run.row() for run in shown if run.version > since},
            }

    def details(self, number: int, since: int) -> dict[str, Any] | None:
        """Return curves, clients and log of a run; None if it did not change after a version.

        Args:
            number: Number of the run.
            since: Version of the previous answer.

        Raises:
            KeyError: If there is no such run.
        """
        with self._lock:
            run = {run.number: run for run in self._runs.values()}[number]
            return {"version": run.version, **run.details()} if run.version > since else None

    def render(self, data: object = None) -> str:
        """Render the page.

        Args:
            data: All rows and details for a page without a server; None for a page that asks the server.
        """
        return Template(page_file("watch.html")).substitute(
            policy=page_policy(),
            version=__version__,
            title=html.escape(f"Runs in {self.folder.absolute()}"),
            style=style_sheet(),
            data=to_json(data),
            script=page_script(),
        )


@cache
def page_script() -> str:
    """Return the script of the page."""
    return escape_script(page_file("watch.js"))


@cache
def style_sheet() -> str:
    """Return the style of the page."""
    return page_file("report.css") + page_file("watch.css")


def page_policy() -> str:
    """Return the content-security policy of the page: its own script and style, and requests to its server."""
    return (
        f"default-src 'none'; script-src {csp_hash(page_script())}; style-src {csp_hash(style_sheet())}; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def write_live_page(runs: LiveRuns, file: Path) -> None:
    """Write the page as one file that needs no server.

    Args:
        runs: Runs to show.
        file: File to write.

    Raises:
        ConfigError: If the file exists and is not a report, or there are no runs.
    """
    check_report_file(file)
    changes = runs.changes(0, math.inf)
    if not changes["order"]:
        raise ConfigError(f"{runs.folder} contains no run: a run folder has config.yaml.")
    details = {number: runs.details(number, 0) for number in changes["order"]}
    make_folder(file.parent)
    # A name may contain surrogates, which cannot be encoded.
    data = {**changes, "details": details, "written": time.strftime("%Y-%m-%d %H:%M")}
    write_atomic(file, runs.render(data).encode(errors="replace"))


class PageServer(ThreadingHTTPServer):
    """Server of the page for this machine.

    Args:
        runs: Runs to show.
        port: Port; 0 for a free one.

    Raises:
        ConfigError: If the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, runs: LiveRuns, port: int = 0):
        self.runs = runs
        try:
            super().__init__((HOST, port), PageHandler)
        except OSError as error:
            raise ConfigError(
                f"Port {port} cannot be used: {error.strerror}. Choose another with --port, or omit it for a free one."
            ) from error

    @property
    def address(self) -> str:
        """Address of the page."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, except those of connections that a browser closes or leaves open."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and its data, with a ``Host`` header that names this machine."""

    server: PageServer
    timeout = 30
    server_version = "unskew"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer a request."""
        port, runs = self.server.server_port, self.server.runs
        if self.headers.get("Host", "").lower() not in (f"{HOST}:{port}", f"localhost:{port}"):
            self.send_error(403)  # a page of another site whose name was made to lead here
            return
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        numbers = [query.get(name, "0") for name in ("run", "since")]
        if not all(re.fullmatch(r"[0-9]{1,15}", number) for number in numbers):
            self.send_error(400)
            return
        number, since = map(int, numbers)
        if parts.path == "/":
            self._send(200, "text/html; charset=utf-8", runs.render().encode(errors="replace"))
        elif parts.path == "/runs":
            self._send(200, "application/json", to_json(runs.changes(since)).encode())
        elif parts.path == "/details":
            try:
                answer = runs.details(number, since)
            except KeyError:
                self.send_error(404)
                return
            self._send(200, "application/json", to_json(answer).encode())
        else:
            self.send_error(404)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error as plain text.

        Args:
            code: Status of HTTP; an unknown method is answered by 405.
            message: Not used.
            explain: Not used.
        """
        code = 405 if code == 501 else code
        self._send(code, "text/plain; charset=utf-8", f"{code} {self.responses[code][0]}\n".encode())

    def _send(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{page_policy()}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            **({"Allow": "GET"} if code == 405 else {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing.

        Args:
            format: Not used.
            args: Not used.
        """
