"""Method: the rules in each of the five slots."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from unskew.protocol.aggregate_rule import AggregateRule
from unskew.protocol.client_rule import ClientRule
from unskew.protocol.data_rule import DataRule
from unskew.protocol.federation_info import Weights
from unskew.protocol.rule import Rule, WithServerHalf
from unskew.protocol.server_rule import ServerRule
from unskew.protocol.sync_rule import SyncRule


@dataclass(frozen=True)
class Method:
    """Federated method: the rules in each of the five slots."""

    name: str
    data: tuple[DataRule, ...] = ()
    client: tuple[ClientRule, ...] = ()
    sync: SyncRule | None = None
    aggregate: AggregateRule | None = None
    server: ServerRule | None = None
    weights: Weights | None = None
    expression: str = field(default="")

    @property
    def halves(self) -> tuple[WithServerHalf, ...]:
        """Rules that may have state at the server besides the server rule."""
        others: list[WithServerHalf] = [part for part in (self.sync, self.aggregate) if part is not None]
        return (*self.client, *(part for part in others if not any(part is rule for rule in self.client)))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules of the method, each once."""
        filled = [*self.data, *self.client, *filter(None, (self.sync, self.aggregate, self.server))]
        return tuple(rule for index, rule in enumerate(filled) if not any(rule is other for other in filled[:index]))

    def needs(self, what: str) -> bool:
        """Return whether some rule needs ``what``."""
        return any(what in rule.needs for rule in self.rules)


SLOTS: dict[str, type[Rule]] = {
    "data": DataRule,
    "client": ClientRule,
    "sync": SyncRule,
    "aggregate": AggregateRule,
    "server": ServerRule,
}
"""Base class of the rules of each slot, in the order in which slots are listed."""


def class_slots(cls: type[Rule]) -> list[str]:
    """Return the slots of a rule's base classes.

    Args:
        cls: Class of the rule.
    """
    return [slot for slot, base in SLOTS.items() if issubclass(cls, base)]


def method_of_rule(rule: Rule) -> Method:
    """Return the method that consists of one rule.

    Args:
        rule: The rule; it fills all of its slots.
    """
    filled: dict[str, Any] = dict(dict.fromkeys(class_slots(type(rule)), rule) if rule.slots is None else rule.slots)
    for slot in {"data", "client"} & filled.keys():
        filled[slot] = (filled[slot],)
    return Method(name=rule.name, weights=rule.weights, **filled)
