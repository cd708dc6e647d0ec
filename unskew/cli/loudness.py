"""How much the commands say beside their results: ``--quiet`` and ``--verbose``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Loudness:
    """What was asked for.

    Attributes:
        quiet: No progress and no hints: results, warnings and errors only.
        verbose: A line per round, and the traceback of an error.
    """

    quiet: bool = False
    verbose: bool = False


LOUDNESS = Loudness()
"""Of the command that runs."""
FLAGS = ("--quiet", "--verbose")


def in_front(words: list[str]) -> list[str]:
    """The words of a command with ``--quiet`` and ``--verbose`` before it, wherever they were written.

    >>> in_front(["run", "--rounds", "2", "--quiet"])
    ['--quiet', 'run', '--rounds', '2']
    """
    end = words.index("--") if "--" in words else len(words)
    flags = [word for word in words[:end] if word in FLAGS]
    return [*flags, *(word for place, word in enumerate(words) if place >= end or word not in FLAGS)]
