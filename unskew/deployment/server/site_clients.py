"""Clients of a deployed run: real sites replace simulated clients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from unskew.config.experiment import AT_CLIENTS, Experiment
from unskew.deployment.server.async_engine import AsyncFlowerEngine
from unskew.deployment.server.engine import FlowerEngine
from unskew.deployment.server.masked_engine import MaskedEngine
from unskew.deployment.server.membership import Membership
from unskew.deployment.server.sites import SiteManager
from unskew.deployment.server.sum_exchange import SiteExchange
from unskew.deployment.wire.context import WireContext
from unskew.deployment.wire.digests import arrays_digest
from unskew.deployment.wire.tensor_codec import encode_record
from unskew.engines.auto_select import EngineChoice
from unskew.engines.base import Engine
from unskew.errors import ConfigError
from unskew.methods.registry import method as method_of
from unskew.protocol.messages import Update
from unskew.runs.assembly import RunParts
from unskew.runs.simulated_clients import SimulatedClients
from unskew.runs.summary import client_metrics, client_rows
from unskew.simulation import personal_models
from unskew.simulation.client_scores import ClientScores
from unskew.simulation.evaluate import HELD_OUT, NOTHING, evaluated_clients
from unskew.simulation.network import Network, age_metrics
from unskew.sums.exchange import Exchange
from unskew.tasks.primary_metric import WORST


class SitesNetwork(Network):
    """Network of real sites: updates arrive in real time, and round metrics count failures.

    Args:
        network: Simulated network of the same run.
        engine: Engine that trains at the sites.
        asynchronous: Whether updates are accepted in later rounds, too.
        present: Presence of sites between rounds; None if all take part in the whole run.
    """

    def __init__(self, network: Network, engine: FlowerEngine, asynchronous: bool, present: Membership | None):
        super().__init__(0.0, network.seed, network.delays, network.store, network.device)
        self.engine = engine
        self.sites = engine.sites
        self.asynchronous = asynchronous
        self.present = present

    @property
    def in_flight(self) -> frozenset[int]:
        """Clients that cannot be drawn: those with a pending update, and those whose site is missing or excluded."""
        if self.present is not None:
            self.present.wait()
            return frozenset(self.engine.in_flight | self.present.away())
        return frozenset(self.engine.in_flight | {*self.sites.excluded} if self.asynchronous else ())

    @property
    def awaited(self) -> frozenset[int]:
        """Clients with a pending update; unlike ``in_flight``, this waits for no site."""
        return frozenset(self.engine.in_flight)

    def deliver(self, round: int, results: Iterable[Update]) -> Iterator[Update]:
        """Yield all updates that have arrived."""
        if not self.asynchronous:
            return super().deliver(round, results)
        arrivals = [*results]
        self.ages = [round - update.origin_round for update in arrivals]
        return iter(arrivals)

    def metrics(self) -> dict[str, Any]:
        """Return the round metrics: failures so far, sites present, and delays of updates."""
        counts = {f"sites_{name}": count for name, count in self.sites.counts.items() if count}
        excluded = {"sites_excluded": len(self.sites.excluded)} if self.sites.excluded else {}
        presence = {} if self.present is None else {"sites_present": self.present.count}
        late = age_metrics(self.ages, len(self.engine.in_flight)) if self.asynchronous else {}
        return {**late, **self.engine.metrics(), **presence, **counts, **excluded}


class SiteClients(SimulatedClients):
    """Clients at real sites instead of simulated ones.

    Args:
        parts: Parts of the run; its network is replaced by that of the sites.
        sites: Connected sites.
        wire_context: Wire context, for encoding and validating messages.
        budget: Fields of the clients' local budget that data rules have changed.
        roster: Public signing keys, by client.
        asynchronous: Whether updates are accepted in later rounds, too.
        present: Presence of sites between rounds; None if all take part in the whole run.

    Attributes:
        parts: Parts of the run, with the network of these sites.
    """

    parts: RunParts

    def __init__(
        self,
        parts: RunParts,
        sites: SiteManager,
        wire_context: WireContext,
        budget: dict[str, int],
        roster: Mapping[int, Any],
        asynchronous: bool = False,
        present: Membership | None = None,
    ):
        masked = parts.config.secure_aggregation == "required"
        kind = MaskedEngine if masked else AsyncFlowerEngine if asynchronous else FlowerEngine
        self.engine = kind(parts.setup, sites, parts.server, wire_context, budget, roster, parts.folder)
        self.network = SitesNetwork(parts.network, self.engine, asynchronous, present)
        super().__init__(replace(parts, network=self.network))
        self.sites = sites
        self.complete = True  # whether the whole model is averaged in this round

        sites.warn_with(parts.recorder.warn)

    def make_engine(self, resume: bool) -> tuple[Engine, EngineChoice]:
        """Return the engine that trains at the sites."""
        server = self.parts.server
        for client in [*server.clients.sent]:
            server.clients.drop_sent(client)  # these updates were pending when the run was interrupted
        return self.engine, EngineChoice("flower", 0)

    def exchange(self) -> Exchange:
        """Return an exchange of sums over the training rows of all sites."""
        sizes = {k: self.parts.server.setup.federation_info.size(k) for k in sorted(self.sites.nodes)}
        masked = self.parts.config.secure_aggregation == "required"
        return SiteExchange(self.sites, sizes, masked, self.engine.roster)

    def sends_model(self, t: int) -> bool:
        """Return whether sites send their whole model in round ``t``: in the last one, if the result needs it."""
        server = self.parts.server
        _, up = server.broadcaster.exchange.slices(server.state.rules, t, 0, None)
        self.complete = up is None or sum(span.stop - span.start for span in up) == self.parts.spec.size
        return t + 1 == self.parts.config.rounds and not self.complete

    def evaluates(self, t: int) -> bool:
        """Return whether the model is evaluated after round ``t``.

        It is not while parts of the evaluated model exist only at the sites.
        """
        last = t + 1 == self.parts.config.rounds
        return last or (super().evaluates(t) and (not self.parts.server.broadcaster.wants_models or self.complete))

    def reachable(self) -> list[int]:
        """Return the clients whose sites are present."""
        away = self.network.present.away() if self.network.present is not None else ()
        return [client for client in super().reachable() if client not in away and client not in self.sites.excluded]

    def begin(self, start: int) -> None:
        """Log the start of the run, or its resumption after ``start`` rounds."""
        if start < self.parts.config.rounds:
            self.parts.server.selection.use_mean(None)  # it is outdated if the run was extended
        self.sites.round = start
        self.sites.log("resumed" if start else "started")
        self.sites.round = start + 1

    def finishing_round(self, t: int, metrics: dict[str, Any]) -> None:
        """Log the updates skipped in round ``t``, and the digest of its model."""
        server = self.parts.server
        for client in server.aggregator.skipped.clients:
            self.sites.log("left out", client, reason="not finite")
        model = arrays_digest(encode_record("model", {"v": server.state.v, "b": server.state.b}))
        self.sites.log("round finished", updates=metrics.get("updates"), digest=model)

    def finished_round(self, t: int, last: bool) -> None:
        """Log the end of the run, or stop between two rounds if the operator requested it."""
        if last:
            self.sites.log("finished")
            return
        self.sites.check_stopped(between_rounds=True)
        self.sites.round = t + 2

    def saved(self, rounds: int) -> None:
        """Log a checkpoint."""
        self.sites.log("checkpoint", rounds=rounds)

    def score(self, engine: Engine) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Evaluate the final model and the personal models at each site on its held-out samples."""
        parts = self.parts
        config = parts.config
        server = parts.server
        federation, most = parts.evaluator.federation, config.eval_clients
        ids = evaluated_clients(len(federation.clients), most, config.seed)
        away = self.network.present.away() if self.network.present is not None else ()
        who = [k for k in ids if len(federation.clients[k].y_test) and k not in away]
        tunes = personal_models.has_fine_tuning(parts.method)
        with_own = personal_models.has_personal_models(parts.method, parts.spec)
        # The whole model is sent for evaluation, as in a simulation; with ``buffers: reset`` no client trains from its
        # buffers.
        final, create = server.selection.evaluated, server.broadcaster.final_broadcast
        model_for = server.broadcaster.model_for
        broadcasts = [
            replace(create(self.final_round, k, final), b=model_for(k, final)[1], down=None, report=False) for k in who
        ]
        personal_scores = self.engine.measure(broadcasts, with_own) if who else {}
        scores, own = self._scores(personal_scores, ""), self._scores(personal_scores, "own_") if with_own else None
        hidden = self.engine.wire_context.site_noise is not None  # sites do not report their class counts
        if not who and most and not tunes and not hidden:
            # Estimate from the accuracy per class, because the server knows each site's class counts.
            initial = (lambda clients: (model_for(k, final) for k in clients)) if parts.spec.others else None
            scores = parts.evaluator.evaluate_clients(*final, most, config.seed, initial)
        metrics = client_metrics(scores, own, parts.metrics, federation.client_names)
        return metrics, client_rows(federation, scores, own, server.clients.last_rounds)

    def _scores(self, found: dict[int, dict[str, float]], which: str) -> ClientScores:
        if not found:
            return ClientScores(np.zeros(0), NOTHING, scored=self.parts.task.scored)
        pairs = [(row[f"{which}accuracy"], row[f"{which}loss"]) for row in found.values()]
        accuracies, losses = np.array(pairs).T
        return ClientScores(accuracies, HELD_OUT, losses, np.array(list(found), np.int64), self.parts.task.scored)


