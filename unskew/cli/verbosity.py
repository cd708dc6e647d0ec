"""Verbosity of the commands: ``--quiet`` and ``--verbose``."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass


@dataclass
class Verbosity:
    """Requested verbosity.

    Attributes:
        quiet: No progress and no hints: results, warnings and errors only.
        verbose: A line per round, and the traceback of an error.
    """

    quiet: bool = False
    verbose: bool = False


LOUDNESS = Verbosity()
"""Verbosity of the command that runs."""
FLAGS = ("--quiet", "--verbose")


class NoticePrinter(logging.Handler):
    """Handler that prints the package's notices to standard error, unless ``--quiet`` is given."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one notice."""
        if not LOUDNESS.quiet:
            print(f"unskew: {record.getMessage()}", file=sys.stderr)


def print_notices() -> None:
    """Print notices such as the detected format of a file; warnings and errors take their own way."""
    logger = logging.getLogger("unskew")
    if not any(isinstance(handler, NoticePrinter) for handler in logger.handlers):
        logger.addHandler(NoticePrinter())
        logger.setLevel(logging.INFO)


def normalize_global_flags(words: list[str]) -> list[str]:
    """The words of a command with ``--quiet`` and ``--verbose`` before it, wherever they were written.

    >>> normalize_global_flags(["run", "--rounds", "2", "--quiet"])
    ['--quiet', 'run', '--rounds', '2']
    """
    end = words.index("--") if "--" in words else len(words)
    flags = [word for word in words[:end] if word in FLAGS]
    return [*flags, *(word for index, word in enumerate(words) if index >= end or word not in FLAGS)]
