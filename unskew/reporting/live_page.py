"""Local page on runs in progress: a server on the loopback interface, and the same page as one file."""

from __future__ import annotations

import math
import re
import sys
import threading
import time
from collections import Counter
from http.client import HTTP_PORT
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from typing import Any

from unskew.errors import ConfigError
from unskew.filesystem import make_folder, write_atomic
from unskew.reporting.live_html import escaped, run_details, run_row
from unskew.reporting.live_runs import POINTS, LiveRun
from unskew.reporting.page import csp_hash, page_file, to_json
from unskew.reporting.report import check_report_file
from unskew.reporting.run_reader import MOST_RUNS, run_folders
from unskew.version import __version__

HOST = "127.0.0.1"
SECONDS_PER_REQUEST = 0.5
"""Seconds of reading per request; the next request continues."""
MANY, POINTS_OF_MANY = 20, 50
"""With more runs than the first number, a page as one file has at most the second number of points of a curve."""
SCRIPT, STYLE = page_file("watch.js"), page_file("report.css") + page_file("watch.css")
POLICY = (
    f"default-src 'none'; script-src {csp_hash(SCRIPT)}; style-src {csp_hash(STYLE)}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'"
)


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
        self._version = time.time_ns() // 1_000_000  # above those of an earlier server that a page may have asked
        self._number = 0
        self._runs: dict[Path, LiveRun] = {}
        self._waiting: list[LiveRun] = []
        self._lock = threading.Lock()

    def changes(self, since: int, seconds: float = SECONDS_PER_REQUEST) -> dict[str, Any]:
        """Read what has changed in the folders, and return the rows of the runs that changed after a version.

        Args:
            since: Version of the previous answer; 0 returns all rows.
            seconds: Seconds of reading after which the rest is left to the next call.
        """
        with self._lock:
            found = run_folders(self.folder)
            self._update(found[:MOST_RUNS], seconds)
            shown = [run for run in self._runs.values() if run.version]
            shown.sort(key=lambda run: (run.state != "running", run.name))
            counts = Counter(run.state.partition(",")[0] for run in shown)
            status = ", ".join(f"{count} {state}" for state, count in counts.items()) or "no runs yet"
            status += "; reading further runs" * bool(self._waiting)
            status += f"; only {MOST_RUNS} of {len(found)} runs are shown" * (len(found) > MOST_RUNS)
            return {
                "version": self._version,
                "reading": bool(self._waiting),
                "status": f"Runs: {status}.",
                "order": [run.number for run in shown],
                "rows": {run.number: run_row(run) for run in shown if run.version > since},
            }

    def _update(self, found: list[Path], seconds: float) -> None:
        there = {*found}
        self._runs = {folder: run for folder, run in self._runs.items() if folder in there}
        for folder in found:
            if folder not in self._runs:
                name = folder.absolute().name if folder == self.folder else str(folder.relative_to(self.folder))
                self._runs[folder] = LiveRun(folder, name, self._number)
                self._number += 1
        self._waiting = self._waiting or list(self._runs.values())
        until = time.monotonic() + seconds
        while self._waiting and time.monotonic() < until:
            run = self._waiting[-1]
            if run.update(until):
                self._version += 1
                run.version = self._version
            if not run.unread:
                self._waiting.pop()

    def details(self, number: int) -> str | None:
        """Return curves, clients and log of a run as HTML; None if the run does not exist.

        Args:
            number: Number of the run.
        """
        with self._lock:
            return next((run_details(run) for run in self._runs.values() if run.number == number), None)

    def render(self, whole: bool = False) -> str:
        """Render the page.

        Args:
            whole: Whether the page contains all runs and needs no server.
        """
        rows, details, status = "", "", "Reading the runs."
        if whole:
            changes = self.changes(0, math.inf)
            status = changes["status"] + time.strftime(" Written on %Y-%m-%d at %H:%M.")
            rows = "".join(f"<tr>{row}</tr>" for row in changes["rows"].values())
            most = POINTS if len(self._runs) <= MANY else POINTS_OF_MANY
            for run in self._runs.values():
                summary = f"<summary><h2>{escaped(run.name)}</h2></summary>"
                details += f'<details id="run-{run.number}">{summary}<div>{run_details(run, most)}</div></details>'
        return Template(page_file("watch.html")).substitute(
            policy=POLICY,
            version=__version__,
            title=escaped(f"Runs in {self.folder.absolute()}"),
            style=STYLE,
            status=escaped(status),
            rows=rows,
            details=details,
            live="" if whole else "data-live",
            script=SCRIPT,
        )


def write_live_page(runs: LiveRuns, file: Path) -> None:
    """Write the page as one file that needs no server.

    Args:
        runs: Runs to show.
        file: File to write.

    Raises:
        ConfigError: If the file exists and is not a report.
    """
    check_report_file(file)
    page = runs.render(whole=True)
    make_folder(file.parent)
    write_atomic(file, page.encode(errors="replace"))  # a name may contain surrogates, which cannot be encoded


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
        self.address = f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error, except those of connections that a browser closes or leaves open.

        Args:
            request: Connection.
            client_address: Address of the browser.
        """
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET requests for the page and its data whose ``Host`` header names this machine."""

    server: PageServer
    timeout = 30
    server_version, sys_version = "unskew", ""

    def do_GET(self) -> None:
        """Answer a request."""
        port = self.server.server_port
        hosts = [f"{name}:{port}" for name in (HOST, "localhost")]
        if port == HTTP_PORT:
            hosts += [HOST, "localhost"]  # browsers omit the standard port
        if self.headers.get("Host", "").lower() not in hosts:
            return self.send_error(403)  # from a page of another site whose name was made to lead here
        runs, request = self.server.runs, re.fullmatch(r"/(?:(runs|details)\?([0-9]{1,15}))?", self.path)
        if request is None:
            return self.send_error(404)
        kind, number = request[1], int(request[2] or 0)
        if kind is None:
            return self._send(200, "text/html", runs.render())
        answer = runs.changes(number) if kind == "runs" else runs.details(number)
        return self.send_error(404) if answer is None else self._send(200, "application/json", to_json(answer))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer with an error as plain text.

        Args:
            code: Status of HTTP; that of an unknown method becomes 405.
            message: Not used.
            explain: Not used.
        """
        code = 405 if code == 501 else code
        self._send(code, "text/plain", f"{code} {self.responses[code][0]}\n")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode(errors="replace")
        self.send_response(code)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
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
            *args: Not used.
        """
