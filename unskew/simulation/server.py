"""Server of a run: it broadcasts the model, counts traffic, and computes the next model from updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from unskew.engines.base import Engine
from unskew.errors import ConfigError
from unskew.models.spec import ModelSpec
from unskew.protocol.federation_info import FederationInfo, Weights
from unskew.protocol.messages import (
    EVALUATED,
    Broadcast,
    Slices,
    Tensors,
    Update,
    finite_flags,
    flatten_records,
    num_bytes,
    replace_fields,
)
from unskew.protocol.payload import slices_length
from unskew.protocol.rules import Method, Rule, ServerRule, changes_updates
from unskew.protocol.server_training import ServerTraining
from unskew.protocol.training_config import Buffers
from unskew.protocol.updates import CombinedUpdate, Updates
from unskew.secret_draws import NoiseSource
from unskew.seeding import derive
from unskew.simulation.client_store import ClientStore
from unskew.simulation.parameter_slices import SliceExchange, complement_slices, subtract_slices
from unskew.simulation.traffic import MASKED_NUMBER, Traffic, extra_bytes, slice_bytes
from unskew.simulation.update_buffer import (
    CollectedUpdates,
    UpdateBuffer,
    check_combined,
    check_state,
    empty_updates,
    rule_metrics,
)


@dataclass(frozen=True)
class SentModel:
    """Broadcast values that a rule needs later: version, round, model ``[d]`` and buffers ``[m]``."""

    version: int
    born: int
    v: Tensor | None = None
    b: Tensor | None = None


class Server:
    """Global model, server half of the method, and client store.

    Args:
        method: Method of the run.
        rule: Server rule of the method, or the default one.
        spec: Layout of the model, with the initial weights.
        facts: Server's information about the federation.
        weights: Client weighting.
        buffers: Treatment of normalization buffers, see ``Buffers``.
        store: Storage for the state of the clients; None for memory only.
        seed: Seed of the run.
        at_server: Resources for training at the server; None if no rule needs them.
        cache: Storage for the last updates of the clients, for rules that need them; None for memory only.
        noise: Source of the server's noise; None derives it from the seed.

    Attributes:
        b: Normalization buffers of the global model, ``[m]``; the model itself is ``v``.
        state: State of the server rule.
        rules: Server state of the other rules, by name.
        waiting: Updates in the server rule's buffer.
        store: State of the clients.
        cache: Last updates of the clients, for rules that need them.
        last: Round of each client's last applied update.
        traffic: Bytes sent so far.
        version: Number of updates applied so far.
        sent: Broadcasts to clients in flight, for rules that need them.
        mean: Mean of the clients' whole models and of their buffers, if that is the evaluated model.
        best: Model and buffers of the best round so far, if the run keeps it.
        finished: Model and buffers that the finished run returns instead of the last round's.
        num_skipped: Number of non-finite updates skipped so far.
        skipped_clients: Clients whose updates were skipped in the last round.
        moved: Whether the model has changed since this server was created or restored.
        evaluates: Returns whether the model is evaluated after a round.
        wants_models: Whether clients report their whole models in evaluated rounds if updates do not determine them.
        meter: Context manager around the aggregation of updates, which measures its cost.
        watchers: Called with every usable update: diagnostics of single updates, which are not part of the method.
        attack_state: State of simulated attackers, which checkpoints store.
        measured: Tensors that diagnostics need in later rounds, which checkpoints store.
    """

    b: Tensor
    state: Tensors
    rules: dict[str, Tensors]
    waiting: CollectedUpdates
    store: ClientStore
    cache: ClientStore
    last: dict[int, int]
    traffic: Traffic
    version: int
    sent: dict[int, SentModel]
    mean: tuple[Tensor, Tensor] | None
    best: tuple[Tensor, Tensor] | None
    finished: tuple[Tensor, Tensor] | None
    num_skipped: int
    skipped_clients: list[int]
    moved: bool
    evaluates: Callable[[int], bool]
    wants_models: bool
    meter: Callable[[], AbstractContextManager[None]]
    watchers: list[Callable[[Update], None]]
    attack_state: Tensors
    measured: Tensors

    def __init__(
        self,
        method: Method,
        rule: ServerRule,
        spec: ModelSpec,
        facts: FederationInfo,
        weights: Weights,
        buffers: Buffers = "average",
        store: ClientStore | None = None,
        seed: int = 0,
        at_server: ServerTraining | None = None,
        cache: ClientStore | None = None,
        noise: NoiseSource | None = None,
    ):
        self.at_server = at_server
        self.noise = NoiseSource(seed) if noise is None else noise
        self.method = method
        self.rule = rule
        self.spec = spec
        self.weights = weights
        self.mode = buffers
        self.federation_info = replace(facts, weights=weights)
        self.seed = seed
        self.sends_model = all(r.sends_model for r in method.client)
        self.needs = {what for part in (rule, *method.rules) for what in part.needs}
        self.store = ClientStore() if store is None else store  # an empty store is falsy
        self.cache = ClientStore() if cache is None else cache
        self.b0 = spec.flatten_buffers()
        self.b = self.b0.clone()
        self.state = rule.init(spec.flatten(), self.federation_info)
        check_state(f"{rule.name}.init", self.state, spec.flatten(), self.b)
        self.halves = {half.name: half for half in method.halves}
        self.rules = {name: r.server_init(self.v, self.federation_info) for name, r in self.halves.items()}
        self.waiting = empty_updates(method, rule)
        self.traffic = Traffic()
        self.moved = False
        self.num_skipped = 0
        self.skipped_clients = []
        self.overflows = 0
        self.overflowed = False
        self.last = {}
        self.version = 0
        self.sent = {}
        self.have_model: tuple[int, frozenset[int]] = (-1, frozenset())  # clients that received the model of a round
        self.watchers = []
        self.attack_state = {}
        self.measured = {}
        self.meter = nullcontext
        self.exchange = SliceExchange(method.sync, spec)
        self.compressor = next((r for r in method.client if r.compresses_broadcast), None)
        if self.compressor is not None:
            first = {"broadcast_model": self.v, "broadcast_bytes": torch.zeros(0, dtype=torch.int64)}
            self.rules[self.compressor.name] = {**self.rules[self.compressor.name], **first}
        self.mean = None
        self.best = None
        self.finished = None
        self.evaluates = lambda round: True
        # A mean of whole models would not be protected by a robust rule in the aggregate slot.
        self.wants_models = "mean_model" in self.needs and method.aggregate is None
        self.changes_updates = changes_updates(method.client)
        self.parted = method.sync is not None or self.changes_updates

    @property
    def v(self) -> Tensor:
        """Global model, ``[d]``."""
        return self.state["v"]

    @property
    def evaluated(self) -> Tensor:
        """Model to evaluate and to return, ``[d]``; some methods average recent models or the clients' models."""
        if self.finished is not None:
            return self.finished[0]
        return self.state.get(EVALUATED, self.v) if self.mean is None else self.mean[0]

    @property
    def evaluated_b(self) -> Tensor:
        """Buffers of the evaluated model, ``[m]``."""
        if self.finished is not None:
            return self.finished[1]
        return self.b if self.mean is None else self.mean[1]

    def tensors(self) -> Tensors:
        """Return all tensors of the server, by name."""
        mean = {} if self.mean is None else {"mean/v": self.mean[0], "mean/b": self.mean[1]}
        waiting = {f"waiting/{name}": t for name, t in self.waiting.tensors().items()}
        # All broadcasts of one round share one tensor.
        sent = {f"sent/{sent.born}": sent.v for sent in self.sent.values() if sent.v is not None}
        sent |= {f"sent-b/{sent.born}": sent.b for sent in self.sent.values() if sent.b is not None}
        best = {} if self.best is None else {"best/v": self.best[0], "best/b": self.best[1]}
        attack = {f"attack/{name}": t for name, t in self.attack_state.items()}
        measured = {f"measured/{name}": t for name, t in self.measured.items()}
        return {**all_tensors(self.state, self.rules, self.b), **mean, **waiting, **sent, **best, **attack, **measured}

    def broadcasts(self, round: int, cohort: Sequence[int]) -> list[Broadcast]:
        """Create the broadcasts of a round and count their bytes.

        Args:
            round: Number of the round, from 0.
            cohort: Clients of the round.
        """
        weights = self.federation_info.cohort_weights(cohort)
        return [self.broadcast(round, client, weight) for client, weight in zip(cohort, weights, strict=True)]

    def broadcast(self, round: int, client: int, weight: float | None = None) -> Broadcast:
        """Create the broadcast for ``client`` in ``round`` and count its bytes.

        Args:
            round: Number of the round, from 0.
            client: Client number.
            weight: Client's aggregation weight; None for its weight in a cohort of its own.
        """
        down, up = self.exchange.slices(self.rules, round, client, self.last.get(client))
        report = self.wants_models and self.parted and self.evaluates(round)
        model = self._broadcast_model(round)
        broadcast = replace_fields(self._cast(round, client, model, self.b, down, up, weight), report=report)
        # If only slices are exchanged, a client may start from its own buffers.
        statistics_too = "sent_statistics" in self.needs and self.mode == "average" and self.method.sync is None
        if "sent_model" in self.needs or statistics_too:
            v, b = (model if "sent_model" in self.needs else None), (broadcast.b if statistics_too else None)
            self.sent[client] = SentModel(self.version, round, v, b)
        statistics = self.exchange.buffer_masks(down, self.b) if self.mode == "average" else 0
        sent = self._model_bytes(round, client, down)
        if self.have_model[0] == round and client in self.have_model[1]:
            sent = statistics = 0
        sent += extra_bytes(broadcast.download, down, self.v)
        if self.changes_updates:  # the client needs the server's values wherever it uploads a difference
            sent += slice_bytes(subtract_slices(up, down, len(self.v)), self.v)
        self.traffic.count(client, "down", sent, statistics)
        return broadcast

    def ask(self, round: int, cohort: Sequence[int], engine: Engine) -> None:
        """Ask the clients of a round about its model before they train, and update the states of the rules that ask.

        Args:
            round: Number of the round, from 0.
            cohort: Clients of the round.
            engine: Evaluates the model at the clients.
        """
        model = self._broadcast_model(round)
        weights = self.federation_info.cohort_weights(cohort)
        broadcasts = [
            replace_fields(
                self._cast(round, k, model, self.b, None, (), weight), closing=True, keeps=False, download={}
            )
            for k, weight in zip(cohort, weights, strict=True)
        ]
        self._count_model(round, cohort)
        collected = empty_updates(self.method, self.rule)
        for reply in engine.train(broadcasts):
            self.traffic.count(reply.client, "up", extra_bytes(reply.upload, None, reply.delta), 0)
            if reply.is_finite():
                collected.add(reply)
        if collected.aggregate.count:
            updates = self._updates(round, collected, self.b, self.v)
            asking = {rule.name: rule for rule in self.method.client if rule.survey_at == "asked"}
            states = {name: rule.server_update(self.rules[name], updates) for name, rule in asking.items()}
            self.rules = {**self.rules, **states}

    def _count_model(self, round: int, clients: Sequence[int]) -> None:
        """Count the bytes of the model for clients that receive it before the broadcasts of a round."""
        for client in clients:
            down, _ = self.exchange.slices(self.rules, round, client, self.last.get(client))
            buffers = self.exchange.buffer_masks(down, self.b) if self.mode == "average" else 0
            self.traffic.count(client, "down", self._model_bytes(round, client, down), buffers)
        self.have_model = (
            round,
            frozenset(clients) | (self.have_model[1] if self.have_model[0] == round else frozenset()),
        )

    def losses(self, round: int, candidates: Sequence[int], engine: Engine) -> list[float]:
        """Ask clients for the mean loss of the model that they would train in a round, and count the bytes.

        Args:
            round: Number of the round, from 0.
            candidates: Clients to ask.
            engine: Evaluates the model at the clients.

        Returns:
            The loss of each candidate.
        """
        model = self._broadcast_model(round)
        self._count_model(round, candidates)
        broadcasts = []
        for client in candidates:
            down, _ = self.exchange.slices(self.rules, round, client, self.last.get(client))
            broadcasts.append(replace_fields(self._cast(round, client, model, self.b, down, ()), asks_loss=True))
            self.traffic.count(client, "up", self.v.element_size(), 0)
        return [update.metrics["loss"] for update in engine.train(broadcasts)]

    def _broadcast_model(self, round: int) -> Tensor:
        """Return the model that clients have after the broadcast of a round, ``[d]``."""
        if self.compressor is None:
            return self.v
        name = self.compressor.name
        sizes = self.rules[name]["broadcast_bytes"]
        if len(sizes) <= round:
            before = self.rules[name]["broadcast_model"]
            state, model, size = self.compressor.compress_broadcast(
                self.rules[name], self.v, before, round, self.seed, self.spec
            )
            # Rounds without a cohort have no broadcast.
            sizes = torch.cat([sizes, sizes.new_zeros(round - len(sizes)), sizes.new_tensor([size])])
            self.rules = {**self.rules, name: {**state, "broadcast_model": model, "broadcast_bytes": sizes}}
        return self.rules[name]["broadcast_model"]

    def _model_bytes(self, round: int, client: int, down: Slices | None) -> int:
        """Return the bytes of the model for one client: the codes that it has missed, or the whole model if smaller."""
        full_size, last = slice_bytes(down, self.v), self.last.get(client)
        if self.compressor is None or last is None:
            return full_size
        return min(full_size, int(self.rules[self.compressor.name]["broadcast_bytes"][last + 1 : round + 1].sum()))

    def lost(self, client: int) -> None:
        """Forget a client that dropped out and will send no update."""
        self.sent.pop(client, None)

    def final_broadcast(self, round: int, client: int) -> Broadcast:
        """Create a broadcast of the final model for fine-tuning; the result is only reported, and no bytes are counted.

        Args:
            round: Number of the round, from 0.
            client: Client number.
        """
        own = () if self.method.sync is None else self.method.sync.local_slices(self.spec)
        down = complement_slices(own, len(self.v)) if own else None
        broadcast = self._cast(round, client, self.evaluated, self.evaluated_b, down, ())
        return replace_fields(broadcast, report=True, keeps=False)

    def closing_broadcast(self, round: int, client: int) -> Broadcast:
        """Create a broadcast of the final model for the surveys after the last round, and count its bytes.

        Args:
            round: Number of the round, from 0; no other round has it.
            client: Client number.
        """
        broadcast = self._cast(round, client, self.evaluated, self.evaluated_b, None, ())
        buffers = num_bytes([self.b]) if self.mode == "average" else 0
        self.traffic.count(
            client, "down", slice_bytes(None, self.v) + extra_bytes(broadcast.download, None, self.v), buffers
        )
        return replace_fields(broadcast, closing=True, keeps=False)

    def close(self, round: int, replies: Iterable[Update]) -> None:
        """Apply the surveys after the last round: each of their rules may return another final model.

        Replies that are not finite are skipped and counted.

        Args:
            round: Number of the round, from 0.
            replies: Replies of the clients.
        """
        collected = empty_updates(self.method, self.rule)
        self.skipped_clients = []
        for reply in replies:
            size = extra_bytes(reply.upload, (), reply.delta) if reply.sent_bytes is None else reply.sent_bytes
            self.traffic.count(reply.client, "up", size, 0)
            if reply.is_finite():
                collected.add(reply)
            else:
                self.skipped_clients.append(reply.client)
        self.num_skipped += len(self.skipped_clients)
        if not collected.aggregate.count:
            return
        for rule in self.method.client:
            if rule.survey_at == "final":
                updates = self._updates(round, collected, self.b, self.evaluated)
                model = rule.server_update(self.rules[rule.name], updates).get(EVALUATED)
                if model is not None and bool(model.isfinite().all()):
                    self.finished = model, self.evaluated_b

    def _cast(
        self,
        round: int,
        client: int,
        v: Tensor,
        b: Tensor,
        down: Slices | None,
        up: Slices | None,
        weight: float | None = None,
    ) -> Broadcast:
        accepted, (state, reference) = self.last.get(client), self.store.lent(client)
        if weight is None:  # after the last round; unseen clients have no weight of their own
            weight = self.federation_info.cohort_weights([client])[0] if client < self.federation_info.clients else 1.0
        extra = {name: half.download(self.rules[name], client) for name, half in self.halves.items()}
        return Broadcast(
            round=round,
            client=client,
            v=v,
            b=b if self.mode == "average" else self.b0,
            download={name: tensors for name, tensors in extra.items() if tensors},
            state=state,
            kept=reference,
            weight=weight,
            down=down,
            up=up,
            initial=() if accepted is not None or down is None else complement_slices(down, len(v)),
            accepted=accepted,
            keeps="optimizer" in self.needs,
        )

    def step(self, round: int, arrivals: Iterable[Update]) -> dict[str, Any]:
        """Apply the updates of a round, in order.

        Non-finite updates are skipped and counted. Without usable updates, the model is unchanged.

        Args:
            round: Number of the round, from 0.
            arrivals: Updates that arrived, in order.

        Returns:
            Metrics of the round.
        """
        intake, discarded = UpdateBuffer(self.method, self.rule, self.meter, self.waiting), 0
        senders: list[int] = []
        self.skipped_clients = []
        for update in arrivals:
            up = self._count(update)
            senders.append(update.client)
            if "same_round" in self.needs and update.born != round:
                discarded += 1
                continue
            if not update.is_finite():
                self.skipped_clients.append(update.client)
                self.lost(update.client)
                continue
            sent = self.sent.pop(update.client, SentModel(0, 0))
            update = replace_fields(
                update, start=sent.v, version=sent.version, b_start=sent.b, last=self._cached(update.client)
            )
            intake.add(update, self.exchange.masks(up, self.v.device))
            for watch in self.watchers:
                watch(update)
        taken = intake.taken
        if senders:
            plan = self.federation_info.plan
            self.rules = {
                name: half.record_clients(self.rules[name], senders, plan) for name, half in self.halves.items()
            }
        self.overflowed = not self._apply_updates(round, intake)
        if self.overflowed:
            self.overflows += 1
            self.skipped_clients, taken = sorted([*self.skipped_clients, *(update.client for update in taken)]), []
        for update in taken:
            self._keep(update)
        if taken and "last_update" in self.needs:
            for update in intake.whole.individual or ():
                self.cache.put(update.client, {"delta": update.delta.cpu()})
        self.version += len(taken)
        self.num_skipped += len(self.skipped_clients)
        metrics = {
            "updates": len(taken),
            "skipped": len(self.skipped_clients),
            "train_loss": intake.sums["loss"] / len(taken) if taken else math.nan,
            "setup_seconds": intake.sums["setup_seconds"] / len(taken) if taken else 0.0,
            "train_seconds": intake.sums["train_seconds"] / len(taken) if taken else 0.0,
            **({"discarded": discarded} if discarded else {}),
            **rule_metrics(self.rule, self.state, round, self.spec),
            **self._held(),
        }
        server_rule: Rule = self.rule
        for half in self.method.halves:
            own = {} if half is server_rule else rule_metrics(half, self.rules[half.name], round, self.spec)
            metrics |= dict.fromkeys(half.hidden_metrics, math.nan) | own
        return metrics

    def _held(self) -> dict[str, float]:
        """Return the round metrics on the rule's buffer and its cache."""
        figures = {}
        if self.rule.updates_per_step is not None:
            figures[f"{self.rule.name}_waiting"] = float(self.waiting.aggregate.count)
        if "last_update" in self.needs:
            figures[f"{self.rule.name}_cache_bytes"] = float(len(self.cache) * self.v.numel() * self.v.element_size())
        return figures

    def _upload_sizes(self, update: Update) -> tuple[Slices | None, int, int]:
        """Return the slices of the model that an update contains, and its bytes without and of buffers."""
        _, up = self.exchange.slices(self.rules, update.born, update.client, self.last.get(update.client))
        statistics = self.exchange.buffer_masks(up, update.buffers) if self.mode != "local" else 0
        if self.federation_info.plan.masked:
            uploads = sum(t.numel() for tensors in update.upload.values() for t in tensors.values())
            numbers = uploads + (slices_length(up, len(update.delta)) if self.sends_model else 0)
            return up, MASKED_NUMBER * numbers, MASKED_NUMBER * update.buffers.numel()
        model = slice_bytes(up, update.delta) if self.sends_model else 0
        sent = model + extra_bytes(update.upload, up, update.delta) if update.sent_bytes is None else update.sent_bytes
        return up, sent, statistics

    def upload_bytes(self, update: Update) -> int:
        """Return the bytes that will be counted when an update arrives."""
        _, sent, statistics = self._upload_sizes(update)
        return sent + statistics

    def _count(self, update: Update) -> Slices | None:
        """Count the bytes of an update and return the slices that were sent."""
        up, sent, statistics = self._upload_sizes(update)
        self.traffic.count(update.client, "up", sent, statistics)
        self.traffic.reports += num_bytes(update.report.values())
        if self.mode == "local" or update.report:  # all other buffers are averaged only for evaluation
            self.traffic.reports += num_bytes([update.buffers]) - statistics
        return up

    def _cached(self, client: int) -> Tensor | None:
        """Return a client's last applied update, ``[d]``, if a rule needs it."""
        delta = self.cache.get(client).get("delta") if "last_update" in self.needs else None
        return None if delta is None else delta.to(self.v.device)

    def _apply_updates(self, round: int, intake: UpdateBuffer) -> bool:
        """Compute the next model and rule states; if they are not finite, discard them and return False."""
        state = self.state
        rules = self.rules
        b = self.b
        done = None
        others = (part for part in self.method.rules if part is not self.method.sync)
        if self.method.sync is not None and intake.unequal and any("individual" in part.needs for part in others):
            raise ConfigError(
                f"{self.method.sync.name}.exchanged_slices gives clients different slices to upload, but a rule of "
                f"{self.method.name} reads single updates. Return the same slices for all clients of a round, or remove "
                "one of the two rules."
            )
        rule = self.method.aggregate
        combined = rule is not None and (bool(intake.taken) or rule.combines_empty)
        if combined:
            rules = self._combine(round, intake)
        for gathered in intake.for_rule():
            with self.meter():
                new_state = self.rule.step(state, self._updates(round, gathered, b if done is None else done))
            check_state(f"{self.rule.name}.step", new_state, self.v, self.b)
            done = new_state.get("b", done)
            sent = gathered.aggregate.sent
            state = self.exchange.only_sent(sent, {name: t for name, t in new_state.items() if name != "b"}, state)
        sums = intake.whole.aggregate
        if intake.taken or combined:
            all_updates = self._updates(round, intake.whole, self.b)
            rules = {name: half.server_update(rules[name], all_updates) for name, half in self.halves.items()}
            # Buffers of updates that wait in the server's buffer move together with the model.
            if done is None:
                done = b if self.rule.updates_per_step is not None and sums.moved is not None else sums.buffers
            b = done if sums.sent is None else torch.where(sums.sent[1], done, b)
        elif done is not None:
            b = done
        after = all_tensors(state, rules, b)
        before = {name: t for name, t in all_tensors(self.state, self.rules, self.b).items() if name in after}
        flags = finite_flags([*before.values(), *(after[name] for name in before)])
        if any(was and not now for was, now in zip(flags[: len(before)], flags[len(before) :], strict=True)):
            return False
        self.moved = self.moved or not torch.equal(state["v"], self.v)
        self.state = state
        self.rules = rules
        self.b = b
        self.waiting = intake.waiting
        if intake.models is not None:
            # A server rule may have changed the mean of exchanged entries, so its model is used there.
            evaluated, mean = state.get(EVALUATED, state["v"]), intake.models / sums.weight
            self.mean = evaluated if sums.sent is None else torch.where(sums.sent[0], evaluated, mean), sums.all_buffers
        return True

    def _combine(self, round: int, intake: UpdateBuffer) -> dict[str, Tensors]:
        """Combine each collection of updates by the rule of the aggregate slot; return the new state of all halves."""
        rule = self.method.aggregate
        assert rule is not None
        state = self.rules[rule.name]
        collections = intake.for_rule()
        if all(collected is not intake.whole for collected in collections):
            collections = [*collections, intake.whole]
        for collected in collections:
            if collected.aggregate.count or rule.combines_empty:
                if not collected.aggregate.count and self.method.sync is not None:
                    _, up = self.exchange.slices(self.rules, round, 0, self.last.get(0))
                    collected.aggregate.sent = self.exchange.masks(up, self.v.device)
                with self.meter():
                    state, combined = rule.combine(state, self._updates(round, collected, self.b))
                check_combined(rule.name, combined, self.v, self.b)
                collected.aggregate = CombinedUpdate(collected.aggregate, combined)
        return {**self.rules, rule.name: state}

    def _updates(self, round: int, gathered: CollectedUpdates, b: Tensor, v: Tensor | None = None) -> Updates:
        key = torch.tensor(derive(self.seed, "server", round), device=self.v.device)
        return Updates(
            round=round,
            aggregate=gathered.aggregate,
            individual=gathered.individual,
            v_global=self._broadcast_model(round) if v is None else v,
            b_global=b,
            spec=self.spec,
            key=key,
            at_server=self.at_server and self.at_server.in_round(round),
            version=self.version,
            arrivals=gathered.arrivals,
            plan=self.federation_info.plan,
            noise=self.noise,
        )

    def _keep(self, update: Update) -> None:
        """Store the client's state and the round of its update."""
        self.store.keep(update.client, update.state, update.kept)
        self.last[update.client] = update.born


def all_tensors(state: Tensors, rules: dict[str, Tensors], b: Tensor) -> Tensors:
    """Return the server's tensors under names that cannot clash.

    Args:
        state: State of the server rule.
        rules: Server state of the other rules.
        b: Buffers of the model, ``[m]``.
    """
    return {"b": b, **{f"state/{name}": t for name, t in state.items()}, **flatten_records("rules", rules)}
