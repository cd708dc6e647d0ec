"""Record on a site's disk of what its data set was used for, which prevents sums and noise that could be compared."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from unskew.deployment.site.state import SiteStateLostError
from unskew.errors import ConfigError
from unskew.filesystem import make_folder
from unskew.json_models import JsonModel, read_model, write_model

FILE = "ledger.json"
"""File in the folder of a site's states."""
Round = Annotated[int, Field(ge=-1, lt=1 << 62)]
Clients = tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]


class SumAlreadyOpenedError(SiteStateLostError):
    """Another sum from the same model was opened, so this site does not take part in the requested one."""


class RunRecord(JsonModel):
    """Record of one run."""

    round: Round = -1
    """Newest round whose sum was opened; -1 before the first."""
    clients: Clients = ()
    """Clients of that sum."""
    opened: Annotated[int, Field(ge=0)] = 0
    """Number of rounds whose sums were opened."""


class Records(JsonModel):
    """Content of the file."""

    runs: dict[str, RunRecord] = Field(default_factory=dict)
    """Runs that used the data, by identifier."""
    models: dict[str, Clients] = Field(default_factory=dict)
    """Clients of each opened sum, by the digest of the model from which they trained."""
    sums: Clients = ()
    """Clients of all opened sums of statistics."""
    fitted: dict[str, str] = Field(default_factory=dict)
    """Digest of the request with which a task is fitted, by the experiment's digest and the kind of the sum."""


@dataclass(frozen=True)
class DataLedger:
    """Record of the masked sums that a site has helped to unmask (opened), and of the runs with privacy noise.

    The difference of two sums over different sites, from the same model, can be the update of a single site. Training is
    deterministic, so this also holds for sums of two runs, and of two experiments whose updates are equal. The noise of two
    runs can be averaged. Therefore the record belongs to the site's data set: it covers all its runs and experiments, of
    which the site's administrator sets the largest number.

    Attributes:
        path: File of the record.
        run: Identifier of the current run.
        max_runs: Largest number of runs that may use the data.
    """

    path: Path
    run: str
    max_runs: int = 1

    def _read(self) -> Records:
        if not os.path.lexists(self.path):
            return Records()
        remedy = "Restore it from a backup. Without it, sums over this site's data could be compared with earlier ones."
        return read_model(self.path, Records, remedy)

    def _admitted(self) -> Records:
        """Return the record after validating that the current run may use the data."""
        records = self._read()
        if self.run not in records.runs and len(records.runs) >= self.max_runs:
            others = ", ".join(sorted(run[:16] for run in records.runs))
            raise ConfigError(
                f"This site's data were used in {len(records.runs)} private or masked run(s) ({others}). The difference of "
                "sums of two runs could reveal what one site has sent, and the privacy losses add up. To allow another "
                f"run, set max_runs: {len(records.runs) + 1} in site.yaml at the site, and restart its process."
            )
        return records

    def admit(self) -> None:
        """Validate that the current run may use the data.

        Raises:
            ConfigError: If other runs have used them, or the file is corrupted.
        """
        self._admitted()

    def begin(self) -> None:
        """Store that the current run uses the data; call this before anything that depends on them leaves the site."""
        records = self._admitted()
        if self.run not in records.runs:
            self._write(records, RunRecord())

    def opened(self, round: int) -> tuple[int, ...]:
        """Return the clients whose sum was opened in this round of the run, or an empty tuple.

        Args:
            round: Number of the round, from 0.
        """
        record = self._admitted().runs.get(self.run)
        return record.clients if record is not None and record.round == round else ()

    def num_opened(self) -> int:
        """Return the number of rounds of the run whose sums were opened."""
        record = self._read().runs.get(self.run)
        return 0 if record is None else record.opened

    def check(self, round: int, clients: tuple[int, ...], model: str) -> None:
        """Validate that no sum was opened that could be compared with this one.

        Args:
            round: Number of the round, from 0.
            clients: Clients in the sum.
            model: Digest of the model from which they trained.

        Raises:
            SumAlreadyOpenedError: If another sum of this round, or from the same model, was opened.
        """
        self._check(self._admitted(), round, clients, model)

    def _check(self, records: Records, round: int, clients: tuple[int, ...], model: str) -> None:
        record = records.runs.get(self.run)
        same_round = record.clients if record is not None and record.round == round else ()
        for before in (same_round, records.models.get(model, ())):
            if before and before != clients:
                raise SumAlreadyOpenedError(
                    f"this site has already opened the sum of clients {', '.join(map(str, before))} in round {round + 1} or "
                    "from the same model; the difference from another sum could reveal the update of one site"
                )

    def record(self, round: int, clients: tuple[int, ...], model: str) -> None:
        """Store on disk that a sum is being opened; call this before the first share leaves the site.

        Args:
            round: Number of the round, from 0.
            clients: Clients in the sum.
            model: Digest of the model from which they trained.

        Raises:
            SumAlreadyOpenedError: If another sum of this round, or from the same model, was opened.
        """
        records = self._admitted()
        self._check(records, round, clients, model)
        before = records.runs.get(self.run, RunRecord())
        count = before.opened + (round != before.round)
        self._write(
            records.model_copy(update={"models": {**records.models, model: clients}}),
            RunRecord(round=round, clients=clients, opened=count),
        )

    def _write(self, records: Records, current: RunRecord) -> None:
        self._store(records.model_copy(update={"runs": {**records.runs, self.run: current}}))

    def _store(self, records: Records) -> None:
        make_folder(self.path.parent)
        self.path.parent.chmod(0o700)
        write_model(self.path, records)


