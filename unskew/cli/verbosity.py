"""Output of the commands: ``--quiet``, ``--verbose`` and ``--log-json``, and the streams to which they print."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any


@dataclass
class Verbosity:
    """Requested verbosity.

    Attributes:
        quiet: Print only results, warnings and errors, without progress and hints.
        verbose: Print a line per round, and the traceback of an error.
        log_json: Print events as JSON lines to standard error, instead of progress.
    """

    quiet: bool = False
    verbose: bool = False
    log_json: bool = False


LOUDNESS = Verbosity()
"""Verbosity of the current command."""
FLAGS = ("--quiet", "--verbose", "--log-json")


def log_event(event: str, **fields: Any) -> None:
    """Print an event as a JSON line to standard error if ``--log-json`` is set.

    Args:
        event: Kind of the event.
        **fields: Further JSON values.
    """
    if LOUDNESS.log_json:
        line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **fields}
        print(json.dumps(line), file=sys.stderr, flush=True)


class NoticePrinter(logging.Handler):
    """Logging handler that prints each notice of the package once to standard error; with ``--quiet``, only warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print one notice."""
        text = record.getMessage()
        if text in self.printed:  # data that are loaded again, for example for another seed
            return
        self.printed.add(text)
        log_event("notice", text=text)
        if record.levelno >= logging.WARNING or not LOUDNESS.quiet:
            print(f"unskew: {text}", file=sys.stderr)


MIN_COLUMNS = 20
"""Width below which ``COLUMNS`` is ignored: a terminal that does not know its width sets 0."""


def prepare_streams() -> None:
    """Make every text printable: replace what a terminal cannot show, and discard what is printed to a closed stream."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed; no file of a run may get its number, to which warnings are written
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if os.environ.get("COLUMNS", "").isdecimal() and int(os.environ["COLUMNS"]) < MIN_COLUMNS:
        del os.environ["COLUMNS"]


def print_notices() -> None:
    """Install the handler for notices of a command, such as the detected format of a file."""
    logger = logging.getLogger("unskew")
    for handler in [handler for handler in logger.handlers if isinstance(handler, NoticePrinter)]:
        logger.removeHandler(handler)
    logger.addHandler(NoticePrinter())
    logger.setLevel(logging.INFO)


def normalize_global_flags(words: list[str]) -> list[str]:
    """Move the flags of all commands to the front of the command-line arguments.

    >>> normalize_global_flags(["run", "--rounds", "2", "--quiet"])
    ['--quiet', 'run', '--rounds', '2']
    """
    end = words.index("--") if "--" in words else len(words)
    flags = [word for word in words[:end] if word in FLAGS]
    return [*flags, *(word for index, word in enumerate(words) if index >= end or word not in FLAGS)]
