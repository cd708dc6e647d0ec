"""Configuration of a deployed run, stored in the run folder so that the run can be resumed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from unskew.config.experiment import Experiment
from unskew.deployment.flower.superlinks import LocalSuperLink, RemoteSuperLink
from unskew.deployment.server.sites import RoundPolicy
from unskew.deployment.site.config import parse_address
from unskew.errors import CheckpointError, ConfigError
from unskew.filesystem import read_json, write_atomic

FILE = "deployment.json"
"""File in the run folder that stores the deployment configuration."""


@dataclass(frozen=True)
class Deployment:
    """Configuration of a deployed run.

    Attributes:
        run: Identifier of the run; sites store their state under it.
        local: Number of sites to start on this machine; None uses an existing SuperLink.
        folder: Folder of the deployment, or None.
        address: Address of the SuperLink, or None.
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

    run: str = field(default_factory=lambda: secrets.token_hex(8))
    local: int | None = None
    folder: str | None = None
    address: str | None = None
    own_data: bool = False
    startup_timeout: float = 600.0
    round_policy: RoundPolicy = field(default_factory=RoundPolicy)
    asynchronous: bool = False
    quorum: int | None = None
    max_message_mb: float = 2048.0
    max_norm: float = 1e6
    exact: bool = False
    excluded: tuple[int, ...] = ()

    def place(self, config: Experiment) -> RemoteSuperLink:
        """Return the SuperLink and sites of the run.

        Args:
            config: Configuration of the run.

        Raises:
            ConfigError: If the deployment does not state the folder and address of a SuperLink.
        """
        if self.local is not None:
            return LocalSuperLink(self.run, self.local, [config])
        if self.folder is None or self.address is None:
            raise ConfigError("No sites given: use --local N to start sites here, or --folder and --superlink.")
        return RemoteSuperLink(Path(self.folder), self.address)

    def check(self) -> None:
        """Validate the numbers.

        Raises:
            ConfigError: If a number is out of range.
        """
        if self.address is not None:
            try:
                parse_address(self.address)
            except ValueError as error:
                raise ConfigError(f"superlink={self.address} is not an address: {error}.") from error
        policy = self.round_policy
        counts = {
            "local": self.local,
            "min_updates": policy.min_updates,
            "max_invalid_replies": policy.max_invalid_replies,
            "quorum": self.quorum,
        }
        for name, value in counts.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1.")
        for name, seconds in (("round_timeout", policy.round_timeout), ("startup_timeout", self.startup_timeout)):
            if seconds is not None and not 0 < seconds < 1e9:
                raise ConfigError(f"{name}={seconds} must be a positive number of seconds.")
        for name, most in (("max_message_mb", self.max_message_mb), ("max_norm", self.max_norm)):
            if not 0 < most < 1e12:
                raise ConfigError(f"{name}={most} must be positive.")
        if policy.on_timeout not in ("wait", "continue", "abort"):
            raise ConfigError(f"on_timeout={policy.on_timeout!r} must be wait, continue or abort.")

    def write(self, folder: Path) -> None:
        """Write the configuration to a run folder."""
        write_atomic(folder / FILE, json.dumps(asdict(self), indent=2).encode())

    def write_excluded(self, folder: Path, clients: Iterable[int]) -> None:
        """Store the excluded clients, so that a resumed run also excludes them.

        Args:
            folder: Run folder.
            clients: Numbers of the excluded clients.
        """
        replace(self, excluded=tuple(sorted(clients))).write(folder)

    @staticmethod
    def read(folder: Path) -> Deployment:
        """Read a configuration that ``write`` stored.

        Args:
            folder: Run folder.

        Raises:
            CheckpointError: If the file cannot be read.
        """
        try:
            values = read_json(folder / FILE)
            changed = {
                "round_policy": RoundPolicy(**values["round_policy"]),
                "excluded": tuple(map(int, values["excluded"])),
            }
            deployment = Deployment(**{**values, **changed})
            deployment.check()
            return deployment
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read ({error}), so the run cannot be resumed.") from error


def is_deployed(folder: Path) -> bool:
    """Return whether a run folder belongs to a deployed run."""
    return (folder / FILE).is_file()
