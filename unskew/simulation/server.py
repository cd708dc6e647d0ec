"""The server of a run: it broadcasts, counts what crosses the network, and turns updates into the next model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from unskew.data.federation import Federation
from unskew.models.vector import ModelSpec
from unskew.protocol.messages import finite
from unskew.protocol.rules import Aggregate, Broadcast, Method, ServerRule, Slices, Tensors, Update, Updates
from unskew.protocol.server_training import ServerTraining
from unskew.seeding import derive
from unskew.simulation.slices import SyncState, complement
from unskew.simulation.store import ClientStore, flat
from unskew.simulation.traffic import Traffic, extras, sliced

Buffers = Literal["average", "local", "reset"]


@dataclass(frozen=True)
class Sent:
    """What a rule asked to remember of a broadcast: updates taken in before, round, model ``[d]``, statistics ``[m]``."""

    version: int
    born: int
    v: Tensor | None = None
    b: Tensor | None = None


class Server:
    """The global model, the server's half of the method, and the clients' store.

    Attributes:
        v, b: The global model ``[d]`` and its normalisation statistics ``[m]``.
        state: State of the server rule; ``rules``: state of each client rule's server half.
        store: What stays at the clients; ``cache``: their last updates, for rules that ask the server to keep them.
        traffic: Bytes so far.
        version: Updates taken in so far; ``sent``: for rules that remember, what each client on its way was sent.
        skipped: Updates left out so far because they were not finite; ``left_out``: whose, in the last round.
        moved: Whether the model has changed since this server was made or restored.
        meter: Entered while updates are added up and taken in; counts what that costs.
        watchers: Shown every usable update: diagnoses that look at single ones; no part of the method.
    """

    def __init__(
        self,
        method: Method,
        rule: ServerRule,
        spec: ModelSpec,
        federation: Federation,
        weights: Literal["samples", "uniform"],
        buffers: Buffers = "average",
        store: ClientStore | None = None,
        seed: int = 0,
        at_server: ServerTraining | None = None,
        cache: ClientStore | None = None,
    ):
        self.at_server = at_server
        self.method, self.rule, self.spec, self.weights, self.mode = method, rule, spec, weights, buffers
        self.federation, self.seed = federation, seed
        self.single = frozenset(r.name for r in method.client if r.needs == "individual")
        self.sends_model = all(r.sends_model for r in method.client)
        self.individual = "individual" in (rule.needs, *(part.needs for part in method.client))
        self.store = ClientStore() if store is None else store  # an empty one is false
        self.cache = ClientStore() if cache is None else cache
        self.b0 = spec.flatten_buffers()
        self.b = self.b0.clone()
        self.state = rule.init(spec.flatten(), federation)
        self.rules: dict[str, Tensors] = {r.name: r.server_init(self.v, federation) for r in method.client}
        self.traffic = Traffic()
        self.moved = False
        self.skipped = 0
        self.left_out: list[int] = []
        self.overflows = 0
        self.overflowed = False
        self.last: dict[int, int] = {}
        self.version = 0
        self.sent: dict[int, Sent] = {}
        self.watchers: list[Callable[[Update], None]] = []
        self.meter: Callable[[], AbstractContextManager[None]] = nullcontext
        self.travel = SyncState(method.sync, spec)
        self.mean: tuple[Tensor, Tensor] | None = None

    @property
    def v(self) -> Tensor:
        """The global model, ``[d]``."""
        return self.state["v"]

    @property
    def evaluated(self) -> Tensor:
        """The model that is evaluated and returned; some methods average the last ones, or what stays at clients."""
        return self.rule.evaluated(self.state) if self.mean is None else self.mean[0]

    @property
    def evaluated_b(self) -> Tensor:
        """The statistics that belong to it."""
        return self.b if self.mean is None else self.mean[1]

    def tensors(self) -> Tensors:
        """All that the server holds, by name."""
        mean = {} if self.mean is None else {"mean/v": self.mean[0], "mean/b": self.mean[1]}
        plan = {f"sync/{name}": t for name, t in self.travel.state.items()}
        sent = {
            f"sent/{sent.born}": sent.v for sent in self.sent.values() if sent.v is not None
        }  # one for all of a round
        sent |= {f"sent-b/{sent.born}": sent.b for sent in self.sent.values() if sent.b is not None}
        return {**everything(self.state, self.rules, self.b), **mean, **plan, **sent}

    def broadcast(self, round: int, client: int) -> Broadcast:
        """What ``client`` receives in ``round``; its bytes are counted."""
        down, up = self.travel.slices(round, client, self.last.get(client))
        cast = replace(self._cast(round, client, self.v, self.b, down, up), keeps=self.travel.keeps_optimizer)
        # Where only slices travel, a client may begin with statistics of its own.
        statistics_too = self.rule.remembers_statistics and self.mode == "average" and self.method.sync is None
        if self.rule.remembers or statistics_too:
            v, b = (self.v if self.rule.remembers else None), (cast.b if statistics_too else None)
            self.sent[client] = Sent(self.version, round, v, b)
        statistics = self.travel.statistics(down, self.b) if self.mode == "average" else 0
        self.traffic.count(client, "down", sliced(down, self.v) + extras(cast.download, down, self.v), statistics)
        return cast

    def lost(self, client: int) -> None:
        """The client dropped out; nothing will come back."""
        self.sent.pop(client, None)

    def farewell(self, round: int, client: int) -> Broadcast:
        """The final model for a training whose result stays at ``client``, in ``Update.state["model"]``; not counted."""
        own = () if self.method.sync is None else self.method.sync.own(self.spec)
        down = complement(own, len(self.v)) if own else None
        return self._cast(round, client, self.evaluated, self.evaluated_b, down, ())

    def _cast(self, round: int, client: int, v: Tensor, b: Tensor, down: Slices | None, up: Slices | None) -> Broadcast:
        kept = self.store.get(client)
        download = {}
        for rule in self.method.client:
            extras = rule.extras(self.rules[rule.name], client)
            if extras:
                download[rule.name] = extras
        b = self.travel.start(down, b, kept.get("model", {}).get("b"))
        if self.mode == "reset":
            b = self.b0
        elif self.mode == "local":
            b = kept.get("buffers", {}).get("b", self.b0)
        weight = 1.0 if self.weights == "uniform" else float(self.federation.counted(client))
        return Broadcast(round, client, v, b, download, kept, weight, down, up)

    def step(self, round: int, arrivals: Iterable[Update]) -> dict[str, Any]:
        """Take in the updates of a round, in order; returns the round's figures.

        An update that is not finite is left out and counted; with no usable update the model stays as it was.
        """
        aggregate = Aggregate(self.single)
        individual: list[Update] | None = [] if self.individual else None
        sizes, room, portions, discarded = self.rule.portions(self.state), 0, list[Aggregate](), 0
        self.left_out = []
        sums = dict.fromkeys(("loss", "begin_seconds", "train_seconds"), 0.0)
        taken: list[Update] = []
        whole: Tensor | None = None
        squares: Tensor | None = None
        up: Slices | None = None
        for update in arrivals:
            _, up = self.travel.slices(update.born, update.client, self.last.get(update.client))
            whole_model = self.sends_model and self.mode != "local"
            statistics = self.travel.statistics(up, update.buffers) if whole_model else 0
            beside = extras(update.upload, up, update.delta) + self.travel.numbers * update.delta.element_size()
            model = sliced(up, update.delta) if self.sends_model else 0
            self.traffic.count(update.client, "up", model + beside, statistics)
            if not self.rule.takes(update.born, round):
                discarded += 1
                continue
            if not update.is_finite():
                self.left_out.append(update.client)
                self.lost(update.client)
                continue
            sent = self.sent.pop(update.client, Sent(0, 0))
            update = replace(update, start=sent.v, version=sent.version, b_start=sent.b)
            if not room and (room := next(sizes, 0)):
                portions.append(Aggregate(self.single))
            with self.meter():
                aggregate.add(update)
                if room:
                    portions[-1].add(update)
                    room -= 1
            if self.travel.evaluates_mean:
                mine = update.state["model"]["v"] * update.weight
                whole = mine if whole is None else whole.add_(mine)
            if self.travel.observes:
                square = (update.state["model"]["v"] - self.v).square_().mul_(update.weight)
                squares = square if squares is None else squares.add_(square)
            sums = {name: total + update.metrics.get(name, 0.0) for name, total in sums.items()}
            for watch in self.watchers:
                watch(update)
            if individual is not None:
                individual.append(update)
            # What stays at the client is kept when the round is known to have succeeded; the rest is in the sums.
            taken.append(replace(update, delta=torch.empty(0), upload={}, start=None, b_start=None))
        key = torch.tensor(derive(self.seed, "server", round), device=self.v.device)
        before = self.v
        updates = Updates(
            round,
            aggregate,
            individual,
            self.v,
            self.spec,
            key,
            portions,
            self.version,
            self.b,
            self.at_server,
            self.cached,
        )
        self.overflowed = bool(taken or self.rule.without_updates) and not self._take_in(updates, up, whole)
        if self.overflowed:
            self.overflows += 1
            self.left_out, taken = sorted([*self.left_out, *(update.client for update in taken)]), []
        if taken and whole is not None and squares is not None:
            self.travel.observe(round, whole / aggregate.weight - before, squares / aggregate.weight)
        for update in taken:
            self._keep(update)
        if taken and self.rule.caches:
            for update in updates:
                self.cache.put(update.client, {"update": {"delta": update.delta.cpu()}})
        self.version += len(taken)
        self.skipped += len(self.left_out)
        return {
            "updates": len(taken),
            "skipped": len(self.left_out),
            "train_loss": sums["loss"] / len(taken) if taken else math.nan,
            "begin_seconds": sums["begin_seconds"] / len(taken) if taken else 0.0,
            "train_seconds": sums["train_seconds"] / len(taken) if taken else 0.0,
            **({"discarded": discarded} if discarded else {}),
            **self.rule.metrics(self.state),
        }

    def problem(self, done: int) -> str | None:
        """What to tell of the last round, ``done`` in all, if it is the first one with numbers that are not finite."""
        if self.overflowed and self.overflows == 1:
            return (
                f"Round {done}: what the server makes of finite numbers is not finite, so the model stays as it was and the "
                "round's updates are left out. Later ones are only counted (updates_skipped); smaller rates and steps of the "
                "server, or of the clients, may help."
            )
        if self.left_out and self.skipped == len(self.left_out):
            names = [str(client) for client in self.left_out]
            shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
            return (
                f"Round {done}: the updates of clients {shown} are not finite and are left out. "
                "Later ones are only counted (updates_skipped); a smaller learning rate may help."
            )
        return None

    def cached(self, client: int) -> Tensor | None:
        """The last update of a client that was taken in, ``[d]``, if the rule has the server keep it."""
        kept = self.cache.get(client)
        return kept["update"]["delta"].to(self.v.device) if kept else None

    def _take_in(self, updates: Updates, up: Slices | None, whole: Tensor | None) -> bool:
        """Make the next model and the rules' next states; if finite updates overflow in them, nothing changes.

        Args:
            updates: Of the round.
            up: The slices that were sent.
            whole: Weighted sum of the clients' whole models, if their mean is what is evaluated.
        """
        with self.meter():
            made = self.rule.step(self.state, updates)
        b = made.get("b")
        state = self.travel.only_sent(up, {name: t for name, t in made.items() if name != "b"}, self.state)
        rules = self.rules
        if len(updates):
            rules = {r.name: r.collect(self.rules[r.name], updates) for r in self.method.client}
            b = self.travel.merged(up, updates.aggregate.buffers if b is None else b, self.b)
        b = self.b if b is None else b
        after = everything(state, rules, b)
        if any(finite(t) and not finite(after.get(name, t)) for name, t in self.tensors().items()):
            return False
        self.moved = self.moved or not torch.equal(state["v"], self.v)
        self.state, self.rules, self.b = state, rules, b
        if whole is not None:
            mean = whole / updates.aggregate.weight
            # Where a server rule has moved the mean of what was sent, its model counts.
            self.mean = self.travel.chosen(up, self.rule.evaluated(state), mean), updates.aggregate.buffers
        return True

    def _keep(self, update: Update) -> None:
        """What stays at the client."""
        state = {**self.store.get(update.client), **update.state}
        if self.mode == "local":
            state["buffers"] = {"b": update.buffers}
        self.store.put(update.client, state)
        if self.method.sync is not None:
            self.last[update.client] = update.born


def everything(state: Tensors, rules: dict[str, Tensors], b: Tensor) -> Tensors:
    """The server's tensors under names that cannot clash."""
    return {
        "b": b,
        **{f"state/{name}": t for name, t in state.items()},
        **{f"rules/{name}": t for name, t in flat(rules).items()},
    }
