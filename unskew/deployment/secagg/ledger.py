"""Record on a site's disk of the masked sums that it has opened, which prevents a second sum that could be compared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from unskew.deployment.site.state import SiteStateLostError
from unskew.errors import ConfigError
from unskew.filesystem import make_folder, write_atomic


class SumAlreadyOpenedError(SiteStateLostError):
    """Another sum of this round was opened, so this site does not take part in the requested one."""


@dataclass(frozen=True)
class OpenedSumLedger:
    """Record of the newest masked sum of one experiment that a site has helped to unmask (opened).

    The difference of two sums of one round, over different sites, can be the update of a single site, so a site opens
    only one sum per round. Training is deterministic, so a second run of the same experiment would give the same
    updates. Therefore a site opens no sums of a second run.

    Attributes:
        path: File of the record.
        run: Identifier of the current run.
    """

    path: Path
    run: str

    @staticmethod
    def of(state: Path, digest: str, run: str) -> OpenedSumLedger:
        """Return the ledger of an experiment in the folder of a site's states.

        Args:
            state: Folder of the site's states.
            digest: Digest of the experiment.
            run: Identifier of the run.
        """
        return OpenedSumLedger(state / "sums" / f"{digest[:32]}.json", run)

    def opened(self, round: int) -> tuple[int, ...]:
        """Return the clients whose sum was opened in this round of the run, or an empty tuple.

        Args:
            round: Number of the round, from 0.

        Raises:
            ConfigError: If sums of another run of the experiment were opened, or the file is corrupted.
        """
        try:
            values = json.loads(self.path.read_bytes())
            run = str(values["run"])
            newest = int(values["round"])
            clients = tuple(int(k) for k in values["clients"])
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"The record of opened sums, {self.path}, is corrupted; remove it to allow a new run of the experiment."
            ) from error
        if run != self.run:
            raise ConfigError(
                f"This site has opened masked sums in run {run[:16]} of this experiment. Compared with sums of a second run "
                f"they could reveal the update of one site. To allow a second run, remove {self.path} at the site."
            )
        return clients if newest == round else ()

    def check(self, round: int, clients: tuple[int, ...]) -> None:
        """Validate that no different sum of the round was opened before.

        Args:
            round: Number of the round, from 0.
            clients: Clients in the sum.

        Raises:
            SumAlreadyOpenedError: If another sum of this round was opened.
        """
        before = self.opened(round)
        if before and before != clients:
            raise SumAlreadyOpenedError(
                f"this site has already opened the sum of clients {', '.join(map(str, before))} in round {round + 1}; the "
                "difference from another sum could reveal the update of one site"
            )

    def record(self, round: int, clients: tuple[int, ...]) -> None:
        """Store on disk that a sum is being opened; call this before the first share leaves the site.

        Args:
            round: Number of the round, from 0.
            clients: Clients in the sum.

        Raises:
            SumAlreadyOpenedError: If another sum of this round was opened.
        """
        self.check(round, clients)
        make_folder(self.path.parent)
        self.path.parent.chmod(0o700)
        write_atomic(self.path, json.dumps({"run": self.run, "round": round, "clients": clients}).encode())
