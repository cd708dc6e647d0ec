"""The updates of a round as they come in: their sums, single ones where a rule reads them, and what waits for more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.protocol.messages import ClientState, Tensors, Update, replace_fields
from unskew.protocol.rules import Method, ServerRule
from unskew.protocol.updates import Aggregate, Masks
from unskew.tasks.registry import TASKS

FIGURES = ("loss", "setup_seconds", "train_seconds")
"""Figures of updates of which a round shows the mean."""
TAKEN = {
    *("round", "accuracy", "bytes_up", "bytes_down", "seconds", "cohort", "updates", "skipped", "discarded"),
    *("train_loss", "in_flight", "lr", *FIGURES),
    *(figure for task in TASKS.values() for figure in (task.scored, *task.figures)),
}
"""Names of the core's own figures of a round."""


@dataclass
class CollectedUpdates:
    """Updates that a rule gets at once.

    Attributes:
        aggregate: Their sums.
        individual: They themselves, or None where no rule reads single ones.
        arrivals: Updates of the round that had arrived with the last of them.
    """

    aggregate: Aggregate
    individual: list[Update] | None
    arrivals: int = 0

    def add(self, update: Update, sent: Masks | None = None) -> None:
        """Add an update that contains the entries in ``sent`` (None: all).

        Args:
            update: Message from the client.
            sent: Masks of the entries that were sent; None: all.
        """
        self.aggregate.add(update, sent)
        if self.individual is not None:
            self.individual.append(update)

    def copy(self) -> CollectedUpdates:
        """The same, to which updates can be added without changing this one."""
        fresh = Aggregate(self.aggregate.single)
        sums = {name: t.clone() for name, t in self.aggregate.tensors().items()}
        fresh.restore(sums, self.aggregate.count, self.aggregate.weight, self.aggregate.examples)
        return CollectedUpdates(fresh, None if self.individual is None else list(self.individual))

    def tensors(self) -> Tensors:
        """All tensors, by name."""
        single = {
            f"{number}/{name}": t
            for number, update in enumerate(self.individual or ())
            for name, t in update.tensors().items()
        }
        return {**{f"sums/{name}": t for name, t in self.aggregate.tensors().items()}, **single}

    def about(self) -> dict[str, Any]:
        """Return the fields that are not tensors, as JSON values."""
        sums = self.aggregate
        single = [update.fields() for update in self.individual or ()]
        return {"count": sums.count, "weight": sums.weight, "examples": sums.examples, "updates": single}

    def restore(self, tensors: Tensors, about: dict[str, Any], device: torch.device) -> None:
        """Put back what ``tensors`` and ``about`` gave.

        Args:
            tensors: Stored tensors by name.
            about: Stored plain values.
            device: Device that computes.
        """
        parts: dict[str, Tensors] = {}
        for name, t in tensors.items():
            index, _, rest = name.partition("/")
            parts.setdefault(index, {})[rest] = t
        self.aggregate.restore(parts.get("sums", {}), about["count"], about["weight"], about["examples"])
        if self.individual is not None:
            self.individual[:] = [
                Update.of(fields, parts[str(number)], device) for number, fields in enumerate(about["updates"])
            ]


