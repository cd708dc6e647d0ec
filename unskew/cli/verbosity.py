"""Verbosity of the commands: ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass


@dataclass
class Verbosity:
    """Requested verbosity.

    Attributes:
        quiet: Print only results, warnings and errors, without progress and hints.
        verbose: Print a line per round, and the traceback of an error.
    """

    quiet: bool = False
    verbose: bool = False


LOUDNESS = Verbosity()
"""Verbosity of the current command."""
FLAGS = ("--quiet", "--verbose")


class NoticePrinter(logging.Handler):
    """Logging handler that prints notices of the package to standard error, except with ``--quiet``."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one notice."""
        if not LOUDNESS.quiet:
            print(f"unskew: {record.getMessage()}", file=sys.stderr)


def print_notices() -> None:
    """Install the handler for notices, such as the detected format of a file."""
    logger = logging.getLogger("unskew")
    if not any(isinstance(handler, NoticePrinter) for handler in logger.handlers):
        logger.addHandler(NoticePrinter())
        logger.setLevel(logging.INFO)


def normalize_global_flags(words: list[str]) -> list[str]:
    """Move ``--quiet`` and ``--verbose`` to the front of the command-line arguments.

    >>> normalize_global_flags(["run", "--rounds", "2", "--quiet"])
    ['--quiet', 'run', '--rounds', '2']
    """
    end = words.index("--") if "--" in words else len(words)
    flags = [word for word in words[:end] if word in FLAGS]
    return [*flags, *(word for index, word in enumerate(words) if index >= end or word not in FLAGS)]
