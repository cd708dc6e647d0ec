"""One sitting of a deployed run: the session of a simulation with sites instead of simulated clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from unskew.config.experiment import AT_CLIENTS, Experiment
from unskew.deployment.secagg.engine import MaskedEngine
from unskew.deployment.server.async_engine import AsyncFlowerEngine
from unskew.deployment.server.audit_log import arrays_digest
from unskew.deployment.server.engine import FlowerEngine
from unskew.deployment.server.membership import Membership
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.wire.messages import WireContext
from unskew.deployment.wire.tensor_codec import encode_record
from unskew.engines.auto_select import EngineChoice
from unskew.engines.base import Engine
from unskew.errors import ConfigError
from unskew.protocol.messages import Update, replace_fields
from unskew.runs.session import Session
from unskew.runs.summary import client_metrics, client_rows
from unskew.simulation import personal_models
from unskew.simulation.evaluate import HELD_OUT, NOTHING, ClientScores, evaluated_clients
from unskew.simulation.network import Network, age_metrics
from unskew.tasks.primary_metric import WORST


class SitesNetwork(Network):
    """Updates arrive when they arrive; the round's line tells of those that did not."""

    sites: SiteManager
    engine: FlowerEngine
    asynchronous = False
    present: Membership | None = None

    @property
    def in_flight(self) -> frozenset[int]:
        """Clients that are not drawn: those whose update is on its way, and those that are not there."""
        if self.present is not None:
            self.present.wait()
            return frozenset(self.engine.in_flight | self.present.away())
        return frozenset(self.engine.in_flight | {*self.sites.excluded} if self.asynchronous else ())

    def deliver(self, round: int, results: Iterable[Update]) -> Iterator[Update]:
        """All that have come."""
        if not self.asynchronous:
            return super().deliver(round, results)
        arrivals = [replace_fields(update, arrived=round) for update in results]
        self.ages = [round - update.born for update in arrivals]
        return iter(arrivals)

    def figures(self) -> dict[str, Any]:
        """Return the round metrics on failures so far, sites present and delays of updates, where they vary."""
        counts = {f"sites_{name}": count for name, count in self.sites.counts.items() if count}
        excluded = {"sites_excluded": len(self.sites.excluded)} if self.sites.excluded else {}
        there = {} if self.present is None else {"sites_present": self.present.count}
        late = age_metrics(self.ages, len(self.engine.in_flight)) if self.asynchronous else {}
        return {**late, **self.engine.figures(), **there, **counts, **excluded}


