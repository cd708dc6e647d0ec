"""Updates of a round as they arrive: sums, single updates for rules that need them, and the server rule's buffer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.messages import EVALUATED, ClientState, SummedUpdate, Tensors, Update, replace_fields
from unskew.protocol.rules import Method, Rule, ServerRule
from unskew.protocol.updates import Aggregate, Combined, Masks
from unskew.tasks.registry import TASKS

AnyUpdate = TypeVar("AnyUpdate", Update, SummedUpdate)
AVERAGED_METRICS = ("loss", "setup_seconds", "train_seconds")
"""Metrics of updates that are averaged over a round."""
RESERVED_METRICS = {
    *("round", "accuracy", "bytes_up", "bytes_down", "seconds", "cohort", "updates", "skipped", "discarded"),
    *("train_loss", "in_flight", "lr", "seconds_simulated", "late", *AVERAGED_METRICS),
    *(metric for task in TASKS.values() for metric in (task.scored, *task.extra_metrics)),
}
"""Names of round metrics that are reserved for the core."""


@dataclass
class CollectedUpdates:
    """Updates that a rule receives together.

    Attributes:
        aggregate: Their sums.
        individual: Single updates, or None if no rule reads them.
        arrivals: Number of updates that had arrived in the round with the last of them.
    """

    aggregate: Aggregate
    individual: list[Update] | None
    arrivals: int = 0

    def add(self, update: Update | SummedUpdate, sent: Masks | None = None) -> None:
        """Add an update, or a sum of updates.

        Args:
            update: Update of a client, or a sum; a method that reads single updates cannot run with sums.
            sent: Masks of the entries that were sent; None for all.
        """
        self.aggregate.add(update, sent)
        if self.individual is not None and isinstance(update, Update):
            self.individual.append(update)

    def copy(self) -> CollectedUpdates:
        """Return a copy to which updates can be added without changing this one."""
        fresh = Aggregate(self.aggregate.single)
        sums = {name: t.clone() for name, t in self.aggregate.tensors().items()}
        fresh.restore(sums, self.aggregate.count, self.aggregate.weight, self.aggregate.num_samples)
        return CollectedUpdates(fresh, None if self.individual is None else list(self.individual))

    def tensors(self) -> Tensors:
        """Return all tensors, by name."""
        single = {
            f"{number}/{name}": t
            for number, update in enumerate(self.individual or ())
            for name, t in update.tensors().items()
        }
        return {**{f"sums/{name}": t for name, t in self.aggregate.tensors().items()}, **single}

    def fields(self) -> dict[str, Any]:
        """Return the fields that are not tensors, as JSON values."""
        sums = self.aggregate
        single = [update.fields() for update in self.individual or ()]
        return {"count": sums.count, "weight": sums.weight, "num_samples": sums.num_samples, "updates": single}

    def restore(self, tensors: Tensors, stored: dict[str, Any], device: torch.device) -> None:
        """Restore the output of ``tensors`` and ``fields``.

        Args:
            tensors: Stored tensors by name.
            stored: Stored fields.
            device: Device of the updates.
        """
        parts: dict[str, Tensors] = {}
        for name, t in tensors.items():
            index, _, rest = name.partition("/")
            parts.setdefault(index, {})[rest] = t
        self.aggregate.restore(parts.get("sums", {}), stored["count"], stored["weight"], stored["num_samples"])
        if self.individual is not None:
            self.individual[:] = [
                Update.of(fields, parts[str(number)], device) for number, fields in enumerate(stored["updates"])
            ]


class AcceptedUpdate(NamedTuple):
    """Values that the server stores about a client once the round of its update has succeeded.

    Attributes:
        client: Client number.
        round: Round of the broadcast that the client trained from.
        state: State that stays at the client; None if it is unchanged, or stored with those of other clients.
        file: Path and SHA-256 of the file that contains the state, if it is not in memory.
    """

    client: int
    round: int
    state: ClientState | None = None
    file: tuple[str, str] | None = None


@dataclass
class UpdateBuffer:
    """Collects the usable updates of a round, in order.

    Attributes:
        method: Method of the run.
        rule: Server rule.
        meter: Context manager around the summation of updates.
        waiting: Updates of earlier rounds in the server rule's buffer.
        round_updates: All updates of the round.
        complete: Full buffers for the server rule.
        models: Weighted sum of the clients' whole models ``[d]``, if they were reported.
        accepted: Values to store about the clients of the updates.
        sums: Sums of updates, with the states of their clients.
        metrics: Sums of the metrics of the updates, by name.
    """

    method: Method
    rule: ServerRule
    meter: Callable[[], AbstractContextManager[None]]
    waiting: CollectedUpdates
    round_updates: CollectedUpdates = field(init=False)
    complete: list[CollectedUpdates] = field(default_factory=list)
    models: Tensor | None = None
    accepted: list[AcceptedUpdate] = field(default_factory=list)
    sums: list[SummedUpdate] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=lambda: dict.fromkeys(AVERAGED_METRICS, 0.0))

    def __post_init__(self) -> None:
        single = any("individual" in rule.needs for rule in (self.rule, *self.method.halves))
        self.round_updates = CollectedUpdates(Aggregate(rules_with_single_uploads(self.method)), [] if single else None)
        self.waiting = self.waiting.copy()

    def add(self, update: AnyUpdate, sent: Masks | None = None, **fields: Any) -> AnyUpdate:
        """Add an update, or a sum, and return it as rules see it: without the client's state, which a failed round discards.

        Args:
            update: Message from the client.
            sent: Masks of the entries that were sent; None for all.
            **fields: Fields that the server adds.
        """
        scale = 1.0
        if isinstance(update, Update):
            scale = update.weight
            self.accepted.append(AcceptedUpdate(update.client, update.origin_round, update.state, update.state_file))
            fields |= {"state": ClientState(), "state_file": None}
        else:
            self.accepted += [AcceptedUpdate(client, update.origin_round) for client in update.clients]
            self.sums.append(update)
        update = replace_fields(update, **fields)
        with self.meter():
            self.round_updates.add(update, sent)
            if self.rule.updates_per_step is not None:
                self.waiting.add(update, sent)
        self.round_updates.arrivals = len(self.accepted)
        if self.waiting.aggregate.count == self.rule.updates_per_step:
            self.complete.append(replace(self.waiting, arrivals=len(self.accepted)))
            self.waiting = empty_updates(self.method, self.rule)
        if "v" in update.report:
            weighted = update.report["v"] * scale
            self.models = weighted if self.models is None else self.models.add_(weighted)
        self.metrics = {name: total + update.metrics.get(name, 0.0) for name, total in self.metrics.items()}
        return update

    @property
    def unequal(self) -> bool:
        """Return whether summed updates contain different entries of the model."""
        return any(part.aggregate.entries is not None for part in (self.round_updates, self.waiting, *self.complete))

    def for_rule(self) -> list[CollectedUpdates]:
        """Return the collected updates for the server rule: the whole round, or each full buffer."""
        empty = self.method.aggregate is not None and self.method.aggregate.combines_empty
        if self.rule.updates_per_step is None and (self.accepted or empty):
            return [self.round_updates]
        return self.complete or ([empty_updates(self.method, self.rule)] if self.rule.steps_without else [])


def rules_with_single_uploads(method: Method) -> frozenset[str]:
    """Return the client rules whose uploads are read individually and not summed."""
    return frozenset(rule.name for rule in method.client if "individual" in rule.needs)


def empty_updates(method: Method, rule: ServerRule) -> CollectedUpdates:
    """Create an empty collection of updates.

    Args:
        method: Method of the run.
        rule: Server rule of the method.
    """
    readers = (rule, *filter(None, [method.aggregate]))
    single = any("individual" in reader.needs for reader in readers)
    return CollectedUpdates(Aggregate(rules_with_single_uploads(method)), [] if single else None)


def check_combined(name: str, combined: Combined, v: Tensor, b: Tensor) -> None:
    """Validate what a rule of the aggregate slot returned.

    Args:
        name: Name of the rule.
        combined: Combined update.
        v: Model with the expected shape and data type, ``[d]``.
        b: Buffers with the expected shape and data type, ``[m]``.

    Raises:
        ConfigError: If the update or the buffers have another shape or data type.
    """
    for what, value, like in (("an update", combined.delta, v), ("buffers", combined.buffers, b)):
        if value is None and like is b:
            continue
        if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
            raise ConfigError(f"{name}.combine must return {what} as a tensor, {like.dtype} {tuple(like.shape)}.")


def check_state(by: str, state: object, v: Tensor, b: Tensor) -> None:
    """Validate the state of a server rule.

    Args:
        by: Name of the function that returned the state.
        state: Returned value.
        v: Model with the expected shape and data type, ``[d]``.
        b: Buffers with the expected shape and data type, ``[m]``.

    Raises:
        ConfigError: If the state has no model, or a reserved entry has another shape or data type.
    """
    entries = state if isinstance(state, dict) else {}
    for name, title, like in (("v", "the model", v), ("b", "statistics", b), (EVALUATED, "the evaluated model", v)):
        new = entries.get(name)
        if name != "v" and new is None:
            continue
        if not isinstance(new, Tensor) or new.shape != like.shape or new.dtype != like.dtype:
            what = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else "none"
            raise ConfigError(
                f"{by} must return a dictionary of tensors with {title} {name!r}, {like.dtype} {tuple(like.shape)}; "
                f"there is {what}."
            )


def rule_metrics(rule: Rule, state: Tensors, round: int, spec: ModelSpec) -> dict[str, Any]:
    """Return the round metrics of a rule.

    Args:
        rule: Rule of the method.
        state: State of the rule at the server.
        round: Number of the round, from 0.
        spec: Layout of the model.

    Raises:
        ConfigError: If a metric of the rule has a reserved name.
    """
    metrics = rule.metrics(state, round, spec)
    taken = sorted(RESERVED_METRICS & metrics.keys())
    if taken:
        better = f"{rule.name}_{taken[0]}"
        raise ConfigError(f"{rule.name}.metrics gives {taken[0]!r}, which every run measures. Rename it to {better}.")
    return metrics