@dataclass
class UpdateBuffer:
    """Takes in the usable updates of a round, in order.

    Attributes:
        method, rule: Whose they are; ``rule`` is its server rule.
        meter: Entered while updates are added up.
        waiting: Updates of earlier rounds for which the server rule waits.
        whole: All of the round.
        complete: For the server rule: the whole round, or each full buffer.
        models: Weighted sum of the clients' whole models ``[d]``, where they were reported.
        taken: The updates with what stays at clients, but without what was sent.
    """

    method: Method
    rule: ServerRule
    meter: Callable[[], AbstractContextManager[None]]
    waiting: CollectedUpdates
    whole: CollectedUpdates = field(init=False)
    complete: list[CollectedUpdates] = field(default_factory=list)
    models: Tensor | None = None
    taken: list[Update] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FIGURES, 0.0))

    def __post_init__(self) -> None:
        single = any("individual" in rule.needs for rule in (self.rule, *self.method.client))
        self.whole = CollectedUpdates(Aggregate(rules_with_single_uploads(self.method)), [] if single else None)
        self.waiting = self.waiting.copy()

    def add(self, update: Update, sent: Masks | None = None) -> None:
        """Take in an update that contains the entries in ``sent`` (None: all).

        Args:
            update: Message from the client.
            sent: Masks of the entries that were sent; None: all.
        """
        with self.meter():
            self.whole.add(update, sent)
            if self.rule.buffer() is not None:
                self.waiting.add(replace_fields(update, state=ClientState()), sent)
        self.whole.arrivals = len(self.taken) + 1
        if self.waiting.aggregate.count == self.rule.buffer():
            self.complete.append(replace(self.waiting, arrivals=len(self.taken) + 1))
            self.waiting = empty_updates(self.method, self.rule)
        if "v" in update.report:
            weighted = update.report["v"] * update.weight
            self.models = weighted if self.models is None else self.models.add_(weighted)
        self.sums = {name: total + update.metrics.get(name, 0.0) for name, total in self.sums.items()}
        # What stays at the client is kept when the round is known to have succeeded; the rest is in the sums.
        none = torch.empty(0)
        self.taken.append(replace_fields(update, delta=none, upload={}, report={}, start=None, b_start=None, last=None))

    @property
    def unequal(self) -> bool:
        """Return whether summed updates contain different entries of the model."""
        return any(part.aggregate.entries is not None for part in (self.whole, self.waiting, *self.complete))

    def for_rule(self) -> list[CollectedUpdates]:
        """Yield the collected updates for the server rule, in turn."""
        if self.rule.buffer() is None and self.taken:
            return [self.whole]
        return self.complete or ([empty_updates(self.method, self.rule)] if self.rule.steps_without else [])


def rules_with_single_uploads(method: Method) -> frozenset[str]:
    """Client rules whose uploads are read one by one and not added up."""
    return frozenset(rule.name for rule in method.client if "individual" in rule.needs)


def empty_updates(method: Method, rule: ServerRule) -> CollectedUpdates:
    """No update yet.

    Args:
        method: Method of the run.
        rule: Server rule of the method.
    """
    return CollectedUpdates(Aggregate(rules_with_single_uploads(method)), [] if "individual" in rule.needs else None)


def check_state(by: str, state: object, v: Tensor, b: Tensor) -> None:
    """Refuse what is no state of a server.

    Args:
        by: The function that returned it.
        state: What it returned.
        v: A model as it must be, ``[d]``.
        b: Statistics as they must be, where there are any, ``[m]``.

    Raises:
        ConfigError: There is no model in it, or one of another shape or precision, or such statistics.
    """
    entries = state if isinstance(state, dict) else {}
    for name, title, like in (("v", "the model", v), ("b", "statistics", b)):
        new = entries.get(name)
        if name == "b" and new is None:
            continue
        if not isinstance(new, Tensor) or new.shape != like.shape or new.dtype != like.dtype:
            what = f"{new.dtype} {tuple(new.shape)}" if isinstance(new, Tensor) else "none"
            raise ConfigError(
                f"{by} must return a dictionary of tensors with {title} {name!r}, {like.dtype} {tuple(like.shape)}; "
                f"there is {what}."
            )


def rule_metrics(rule: ServerRule, state: Tensors) -> dict[str, Any]:
    """The method's own figures of a round.

    Args:
        rule: Server rule of the method.
        state: Its state.

    Raises:
        ConfigError: A metric of the rule has the name of a metric of every run.
    """
    figures = rule.metrics(state)
    taken = sorted(TAKEN & figures.keys())
    if taken:
        better = f"{rule.name}_{taken[0]}"
        raise ConfigError(f"{rule.name}.metrics gives {taken[0]!r}, which every run measures; call it {better}.")
    return figures
