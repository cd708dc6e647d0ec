"""Fixed parts of a server, and the state that its rounds change."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors, flatten_records
from unskew.protocol.rules import ClientRule, Method, ServerRule
from unskew.protocol.server_training import ServerTraining
from unskew.protocol.training_config import Buffers
from unskew.secret_draws import NoiseSource
from unskew.simulation.update_buffer import CollectedUpdates, check_state, empty_updates


@dataclass(frozen=True)
class ServerSetup:
    """Fixed parts of a server, known from the start of a run.

    Attributes:
        method: Method of the run.
        rule: Server rule of the method, or the default one.
        spec: Layout of the model, with the initial weights.
        federation_info: Server's information about the federation, with the client weighting.
        buffers: Treatment of normalization buffers, see ``Buffers``.
        seed: Seed of the run.
        server_training: Resources for training at the server; None if no rule needs them.
        noise: Source of the server's noise; None derives it from the seed.
    """

    method: Method
    rule: ServerRule
    spec: ModelSpec
    federation_info: FederationInfo
    buffers: Buffers = "average"
    seed: int = 0
    server_training: ServerTraining | None = None
    noise: NoiseSource | None = None

    @cached_property
    def needs(self) -> frozenset[str]:
        """Requirements of the rules, see ``unskew.protocol.requirements``."""
        return frozenset(what for part in (self.rule, *self.method.rules) for what in part.needs)

    @cached_property
    def sums_suffice(self) -> bool:
        """Whether a round is determined by the sums of its updates, so that an engine need not return single ones."""
        method = self.method
        single = {"individual", "last_update", "sent_model", "sent_statistics", "mean_model", "optimizer"}
        parts = method.sync is not None or method.aggregate is not None or any(rule.encodes for rule in method.client)
        return not (parts or self.needs & single or self.buffers == "local" or self.rule.updates_per_step is not None)

    @cached_property
    def compressor(self) -> ClientRule | None:
        """Client rule that compresses the broadcast model, or None."""
        return next((rule for rule in self.method.client if rule.compresses_broadcast), None)

    def with_broadcast_model(self, rules: dict[str, Tensors], v: Tensor) -> dict[str, Tensors]:
        """Add the model that clients have before the first broadcast, if a rule compresses broadcasts and has none.

        Args:
            rules: Server state of the rules, by name.
            v: Initial model, ``[d]``.
        """
        name = None if self.compressor is None else self.compressor.name
        if name is None or "broadcast_model" in rules[name]:
            return rules
        nothing_sent = {"broadcast_model": v, "broadcast_bytes": torch.zeros(0, dtype=torch.int64)}
        return {**rules, name: {**rules[name], **nothing_sent}}


class ServerState:
    """Global model and state of the rules at the server.

    Args:
        setup: Fixed parts of the server.

    Attributes:
        server_rule: State of the server rule; its entry ``"v"`` is the model.
        rules: Server state of the other rules, by name.
        b: Normalization buffers of the global model, ``[m]``.
        waiting: Updates in the server rule's buffer.
        version: Number of updates applied so far.
        changed: Whether the model has changed since this object was created or restored.
    """

    def __init__(self, setup: ServerSetup):
        v, self.b = setup.spec.flatten(), setup.spec.flatten_buffers()
        self.server_rule = setup.rule.init(v, setup.federation_info)
        check_state(f"{setup.rule.name}.init", self.server_rule, v, self.b)
        rules = {half.name: half.server_init(self.v, setup.federation_info) for half in setup.method.halves}
        self.rules = setup.with_broadcast_model(rules, self.v)
        self.waiting = empty_updates(setup.method, setup.rule)
        self.version = 0
        self.changed = False

    @property
    def v(self) -> Tensor:
        """Global model, ``[d]``."""
        return self.server_rule["v"]

    def tensors(self) -> Tensors:
        """Return all tensors, by name."""
        waiting = {f"waiting/{name}": t for name, t in self.waiting.tensors().items()}
        return {**state_tensors(self.server_rule, self.rules, self.b), **waiting}

    def set_rules(self, rules: dict[str, Tensors]) -> None:
        """Replace the server state of rules other than the server rule.

        Args:
            rules: New state by name; other rules keep theirs.
        """
        self.rules = {**self.rules, **rules}

    def apply(
        self, server_rule: Tensors, rules: dict[str, Tensors], b: Tensor, waiting: CollectedUpdates, num_updates: int
    ) -> None:
        """Replace the model and the state of the rules after a round.

        Args:
            server_rule: New state of the server rule.
            rules: New server state of the other rules, by name.
            b: New buffers, ``[m]``.
            waiting: New content of the server rule's buffer.
            num_updates: Number of updates applied in the round.
        """
        self.changed = self.changed or not torch.equal(server_rule["v"], self.v)
        self.server_rule, self.rules = server_rule, rules
        self.b = b
        self.waiting = waiting
        self.version += num_updates

    def restore(self, server_rule: Tensors, rules: dict[str, Tensors], b: Tensor, version: int = 0) -> None:
        """Restore the model and the state of the rules.

        Args:
            server_rule: State of the server rule.
            rules: Server state of the other rules, by name.
            b: Buffers, ``[m]``.
            version: Number of updates applied so far.
        """
        self.server_rule, self.rules = server_rule, rules
        self.b = b
        self.version = version


def state_tensors(server_rule: Tensors, rules: dict[str, Tensors], b: Tensor) -> Tensors:
    """Return the model and the state of the rules under names that cannot clash.

    Args:
        server_rule: State of the server rule.
        rules: Server state of the other rules.
        b: Buffers of the model, ``[m]``.
    """
    return {"b": b, **{f"state/{name}": t for name, t in server_rule.items()}, **flatten_records("rules", rules)}
