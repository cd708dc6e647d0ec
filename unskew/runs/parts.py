"""Parts of a command's work, which independent commands execute, such as the tasks of a Slurm array."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from unskew.errors import ConfigError, short_repr

Item = TypeVar("Item")


@dataclass(frozen=True)
class Part:
    """Share of a command's work that depends only on the work itself, not on what has finished.

    Attributes:
        number: Number of the part, from 1.
        total: Number of parts.
    """

    number: int
    total: int

    def share(self, items: Sequence[Item], weights: Sequence[int] = ()) -> list[Item]:
        """Return the items of this part; each one is in the part that has the least weight of the items before it.

        Neighbors, which take similar times, are thus in different parts.

        Args:
            items: Items of all parts.
            weights: Weight of each item; empty for equal ones.

        >>> [Part(number, 3).share("abcdefgh") for number in (1, 2, 3)]
        [['a', 'd', 'g'], ['b', 'e', 'h'], ['c', 'f']]
        >>> [Part(number, 2).share("abcd", [3, 1, 1, 2]) for number in (1, 2)]
        [['a'], ['b', 'c', 'd']]
        """
        loads, own = [0] * self.total, []
        for item, weight in zip(items, weights or [1] * len(items), strict=True):
            part = loads.index(min(loads))
            loads[part] += weight
            if part == self.number - 1:
                own.append(item)
        return own

    def __str__(self) -> str:
        """Return the part as on the command line."""
        return f"{self.number}/{self.total}"


def parse_part(text: str, parallel: int | str | None = None) -> Part:
    """Parse ``--part``.

    Args:
        text: Number of the part and number of parts, as ``2/4``.
        parallel: Number of concurrent runs of the same command.

    Raises:
        ConfigError: If the text is not a part, or the runs are also distributed on a Ray cluster.
    """
    match = re.fullmatch(r"([0-9]{0,4})/([0-9]{1,4})", text.strip())
    if match is None:
        raise ConfigError(
            f"--part {short_repr(text)} is not a part. Write its number and the number of parts, as in --part 2/4."
        )
    total = int(match[2])
    array = f"--array=1-{total}" if total > 1 else "--array=1"
    if not match[1]:
        raise ConfigError(
            f"--part {text} has no number before the slash. Submit the script as an array, with sbatch {array}."
        )
    part = Part(int(match[1]), total)
    if total == 0:
        raise ConfigError(f"--part {text} divides the work into 0 parts. Use 1 or more.")
    if part.number == 0:
        raise ConfigError(f"--part {text} does not exist: parts are numbered from 1. With Slurm, use {array}.")
    if part.number > total:
        raise ConfigError(
            f"--part {text} does not exist: the last part is {total}/{total}. With Slurm, use {array}, and write the number "
            "of parts in the script: SLURM_ARRAY_TASK_COUNT is smaller when only some tasks are submitted again."
        )
    if isinstance(parallel, str) and "@" in parallel:
        raise ConfigError(
            f"--part {text} and --parallel {parallel} both distribute the work over machines. Remove one of them."
        )
    return part
