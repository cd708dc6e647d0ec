"""Reference rows of a comparison, without federated learning: all data in one place, or each client alone.

``pooled`` trains one model on the union of the clients' training data, with the run's optimizer and learning rate. The
number of steps per round is chosen so that it processes the same number of samples as FedAvg's cohort. It is evaluated like
every method: on the test set and on the clients' held-out samples.

``local`` trains one model per client, from the same initial model, in the rounds in which the client takes part, with the
same local budget. Nothing is exchanged, and there is no global model. Each client is evaluated with its own model on its
held-out samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.data.federation import ArrayClients, concatenate_inputs
from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.data_preparation import PreparedData, Workspace
from unskew.protocol.rules import DataRule, Method, Slices, SyncRule, Tensors
from unskew.protocol.run_context import PreRunContext
from unskew.protocol.training_config import Training

LARGEST = 4_000_000_000
"""Maximum size in bytes of the models of all clients under ``local``, which stores each of them."""


def without_exchange(name: str, whole: Method) -> str | None:
    """Explain that a reference cannot be combined; None for the reference itself.

    Args:
        name: Name of the reference.
        whole: Composition that contains it.
    """
    return f"{name} is a reference and cannot be combined with other methods." if len(whole.rules) > 1 else None


@dataclass(frozen=True)
class Pooled(DataRule):
    """Centralized training on the union of the clients' training samples.

    Attributes:
        participation: Share of clients per round in the comparison, which determines the samples per round.
    """

    name: ClassVar[str] = "pooled"
    summary: ClassVar[str] = "reference: centralized training on the data of all clients"
    paper: ClassVar[str] = ""

    simulated_only = "pooled needs the data of all clients, which sites do not share. Simulate it instead."

    participation: Annotated[float, Field(gt=0, le=1)] = 1.0

    def conflict_with(self, method: Method) -> str | None:
        """Reject all other methods."""
        return without_exchange(self.name, method)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the clients' data can be pooled.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If clients are loaded one by one, or the learning rate schedule counts steps.
        """
        if not isinstance(run.federation.clients, ArrayClients):
            raise ConfigError(
                "pooled needs the data of all clients in memory, but these clients are loaded one by one."
            )
        if run.training.scheduled and run.training.lr_schedule_per == "step":
            raise ConfigError(
                "pooled takes more steps per round, so lr_schedule must count rounds (lr_schedule_per=round)."
            )
        return ()

    def client_payload(self, prepared: PreparedData, seed: int, workspace: Workspace) -> PreparedData:
        """Replace all clients by one that has their training data."""
        federation, sizes = prepared.federation, prepared.federation.sizes.tolist()
        clients = list(federation.clients)
        x, y = concatenate_inputs([c.x for c in clients]), torch.cat([c.y for c in clients])
        everything = ArrayClients(x, y, np.array([0, len(y)]), np.array([len(y)]))
        pooled = replace(federation, clients=everything, client_names=(), text_groups=None, stats_traffic=None)
        steps = steps_per_round(prepared.training, sizes, self.participation)
        training = replace(prepared.training, local_steps=steps, local_epochs=None)
        return replace(prepared, federation=pooled, training=training)


def steps_per_round(training: Training, sizes: Sequence[int], participation: float) -> int:
    """Compute the number of steps on the union that process the same number of samples as an average cohort.

    Args:
        training: Local training budget of clients.
        sizes: Number of training samples of each client.
        participation: Share of clients per round.

    Returns:
        The number of steps, at least 1.

    >>> steps_per_round(Training(local_steps=None, local_epochs=5, batch_size=10), [20, 40], 1.0)
    30
    """
    samples = 0
    for client, size in enumerate(sizes):
        lengths = [cut.stop - cut.start for cut in training.cuts(size)]
        full_passes, rest = divmod(training.steps(size, client), len(lengths))
        samples += full_passes * sum(lengths) + sum(lengths[:rest])
    cohort = max(1, round(participation * len(sizes)))
    union = [cut.stop - cut.start for cut in training.cuts(sum(sizes))]
    return int(max(1, round(samples * cohort / len(sizes) * len(union) / sum(union))))


@dataclass(frozen=True)
class Local(SyncRule):
    """Training of each client alone, without any exchange."""

    name: ClassVar[str] = "local"
    summary: ClassVar[str] = "reference: each client trains alone"
    paper: ClassVar[str] = ""
    trains_global_model: ClassVar[bool] = False
    supports_several_models: ClassVar[bool] = True

    def conflict_with(self, method: Method) -> str | None:
        """Reject all other methods."""
        return without_exchange(self.name, method)

    def check(self, run: PreRunContext) -> Sequence[str]:
        """Validate that the models of all clients can be stored.

        Args:
            run: Run to check, with its configuration, federation and model.

        Raises:
            ConfigError: If the models are too large, or updates are delayed.
        """
        needed = run.spec.dtype.itemsize * run.spec.largest_size * len(run.federation.clients)
        if needed > LARGEST:
            raise ConfigError(
                f"local stores a model for each client, which needs {needed / 1e9:.0f} GB here. Use fewer clients or a "
                "smaller model."
            )
        return super().check(run)

    def local_slices(self, spec: ModelSpec) -> Slices:
        """Return the whole model."""
        return (slice(0, spec.size),)

    def exchanged_slices(
        self, state: Tensors, round: int, client: int, last: int | None, spec: ModelSpec
    ) -> tuple[Slices, Slices]:
        """Exchange nothing."""
        return (), ()