def check_deployable(config: Experiment) -> None:
    """Validate that the configuration has no field that only a simulation supports.

    Args:
        config: Configuration of the run.

    Raises:
        ConfigError: If it has such a field.
    """
    if config.network.delay != "none" or config.network.drop or config.network.timed:
        raise ConfigError(
            "network.delay and network.drop simulate delayed and lost messages, and the other fields of network slow "
            "clients, which occur on real machines anyway. Remove them from the experiment."
        )
    if any(getattr(rule, "reproducible", False) for rule in method_of(config.method).rules):
        raise ConfigError(
            "reproducible=true computes noise from the seed, which every site knows. Remove it: on real machines, noise "
            "comes from the system's entropy."
        )
    if config.attack is not None:
        raise ConfigError("attack simulates hostile clients and is not supported over real sites. Remove it.")
    if config.unseen:
        raise ConfigError("unseen is not supported over real sites, because every site takes part. Remove it.")
    if config.shift is not None:
        raise ConfigError("shift changes simulated clients' inputs and is not supported over real sites. Remove it.")
    if config.harmonize.method != "none":
        raise ConfigError(
            f"harmonize={config.harmonize.method} is available in simulations only. Harmonize the tables of the sites before "
            "the run, or remove it."
        )
    at_clients = [name for name in config.diagnose if name in AT_CLIENTS]
    if at_clients:
        raise ConfigError(
            f"diagnose={at_clients[0]} needs the clients' data or their local models, which stay at the sites; "
            "measure it in a simulation."
        )
    if config.save_samples:
        raise ConfigError("save_samples needs samples that clients generate, which stay at the sites. Remove it.")
    at_sites = {
        "early_stopping": config.early_stopping is not None,
        "keep=best": config.keep == "best",
        f"objective={WORST}": config.objective == WORST,
    }
    for name in (name for name, requirement in at_sites.items() if requirement):
        raise ConfigError(f"{name} needs the clients' held-out samples, which stay at the sites. Remove it.")
    if config.start_from is not None or config.base_run:
        raise ConfigError("start_from and base_run are supported only in simulations. Remove them.")
    if config.synthetic is not None:
        raise ConfigError(
            "synthetic names a pre-generated data set; in a deployment sites generate their own. Remove it."
        )