class DeployedSession(Session):
    """``Session`` over sites; ``connect`` it before it goes."""

    sites: SiteManager
    terms: WireContext
    budget: dict[str, int]
    network: SitesNetwork
    complete = True  # whether the whole model is averaged in this round
    roster: Mapping[int, Any]

    def connect(
        self,
        sites: SiteManager,
        terms: WireContext,
        budget: dict[str, int],
        roster: Mapping[int, Any],
        asynchronous: bool = False,
    ) -> None:
        """Set the sites that train.

        Args:
            sites: Connected sites.
            terms: Checks of messages.
            budget: What data rules changed of the clients' budget.
            roster: Public signing keys, by client.
            asynchronous: Whether updates are accepted in later rounds, too.
        """
        self.roster = roster
        self.sites, self.terms, self.budget = sites, terms, budget
        network = SitesNetwork(0.0, self.config.seed, self.network.delays, self.network.store, self.network.device)
        network.sites, network.asynchronous = sites, asynchronous
        self.network = network

        def warn(text: str) -> None:
            sites.last_warning = text
            self.recorder.warn(text)

        sites.warn = warn

    def make_engine(self, resume: bool) -> tuple[Engine, EngineChoice]:
        """The sites."""
        masked = self.config.secure_aggregation == "required"
        kind = MaskedEngine if masked else AsyncFlowerEngine if self.network.asynchronous else FlowerEngine
        engine = kind(self.setup, self.sites, self.server, self.terms, self.budget)
        engine.roster, engine.folder = self.roster, self.folder
        for client in [*self.server.sent]:
            self.server.lost(client)  # what was on its way when the last sitting ended
        self.network.engine = engine
        return engine, EngineChoice("flower", 0)

    def _reports(self, t: int) -> bool:
        """Return whether sites send their whole model in round ``t``: in the last one, if the result needs it."""
        _, up = self.server.exchange.slices(self.server.rules, t, 0, None)
        self.complete = up is None or sum(span.stop - span.start for span in up) == self.spec.size
        return t + 1 == self.config.rounds and not self.complete

    def _evaluates(self, t: int) -> bool:
        """Return whether the model is evaluated after round ``t``.

        Not while parts of the evaluated model are only at the sites.
        """
        last = t + 1 == self.config.rounds
        return last or (super()._evaluates(t) and (not self.server.wants_models or self.complete))

    def _begin(self, start: int) -> None:
        """Start or resume the run, and log the start of the session."""
        super()._begin(start)
        self.server.evaluates = self._reports
        if start < self.config.rounds:
            self.server.mean = None  # that of a run that was made longer is out of date
        self.sites.round = start
        self.sites.log("resumed" if start else "started")
        self.sites.round = start + 1

    def _finished(self, t: int, figures: dict[str, Any]) -> bool:
        """Finish a round, log the digest of its model, and stop if the operator requested it."""
        sites, server = self.sites, self.server
        for client in server.skipped_clients:
            sites.log("left out", client, reason="not finite")
        model = arrays_digest(encode_record("model", {"v": server.v, "b": server.b}))
        sites.log("round finished", updates=figures.get("updates"), digest=model)
        if last := super()._finished(t, figures):
            sites.log("finished")
            return last
        sites.check_stopped(between_rounds=True)
        sites.round = t + 2
        return last

    def _save(self, done: int) -> None:
        if done != self._saved:
            super()._save(done)
            self.sites.log("checkpoint", rounds=done)

    def _client_scores(self, engine: Engine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Evaluate the final model and the personal models at each site on its held-out samples."""
        assert isinstance(engine, FlowerEngine)
        federation, most = self.evaluator.federation, self.config.eval_clients
        ids = evaluated_clients(len(federation.clients), most, self.config.seed)
        away = self.network.present.away() if self.network.present is not None else ()
        who = [k for k in ids if len(federation.clients[k].y_test) and k not in away]
        tunes = personal_models.has_fine_tuning(self.method)
        with_own = personal_models.has_personal_models(self.method, self.spec)
        # The whole model is sent to be measured; a simulation hands it over, too.
        b = self.server.evaluated_b  # with ``buffers: reset`` nobody trains from these
        broadcasts = [
            replace(self.server.final_broadcast(self.config.rounds, k), b=b, down=None, report=False) for k in who
        ]
        personal_scores = engine.measure(broadcasts, with_own) if who else {}
        scores, own = self._scores(personal_scores, ""), self._scores(personal_scores, "own_") if with_own else None
        if not who and most and not tunes:
            scores = self.evaluator.evaluate_clients(
                self.server.evaluated, self.server.evaluated_b, most, self.config.seed
            )  # by class, which the server knows
        figures = client_metrics(scores, own, self.metrics, federation.client_names)
        return figures, client_rows(federation, scores, own, self.server.last)

    def _scores(self, found: dict[int, dict[str, float]], which: str) -> ClientScores:
        if not found:
            return ClientScores(np.zeros(0), NOTHING, scored=self.task.scored)
        pairs = [(row[f"{which}accuracy"], row[f"{which}loss"]) for row in found.values()]
        accuracies, losses = np.array(pairs).T
        return ClientScores(accuracies, HELD_OUT, losses, np.array(list(found), np.int64), self.task.scored)


def check_deployable(config: Experiment) -> None:
    """Refuse what only a simulation can do.

    Raises:
        ConfigError: The experiment asks for it.
    """
    if config.network.delay != "none" or config.network.drop:
        raise ConfigError(
            "network.delay and network.drop simulate what happens to messages; on real machines it happens by itself. "
            "Leave them out of the experiment."
        )
    at_clients = [name for name in config.diagnose if name in AT_CLIENTS]
    if at_clients:
        raise ConfigError(
            f"diagnose={at_clients[0]} looks at the clients' data or at each of their models, which are at the sites; "
            "measure it in a simulation."
        )
    if config.save_samples:
        raise ConfigError("save_samples draws inputs that clients made; they stay at the sites. Leave it out.")
    at_sites = {
        "early_stopping": config.early_stopping is not None,
        "keep=best": config.keep == "best",
        f"objective={WORST}": config.objective == WORST,
    }
    for name in (name for name, requirement in at_sites.items() if requirement):
        raise ConfigError(f"{name} looks at what clients hold out, which is at the sites. Leave it out.")
    if config.start_from is not None or config.base_run:
        raise ConfigError("start_from and base_run join simulated runs; a deployed run begins by itself.")
    if config.synthetic is not None:
        raise ConfigError("synthetic names images that were made before; sites make their own. Leave it out.")
