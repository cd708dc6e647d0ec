"""Simulated clients of a run, on this machine or on a cluster."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from unskew.data.federation import Federation
from unskew.data.unseen import AllClients
from unskew.engines.auto_select import EngineChoice, EngineRequest, choose_engine
from unskew.engines.base import Engine, EngineConfig
from unskew.engines.registry import make_engine
from unskew.engines.vectorized import VectorizedEngine
from unskew.filesystem import write_atomic
from unskew.protocol.messages import Broadcast, Update
from unskew.runs.assembly import RunParts
from unskew.runs.personal_model_files import kept_personal_models
from unskew.runs.summary import client_metrics, client_rows
from unskew.simulation import personal_models
from unskew.simulation.client_scores import ClientScores
from unskew.simulation.evaluate import Evaluator, Models
from unskew.simulation.personal_models import Served
from unskew.sums.base import ClientRows
from unskew.sums.exchange import Exchange, SimulatedExchange


class SwitchingEngine:
    """Engine that is replaced by another one in a later round, when clients start to train on other data.

    Args:
        engine: Engine of the earlier rounds.
        create: Creates the engine of the later rounds.
        start: First round of the other engine, from 0.
    """

    def __init__(self, engine: Engine, create: Callable[[], Engine], start: int):
        self.engine = engine
        self.name = engine.name
        self._create: Callable[[], Engine] | None = create
        self._start = start

    def train(self, broadcasts: Sequence[Broadcast]) -> Iterator[Update]:
        """Train a cohort and yield its updates in order."""
        if self._create is not None and broadcasts and broadcasts[0].round >= self._start:
            self.engine.close()
            self.engine = self._create()
            self._create = None
        return self.engine.train(broadcasts)

    def close(self) -> None:
        """Release processes and memory."""
        self.engine.close()


class SimulatedClients:
    """Simulated clients of a run, which are trained and evaluated on this machine or a cluster.

    Args:
        parts: Parts of the run.
    """

    def __init__(self, parts: RunParts):
        self.parts = parts
        self.engine_name = ""

    @property
    def final_round(self) -> int:
        """Number of the training after the last round, see ``Training.final_round``."""
        return self.parts.config.training.final_round(len(self.parts.recorder.history))

    def make_engine(self, resume: bool) -> tuple[Engine, EngineChoice]:
        """Create the engine and return it with the reason for its choice."""
        parts, config = self.parts, self.parts.config
        if parts.folder is not None and not resume:
            # Before engine.json, so that a run that is killed in between can be resumed.
            write_atomic(parts.folder / "config.yaml", config.to_yaml().encode())
        request = EngineRequest(config.engine, config.workers, config.clients_per_group, config.ray.address)
        choice = choose_engine(request, parts.setup, parts.sampler.size, config.rounds, parts.folder, resume)
        self.engine_name = choice.engine
        ray = config.ray.model_dump(exclude_none=True, exclude={"state"}) if choice.engine == "ray" else None

        def create(setup: EngineConfig, again: bool = resume) -> Engine:
            engine = make_engine(choice.engine, setup, choice.workers, choice.clients_per_group, ray, choice.threads)
            if isinstance(engine, VectorizedEngine) and parts.folder is not None:
                engine.remember_choices(parts.folder, again)
            return engine

        attackers = parts.attackers
        if attackers is None or not attackers.poisons_data:
            return create(parts.setup), choice
        poisoned = replace(parts.setup, federation=attackers.poisoned(parts.setup.federation))
        start = attackers.attack.from_round - 1
        if start == 0:
            return create(poisoned), choice
        return SwitchingEngine(create(parts.setup), partial(create, poisoned, again=True), start), choice

    def exchange(self) -> Exchange:
        """Return an exchange of sums over the training rows of all clients."""
        clients = self.parts.evaluator.federation.clients
        return SimulatedExchange(lambda: (ClientRows(x=client.x, y=client.y) for client in clients))

    def evaluates(self, t: int) -> bool:
        """Return whether the model is evaluated after round ``t``."""
        config = self.parts.config
        return t + 1 == config.rounds or (t + 1) % config.eval_every == 0

    def sends_model(self, t: int) -> bool:
        """Return whether clients send their whole model in round ``t``, for methods that evaluate an average of them."""
        return self.evaluates(t)

    def reachable(self) -> list[int]:
        """Return the clients that can be asked after the last round."""
        return list(range(len(self.parts.evaluator.federation.clients)))

    def begin(self, start: int) -> None:
        """Handle the start of the run, or its resumption after ``start`` finished rounds."""

    def finishing_round(self, t: int, metrics: dict[str, Any]) -> None:
        """Handle the end of round ``t``, before evaluation and recording.

        Args:
            t: Round index, from 0.
            metrics: Metrics of the round.
        """

    def finished_round(self, t: int, last: bool) -> None:
        """Handle the end of round ``t``, after it was recorded.

        Args:
            t: Round index, from 0.
            last: Whether this is the last round of the run.
        """

    def saved(self, rounds: int) -> None:
        """Handle a checkpoint that was saved after ``rounds`` finished rounds."""

    def score(self, engine: Engine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Evaluate the final model and the personal models on clients.

        Args:
            engine: Engine of the run, which fine-tunes personal models.

        Returns:
            Metrics over all clients, and one row per client.
        """
        parts = self.parts
        config = self.parts.config
        server = self.parts.server

        def evaluate(own: Models | None) -> ClientScores:
            v, b = server.selection.evaluated
            return parts.evaluator.evaluate_clients(v, b, config.eval_clients, config.seed, own, each=True)

        own_statistics = config.buffers == "local" and parts.spec.buffer_sizes
        differ = own_statistics or parts.spec.others
        scores = evaluate(partial(personal_models.stored_models, server, personal=False) if differ else None)
        own: ClientScores | None = None
        if personal_models.has_fine_tuning(parts.method):
            tuned = partial(personal_models.fine_tuned_models, server, engine, self.final_round, parts.sampler.size)
            own = evaluate(kept_personal_models(tuned, parts.folder, parts.recorder.warn))
        elif personal_models.has_personal_models(parts.method, parts.spec):
            own = evaluate(partial(personal_models.stored_models, server, personal=True))
        federation = parts.evaluator.federation
        attackers = () if parts.attackers is None else parts.attackers.clients
        more, unseen_rows = self._score_unseen() if federation.unseen else ({}, [])
        honest = scores.without(attackers), None if own is None else own.without(attackers)
        metrics = client_metrics(*honest, parts.metrics, federation.client_names)
        constants, on_test = parts.evaluator.client_constants(scores), parts.evaluator.test_constant()
        judged = [metric.name for metric in parts.metrics.judging if math.isfinite(on_test.get(metric.name, math.nan))]
        metrics |= {f"constant_{name}": on_test[name] for name in judged}
        rows = client_rows(federation, scores, own, server.clients.last_rounds, attackers, constants)
        return metrics | more, [*rows, *unseen_rows]

    def _score_unseen(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Evaluate the final model on the unseen clients, and the personal models that they get after the last round.

        Fine-tuning starts from the global model, with an empty state of the client. With rules that change the clients'
        data, unseen clients are not fine-tuned.

        Returns:
            Metrics over the unseen clients, and one row per unseen client.
        """
        parts, config, server = self.parts, self.parts.config, self.parts.server
        known = parts.evaluator.federation
        names = known.unseen_names
        unseen = replace(known, clients=known.unseen, client_names=names, unseen=(), stats_traffic=None)
        unseen = replace(unseen, text_groups=None)

        first, final = len(known.clients), server.selection.evaluated

        def evaluate(own: Models | None, federation: Federation = unseen) -> ClientScores:
            evaluator = Evaluator(parts.spec, federation, parts.task, parts.setup.device, parts.metrics.computed, first)
            return evaluator.evaluate_clients(*final, config.eval_clients, config.seed, own, each=True)

        def initial(clients: Sequence[int]) -> Served:
            yield from (server.broadcaster.model_for(first + k, final) for k in clients)

        common = initial if parts.spec.others else None
        scores, own = evaluate(common), None
        complete = evaluate(common, replace(unseen, clients=known.unseen_complete)) if known.unseen_complete else None
        if personal_models.has_fine_tuning(parts.method) and not parts.method.data:
            name = "vectorized" if self.engine_name == "vectorized" else "inline"
            every = replace(known, clients=AllClients(known), client_names=(*known.client_names, *names))
            engine = make_engine(name, replace(parts.setup, federation=every))
            at_once = parts.sampler.size

            def tuned(clients: Sequence[int]) -> Served:
                ids = [first + k for k in clients]
                return personal_models.fine_tuned_models(server, engine, self.final_round, at_once, ids)

            try:
                own = evaluate(tuned)
            finally:
                engine.close()
        rows = client_rows(unseen, scores, own, complete=complete)
        counts = [{"num_all": len(client.y_test)} for client in known.unseen_complete] or [{} for _ in rows]
        rows = [{**row, "client": first + row["client"], "unseen": True, **counts[row["client"]]} for row in rows]
        return client_metrics(scores, own, parts.metrics, names, unseen=True), rows
