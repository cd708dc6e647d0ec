"""Aggregation of a round's updates into the next model: collect, combine, step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unskew.errors import ConfigError
from unskew.protocol.messages import EVALUATED, SummedUpdate, Tensors, Update, finite_flags
from unskew.protocol.rules import Rule
from unskew.protocol.updates import CombinedUpdate, Updates
from unskew.secret_draws import NoiseSource
from unskew.seeding import derive
from unskew.simulation.broadcaster import Broadcaster
from unskew.simulation.model_selection import ModelSelection
from unskew.simulation.server_state import state_tensors
from unskew.simulation.update_buffer import (
    CollectedUpdates,
    UpdateBuffer,
    check_combined,
    check_state,
    rule_metrics,
)


@dataclass
class SkippedUpdates:
    """Updates that were skipped because they, or the model after them, were not finite.

    Attributes:
        total: Number of skipped updates so far.
        clients: Clients whose updates were skipped in the last round.
        overflows: Number of rounds so far whose server step gave values that are not finite.
        overflowed: Whether the last round is one of them.
    """

    total: int = 0
    clients: list[int] = field(default_factory=list)
    overflows: int = 0
    overflowed: bool = False

    def count(self, clients: list[int], overflowed: bool = False) -> None:
        """Count the skipped updates of a round.

        Args:
            clients: Clients whose updates are skipped.
            overflowed: Whether the server step gave values that are not finite.
        """
        self.total += len(clients)
        self.clients, self.overflowed = clients, overflowed
        self.overflows += overflowed


class Aggregator:
    """Applies the updates of a round to the model and the state of the rules.

    Args:
        broadcaster: Sends the model that the clients train from.
        selection: Model that is evaluated.

    Attributes:
        skipped: Updates that were skipped.
        meter: Returns a context manager for computations of the server, such as one that counts their operations.
    """

    def __init__(self, broadcaster: Broadcaster, selection: ModelSelection):
        self.setup = broadcaster.setup
        self.state = broadcaster.state
        self.clients = broadcaster.clients
        self.broadcaster = broadcaster
        self.selection = selection
        self.skipped = SkippedUpdates()
        self._noise = self.setup.noise or NoiseSource(self.setup.seed)
        self.meter: Callable[[], AbstractContextManager[None]] = nullcontext
        self._watchers: list[Callable[[Update], None]] = []

    def watch(self, watcher: Callable[[Update], None]) -> None:
        """Call a function with every usable update, for diagnostics that are not part of the method."""
        self._watchers.append(watcher)

    def restore(self, num_skipped: int) -> None:
        """Continue counting skipped updates from this number."""
        self.skipped = SkippedUpdates(num_skipped)

    def step(self, round: int, arrivals: Iterable[Update | SummedUpdate]) -> dict[str, Any]:
        """Apply the updates of a round, in order.

        Non-finite updates are skipped and counted. Without usable updates, the model is unchanged.

        Args:
            round: Number of the round, from 0.
            arrivals: Updates that arrived, in order; under secure aggregation, their sum.

        Returns:
            Metrics of the round.
        """
        setup, state = self.setup, self.state
        if "equal_slices" in setup.needs:
            clients = setup.federation_info.clients
            self.broadcaster.exchange.check_equal_slices(state.rules, round, self.clients.last_rounds, clients)
        intake = UpdateBuffer(setup.method, setup.rule, self.meter, state.waiting)
        senders, skipped, discarded = self._collect(round, arrivals, intake)
        if senders:
            plan = setup.federation_info.plan
            halves = setup.method.halves
            state.set_rules({half.name: half.record_clients(state.rules[half.name], senders, plan) for half in halves})
        accepted = intake.accepted
        overflowed = not self._apply_updates(round, intake)
        if overflowed:
            skipped, accepted = sorted([*skipped, *(update.client for update in accepted)]), []
        for update in accepted:
            self.clients.accept(update)
        for summed in intake.sums if accepted else ():
            self.clients.store.keep_rows(summed.clients, summed.state, setup.federation_info.clients)
        if accepted and "last_update" in setup.needs:
            for single in intake.round_updates.individual or ():
                self.clients.put_last_update(single)
        self.skipped.count(skipped, overflowed)
        means = {name: total / len(accepted) if accepted else 0.0 for name, total in intake.metrics.items()}
        return {
            "updates": len(accepted),
            "skipped": len(skipped),
            "train_loss": means["loss"] if accepted else math.nan,
            "setup_seconds": means["setup_seconds"],
            "train_seconds": means["train_seconds"],
            **({"discarded": discarded} if discarded else {}),
            **self._rule_metrics(round),
        }

    def _collect(
        self, round: int, arrivals: Iterable[Update | SummedUpdate], intake: UpdateBuffer
    ) -> tuple[list[int], list[int], int]:
        """Count and collect the updates of a round; return their senders, the skipped clients and the number discarded."""
        needs, traffic = self.setup.needs, self.broadcaster.traffic
        senders: list[int] = []
        skipped: list[int] = []
        discarded = 0
        for update in arrivals:
            clients = *update.unusable, *update.clients
            for client in clients:
                _, up = self.broadcaster.slices(update.origin_round, client)
                traffic.count_update(update, client, up)
            senders += clients
            if "same_round" in needs and update.origin_round != round:
                discarded += len(clients)
                continue
            usable = update.clients if update.is_finite() else ()
            skipped += [client for client in clients if client not in usable]
            sent = [self.clients.take_sent(client) for client in clients][-1]  # clients of a sum receive the same
            if not usable:
                continue
            masks = self.broadcaster.exchange.masks(up, self.state.v.device)
            if isinstance(update, SummedUpdate):
                intake.add(update, masks, b_start=sent.b)
                continue
            last = self.clients.last_update(update.client, self.state.v.device) if "last_update" in needs else None
            added = {"arrived": round, "start": sent.v, "version": sent.version, "last": last}
            update = intake.add(update, masks, b_start=sent.b, **added)
            for watch in self._watchers:
                watch(update)
        return senders, skipped, discarded

    def _rule_metrics(self, round: int) -> dict[str, Any]:
        """Return the round metrics of the rules, and those on the server rule's buffer and cache."""
        setup, state, spec = self.setup, self.state, self.setup.spec
        metrics = rule_metrics(setup.rule, state.server_rule, round, spec)
        if setup.rule.updates_per_step is not None:
            metrics[f"{setup.rule.name}_waiting"] = float(state.waiting.aggregate.count)
        if "last_update" in setup.needs:
            size = len(self.clients.cache) * state.v.numel() * state.v.element_size()
            metrics[f"{setup.rule.name}_cache_bytes"] = float(size)
        server_rule: Rule = setup.rule
        for half in setup.method.halves:
            own = {} if half is server_rule else rule_metrics(half, state.rules[half.name], round, spec)
            metrics |= dict.fromkeys(half.hidden_metrics, math.nan) | own
        return metrics

    def _apply_updates(self, round: int, intake: UpdateBuffer) -> bool:
        """Compute the next model and rule states; if they are not finite, discard all but ``continued`` and return False."""
        method, rule, current = self.setup.method, self.setup.rule, self.state
        server_rule = current.server_rule
        rules = current.rules
        b = current.b
        rule_b = None  # buffers that the server rule returned
        others = (part for part in method.rules if part is not method.sync)
        if method.sync is not None and intake.unequal and any("individual" in part.needs for part in others):
            raise ConfigError(
                f"{method.sync.name}.exchanged_slices gives clients different slices to upload, but a rule of "
                f"{method.name} reads single updates. Return the same slices for all clients of a round, or remove "
                "one of the two rules."
            )
        combined = method.aggregate is not None and (bool(intake.accepted) or method.aggregate.combines_empty)
        if combined:
            rules = self._combine(round, intake)
        for gathered in intake.for_rule():
            if isinstance(gathered.aggregate, CombinedUpdate) and not gathered.aggregate.step:
                continue
            with self.meter():
                new_state = rule.step(server_rule, self.updates(round, gathered, b if rule_b is None else rule_b))
            check_state(f"{rule.name}.step", new_state, current.v, current.b)
            rule_b = new_state.get("b", rule_b)
            new_state = {name: t for name, t in new_state.items() if name != "b"}
            server_rule = self.broadcaster.exchange.only_sent(gathered.aggregate.sent, new_state, server_rule)
        sums = intake.round_updates.aggregate
        if intake.accepted or combined:
            all_updates = self.updates(round, intake.round_updates, current.b)
            with self.meter():
                rules = {half.name: half.server_update(rules[half.name], all_updates) for half in method.halves}
            # Buffers of updates that wait in the server's buffer move together with the model.
            if rule_b is None:
                rule_b = b if rule.updates_per_step is not None and sums.buffer_change is not None else sums.buffers
            b = rule_b if sums.sent is None else torch.where(sums.sent[1], rule_b, b)
        elif rule_b is not None:
            b = rule_b
        after = state_tensors(server_rule, rules, b)
        before = state_tensors(current.server_rule, current.rules, current.b)
        both = [name for name in before if name in after]
        flags = finite_flags([*(before[name] for name in both), *(after[name] for name in both)])
        if any(was and not now for was, now in zip(flags[: len(both)], flags[len(both) :], strict=True)):
            for half in method.halves:  # what the round has spent remains spent
                state = rules[half.name]
                spent = {entry: state[entry] for entry in half.continued if entry in state}
                current.set_rules({half.name: {**current.rules[half.name], **spent}})
            return False
        current.apply(server_rule, rules, b, intake.waiting, len(intake.accepted))
        if intake.models is not None:
            # A server rule may have changed the mean of exchanged entries, so its model is used there.
            evaluated, mean = server_rule.get(EVALUATED, server_rule["v"]), intake.models / sums.weight
            mean = evaluated if sums.sent is None else torch.where(sums.sent[0], evaluated, mean)
            self.selection.use_mean((mean, sums.all_buffers))
        return True

    def _combine(self, round: int, intake: UpdateBuffer) -> dict[str, Tensors]:
        """Combine each collection of updates by the rule of the aggregate slot; return the new state of all halves."""
        rule, current = self.setup.method.aggregate, self.state
        assert rule is not None
        state = current.rules[rule.name]
        collections = intake.for_rule()
        if all(collected is not intake.round_updates for collected in collections):
            collections = [*collections, intake.round_updates]
        for collected in collections:
            if collected.aggregate.count or rule.combines_empty:
                if not collected.aggregate.count and self.setup.method.sync is not None:
                    _, up = self.broadcaster.slices(round, 0)
                    collected.aggregate.sent = self.broadcaster.exchange.masks(up, current.v.device)
                with self.meter():
                    state, combined = rule.combine(state, self.updates(round, collected, current.b))
                check_combined(rule.name, combined, current.v, current.b)
                collected.aggregate = CombinedUpdate(collected.aggregate, combined)
        return {**current.rules, rule.name: state}

    def updates(self, round: int, collected: CollectedUpdates, b: Tensor, v: Tensor | None = None) -> Updates:
        """Return collected updates as the server half of a rule sees them.

        Args:
            round: Number of the round, from 0.
            collected: Updates of the round.
            b: Buffers of the model, ``[m]``.
            v: Model that the clients received, ``[d]``; None for the one broadcast in the round.
        """
        setup = self.setup
        return Updates(
            round=round,
            aggregate=collected.aggregate,
            individual=collected.individual,
            v_global=self.broadcaster.model(round) if v is None else v,
            b_global=b,
            spec=setup.spec,
            key=torch.tensor(derive(setup.seed, "server", round), device=self.state.v.device),
            server_training=setup.server_training and setup.server_training.in_round(round),
            version=self.state.version,
            arrivals=collected.arrivals,
            plan=setup.federation_info.plan,
            noise=self._noise,
        )
