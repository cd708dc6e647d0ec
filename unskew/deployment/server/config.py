"""Configuration of a deployed run, stored in the run folder so that the run can be resumed.

It states how the run behaves, and never where it is carried out: a run folder may come from others, so folders, addresses
and processes are named only on the command line.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError, plain_message
from unskew.filesystem import DEPLOYMENT
from unskew.json_models import STRICT, read_model, write_model

Limit = Annotated[float, Field(gt=0, lt=1e12)]
OnTimeout = Literal["wait", "continue", "abort"]
"""Actions after the timeout if fewer updates than required have arrived."""
Seconds = Annotated[float, Field(gt=0, lt=1e9)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


@dataclasses.dataclass(frozen=True)  # validated as a part of ``Deployment``
class RoundPolicy:
    """Waiting time of a round and number of updates required.

    Attributes:
        round_timeout: Seconds to wait for updates; None waits until all sites have replied.
        min_updates: Number of updates that a round requires.
        on_timeout: Action if too few updates have arrived by then: ``wait``, ``continue`` without them, or ``abort``.
        max_invalid_replies: Number of invalid replies after which a site is excluded.
    """

    round_timeout: Seconds | None = None
    min_updates: Count = 1
    on_timeout: OnTimeout = "wait"
    max_invalid_replies: Count = 3


@dataclass(frozen=True, config=STRICT)
class Deployment:
    """Configuration of a deployed run.

    Attributes:
        run: Identifier of the run; sites store their state under it.
        own_data: Whether the sites have their own data.
        startup_timeout: Seconds within which all sites must have connected.
        round_policy: Waiting time and required updates of a round.
        asynchronous: Whether updates are applied as they arrive, also in later rounds.
        quorum: Sites that must be connected to start the run and each round; None requires all and waits for lost ones.
        max_message_mb: Largest accepted message, in MB.
        max_norm: Largest accepted norm of a tensor.
        exact: Whether to reject sites with other software versions or CPU instructions than the server's.
        excluded: Clients that the operator has excluded (``unskew deploy exclude``).
    """

    run: Annotated[str, Field(pattern="^[0-9a-f]{16}$")] = field(default_factory=lambda: secrets.token_hex(8))
    own_data: bool = False
    startup_timeout: Seconds = 600.0
    round_policy: RoundPolicy = field(default_factory=RoundPolicy)
    asynchronous: bool = False
    quorum: Count | None = None
    max_message_mb: Limit = 2048.0
    max_norm: Limit = 1e6
    exact: bool = False
    excluded: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...] = ()

    @staticmethod
    def of(**values: Any) -> Deployment:
        """Return the configuration with the values of an operator.

        Args:
            **values: Fields by name.

        Raises:
            ConfigError: If a value is not valid.
        """
        try:
            return Deployment(**values)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{first['loc'][-1]}={first['input']} is not valid: {plain_message(first['msg'])}."
            ) from error

    def write(self, folder: Path) -> None:
        """Write the configuration to a run folder."""
        write_model(folder / DEPLOYMENT, self)

    def write_excluded(self, folder: Path, clients: Iterable[int]) -> None:
        """Store the excluded clients, so that a resumed run also excludes them.

        Args:
            folder: Run folder.
            clients: Numbers of the excluded clients.
        """
        replace(self, excluded=tuple(sorted(clients))).write(folder)

    @staticmethod
    def read(folder: Path) -> Deployment:
        """Read the configuration of a run folder.

        Args:
            folder: Run folder.

        Raises:
            CheckpointError: If the file cannot be read, or was not written by a deployed run.
        """
        return read_model(folder / DEPLOYMENT, Deployment, "The run cannot be resumed.")


def is_deployed(folder: Path) -> bool:
    """Return whether a run folder belongs to a deployed run."""
    return (folder / DEPLOYMENT).is_file()