@dataclass(frozen=True)
class SumsLedger(DataLedger):
    """``DataLedger`` for federated sums: all sums of the data set are over the same clients.

    Two sums over different clients could reveal those of one site, also of requests that differ only in a constant.
    """

    def opened(self, round: int) -> tuple[int, ...]:
        """Return the clients whose sums were opened, or an empty tuple."""
        return self._read().sums

    def check(self, round: int, clients: tuple[int, ...], model: str) -> None:
        """Validate that no sum over other clients was opened.

        Args:
            round: Not used.
            clients: Clients in the sum.
            model: Not used.

        Raises:
            SumAlreadyOpenedError: If another one was opened.
        """
        before = self.opened(round)
        if before and before != clients:
            raise SumAlreadyOpenedError(
                f"this site has already opened statistics over clients {', '.join(map(str, before))}; the difference from a "
                "sum over others could reveal those of one site. The site's administrator can allow it with unskew deploy "
                "forget site.yaml"
            )

    def record(self, round: int, clients: tuple[int, ...], model: str) -> None:
        """Store on disk that a sum is being opened; call this before the first share leaves the site."""
        self.check(round, clients, model)
        records = self._read()
        self._store(records.model_copy(update={"sums": clients}))

    def fit_once(self, name: str, request: str) -> None:
        """Store the only request of a name to which the site replies; call this before the reply leaves the site.

        Args:
            name: Digest of the experiment, and kind of the sum.
            request: Digest of the request.

        Raises:
            ConfigError: If another one was stored.
        """
        records = self._read()
        before = records.fitted.get(name)
        if before not in (None, request):
            raise ConfigError(
                "This site has already counted its times for this experiment up to another time, and counts them on no "
                "other cells, because both together would reveal finer ones. Set survival.until in the experiment at all "
                "sites, which is then another experiment. Otherwise, the site's administrator can run unskew deploy forget "
                "site.yaml."
            )
        if before is None:
            self._store(records.model_copy(update={"fitted": {**records.fitted, name: request}}))

    def forget(self) -> None:
        """Forget the clients of opened sums of statistics, and the requests with which tasks were fitted."""
        if os.path.lexists(self.path):
            self._store(self._read().model_copy(update={"sums": (), "fitted": {}}))
