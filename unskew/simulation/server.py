"""Server of a run: its parts, and its exchanges with clients that do not train."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unskew.engines.base import Engine
from unskew.protocol.messages import EVALUATED, SummedUpdate, Tensors, Update
from unskew.protocol.rules import survey_times
from unskew.simulation.aggregator import Aggregator
from unskew.simulation.broadcaster import Broadcaster
from unskew.simulation.client_records import ClientRecords
from unskew.simulation.client_store import ClientStore
from unskew.simulation.model_selection import ModelSelection
from unskew.simulation.server_state import ServerSetup, ServerState
from unskew.simulation.traffic import TrafficMeter, extra_bytes
from unskew.simulation.update_buffer import empty_updates


class Server:
    """Server of a run.

    Args:
        setup: Fixed parts of the server.
        store: Storage for the state of the clients; None for memory only.
        cache: Storage for the last updates of the clients, for rules that need them; None for memory only.

    Attributes:
        setup: Fixed parts of the server.
        state: Global model and state of the rules.
        clients: Records of the clients.
        traffic: Counts the bytes.
        broadcaster: Creates what is sent.
        selection: Selects the model to evaluate and to return.
        aggregator: Applies updates.
        observed: State of simulated attackers (``attack``), of diagnostics (``measured``) and of the sampler of clients
            (``sampler``), and the initial models of several architectures (``initial``), which checkpoints store.
    """

    def __init__(self, setup: ServerSetup, store: ClientStore | None = None, cache: ClientStore | None = None):
        self.setup = setup
        self.state = ServerState(setup)
        self.clients = ClientRecords(store, cache)
        self.traffic = TrafficMeter(setup, self.state, self.clients)
        self.broadcaster = Broadcaster(setup, self.state, self.clients, self.traffic)
        self.selection = ModelSelection(self.state)
        self.aggregator = Aggregator(self.broadcaster, self.selection)
        self.observed: dict[str, Tensors] = {
            "attack": {}, "measured": {}, "sampler": {}, "initial": self.broadcaster.initial,
        }  # fmt: skip

    def tensors(self) -> Tensors:
        """Return all tensors of the server, by name."""
        observed = {f"{kind}/{name}": t for kind, tensors in self.observed.items() for name, t in tensors.items()}
        return {**self.state.tensors(), **self.clients.tensors(), **self.selection.tensors(), **observed}

    def losses(self, round: int, candidates: Sequence[int], engine: Engine) -> list[float]:
        """Ask clients for the mean loss of the model that they would train in a round, and count the bytes.

        Args:
            round: Number of the round, from 0.
            candidates: Clients to ask.
            engine: Evaluates the model at the clients.

        Returns:
            The loss of each candidate.
        """
        broadcasts = self.broadcaster.loss_questions(round, candidates)
        for client in candidates:
            self.traffic.total.count(client, "up", self.state.v.element_size(), 0)
        return [update.metrics["loss"] for update in engine.train(broadcasts)]

    def ask(self, round: int, cohort: Sequence[int], engine: Engine) -> None:
        """Ask the clients of a round about its model before they train, and update the states of the rules that ask.

        Args:
            round: Number of the round, from 0.
            cohort: Clients of the round.
            engine: Evaluates the model at the clients.
        """
        method, state = self.setup.method, self.state
        collected = empty_updates(method, self.setup.rule)
        for reply in engine.train(self.broadcaster.questions(round, cohort)):
            for client in reply.clients:
                self.traffic.total.count(client, "up", extra_bytes(reply.upload, None, reply.delta), 0)
            if reply.is_finite() and reply.clients:
                collected.add(reply)
        if collected.aggregate.count:
            updates = self.aggregator.updates(round, collected, state.b, state.v)
            asking = {rule.name: rule for rule in method.client if "asked" in survey_times(rule)}
            with self.aggregator.meter():
                rules = {name: rule.server_update(state.rules[name], updates) for name, rule in asking.items()}
            state.set_rules(rules)

    def close(self, round: int, replies: Iterable[Update | SummedUpdate]) -> None:
        """Apply the surveys after the last round: each of their rules may return another final model.

        Replies that are not finite are skipped and counted.

        Args:
            round: Number of the round, from 0.
            replies: Replies of the clients.
        """
        method = self.setup.method
        collected = empty_updates(method, self.setup.rule)
        skipped: list[int] = []
        for reply in replies:
            for client in reply.clients:
                self.traffic.total.count(client, "up", extra_bytes(reply.upload, (), reply.delta), 0)
            skipped += reply.unusable
            if not reply.is_finite():
                skipped += reply.clients
            elif reply.clients:
                collected.add(reply)
        self.aggregator.skipped.count(skipped)
        if not collected.aggregate.count:
            return
        for rule in method.client:
            if "final" in survey_times(rule):
                v, b = self.selection.evaluated
                updates = self.aggregator.updates(round, collected, self.state.b, v)
                model = rule.server_update(self.state.rules[rule.name], updates).get(EVALUATED)
                if model is not None and bool(model.isfinite().all()):
                    self.selection.finish((model, b))
