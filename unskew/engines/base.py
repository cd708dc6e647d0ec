"""Interface of engines, which train the clients of a cohort and give the same results on every engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from unskew.data.federation import Federation
from unskew.engines.batches import BatchPlan
from unskew.models.grouped.context import MappedModel, group_form, trains_alone
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import Broadcast, Tensors, Update
from unskew.protocol.round_plan import RoundPlan
from unskew.protocol.rules import ClientRule, most_final_steps
from unskew.protocol.training_config import Buffers, Training
from unskew.secret_draws import SecretKey
from unskew.seeding import generator
from unskew.tasks.base import Task


def ignore_count(count: float) -> None:
    """Ignore a number."""


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine needs to train the clients of a run.

    Attributes:
        spec: Layout of the model.
        federation: Data of all clients.
        rules: Client rules, in order.
        task: Task that defines loss and probabilities.
        training: Budget of the clients.
        seed: Seed of the run.
        device: Device of the model.
        buffers: Whether normalization buffers are averaged, stay at the client, or are reset in every round.
        common: Tensors that each rule sent to every client before the first round.
        stall_warning_seconds: Warn through ``warn`` after this many seconds without a reply from any worker.
        warn: Called with warnings for the user.
        retried: Called with the number of clients that are trained again because a worker or a node died.
        waited: Called with the seconds that the run waited for others, with which it is trained together.
        plan: Schedule of the run.
        keeps_encoded: Whether updates keep their encoded streams, which a site sends.
        graphs: Whether ``vectorized`` records steps as CUDA graphs.
        sums: Whether the server needs only sums of updates, so that ``vectorized`` may return them instead of single ones.
        secret: Secret key of Poisson batches and private noise; None draws them from the seed.
    """

    spec: ModelSpec
    federation: Federation
    rules: tuple[ClientRule, ...]
    task: Task
    training: Training
    seed: int
    device: torch.device
    buffers: Buffers = "average"
    common: dict[str, Tensors] = field(default_factory=dict)
    stall_warning_seconds: float = 600.0
    warn: Callable[[str], None] = warnings.warn
    retried: Callable[[int], None] = ignore_count
    waited: Callable[[float], None] = ignore_count
    plan: RoundPlan = field(default_factory=RoundPlan)
    keeps_encoded: bool = False
    graphs: bool = True
    sums: bool = False
    secret: SecretKey | None = None

    def without_callbacks(self) -> EngineConfig:
        """Return it for another process or machine: what it would call there belongs to this one."""
        initial = {f.name: f.default for f in fields(self) if callable(f.default) and f.default is not MISSING}
        return replace(self, **initial)

    def run_of(self, client: int) -> int:
        """Return the index of the run of a client, if several are trained together."""
        return 0

    def origin(self, broadcast: Broadcast) -> tuple[EngineConfig, Broadcast]:
        """Return the configuration of a client's run, and the broadcast with the client's number in that run."""
        return self, broadcast

    @property
    def trains_alone(self) -> bool:
        """True if clients are trained one at a time: a rule or the model needs it, or the clients' architectures differ."""
        return bool(self.spec.others) or trains_alone(self.spec) or any(rule.trains_alone for rule in self.rules)

    def group_form(self, check: bool = True) -> MappedModel | None:
        """Return the form in which several clients are trained at once on a CPU; None if they are trained one at a time.

        Args:
            check: Whether to validate a grouped network, which is not needed for timing.
        """
        return None if self.trains_alone else group_form(self.spec, check)

    @property
    def validation(self) -> float:
        """Share of a client's training samples that its batches omit: the largest one that a rule needs."""
        return max((rule.validation for rule in self.rules), default=0.0)

    def num_trained(self, num_samples: int) -> int:
        """Return how many of a client's samples its batches contain: all but the validation samples, at least one.

        Args:
            num_samples: Number of samples of the client.
        """
        if not self.validation:
            return num_samples
        return max(min(num_samples, 1), num_samples - max(1, round(self.validation * num_samples)))

    def split_samples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the indices of a client's samples in its batches, and of its validation samples, both ascending.

        Args:
            client: Client number.
        """
        draws = generator(self.seed, "validation samples", client=client)
        num_samples = self.federation.num_samples(client)
        order, trained = torch.randperm(num_samples, generator=draws), self.num_trained(num_samples)
        return order[:trained].sort().values, order[trained:].sort().values

    def batch_plan(self, round: int, client: int) -> BatchPlan:
        """Draw the batches of a client in a round, or in the training after the last round.

        Args:
            round: Number of the round, from 0.
            client: Client number.
        """
        poisson = any(rule.poisson_batches for rule in self.rules)
        secret = self.secret if poisson else None
        trained = self.num_trained(self.federation.num_samples(client))
        plan = BatchPlan(self.training, trained, self.seed, round, client, poisson, secret)
        if self.validation:
            rows, _ = self.split_samples(client)
            plan.batches = [rows[index] for index in plan.batches]
        if round >= self.plan.rounds:
            plan.batches = plan.batches[: most_final_steps(self.rules)]
        return plan


class Engine(Protocol):
    """Runs the local training of a cohort."""

    name: str

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train each client from its broadcast; yield the updates in the order of ``broadcasts``."""

    def close(self) -> None:
        """Release processes and memory."""
