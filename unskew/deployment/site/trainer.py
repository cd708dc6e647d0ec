"""A run as one site carries it out: it keeps data and model loaded, trains, and measures on its own samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation
from unskew.deployment.wire.data_schema import Reference
from unskew.deployment.wire.tensor_codec import Nonsense, blobs, picked
from unskew.deployment.site.data import Holding, OnlyOne
from unskew.deployment.secagg.ledger import Ledger
from unskew.deployment.secagg.client import Masks
from unskew.deployment.wire.messages import (
    Terms,
    cast_in,
    digest_of_cast,
    digest_of_request,
    text,
    update_frame,
    whole,
)
from unskew.deployment.site.received import Received
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.state import SiteState
from unskew.deployment.wire.frames import Frame
from unskew.engines.base import Setup
from unskew.engines.local_trainer import LocalTrainer
from unskew.methods.registry import method as method_of
from unskew.protocol.messages import Broadcast, Update
from unskew.runs.validation import weights_of
from unskew.runs.build_model import as_wanted, initial_spec
from unskew.simulation import personal_models
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.personal_models import serving
from unskew.simulation.parameter_slices import complement
from unskew.tasks.registry import TASKS


def held(site: SiteConfig, examples: int, held_out: int) -> dict[str, Any]:
    """What the server is told of how much a site holds."""
    return {"client": site.client, "name": site.name, "examples": examples, "held_out": held_out}


class Work:
    """One experiment at one site.

    Args:
        site: The site.
        config: The experiment.
        reference: What the server says of the data.
        holding: The site's samples.

    Raises:
        ConfigError: The experiment cannot be carried out here.
        DataError: The site's data do not fit.
    """

    def __init__(self, site: SiteConfig, config: Experiment, reference: Reference, holding: Holding):
        self.site, self.config, self.reference = site, config, reference
        self.device = torch.device(site.device)
        self.method = method_of(config.method)
        federation = holding.federation(reference, config.loss)
        self.spec = initial_spec(config, federation, None, self.method).to(self.device)
        federation = as_wanted(federation, self.spec)
        self.original, self.total = federation, holding.total
        self.terms = Terms(self.method, self.spec, config.buffers, site.limits.norm, int(site.limits.megabytes * 1e6))
        self.evaluator = Evaluator(self.spec, federation, federation.objective.unweighted, self.device)
        self._trainer: tuple[Any, LocalTrainer] | None = None
        self._replied: tuple[str, Frame] | None = None

    @property
    def data(self) -> ClientData:
        """The site's samples before the method changed them."""
        return self.original.clients[self.site.client]

    def with_data(self, data: ClientData) -> Federation:
        """The federation in which this site has other samples."""
        return replace(self.original, clients=OnlyOne(data, self.total))

    def facts(self, data: ClientData) -> Frame:
        """What the server is told of some of the site's samples: how many, of which classes."""
        counts = torch.zeros(0, dtype=torch.int64)
        if self.reference.counted:
            counts = TASKS[self.reference.task].counts(data.y.cpu(), self.reference.counted).to(torch.int64)
        config = {**held(self.site, data.examples, len(data.y_test)), "parameters": self.spec.size}
        return Frame("facts", config, {}, blobs("facts", {"class_counts": counts}))

    def trainer(self, received: Received, counted: int | None, epochs: int | None) -> LocalTrainer:
        """What trains on the site's samples and on what it received before the first round."""
        key = (received.identity, counted, epochs)
        if self._trainer is not None and self._trainer[0] == key:
            return self._trainer[1]
        training = self.config.training
        if counted is not None:
            training = replace(training, counted=tuple(counted for _ in range(self.total)))
        if epochs is not None:
            training = replace(training, local_epochs=epochs)
        federation = self.with_data(received.applied(self.data))
        setup = Setup(
            self.spec,
            federation,
            self.method.client,
            federation.objective,
            training,
            self.config.seed,
            self.device,
            self.config.buffers,
            received.common,
        )
        self._trainer = key, LocalTrainer(setup)
        return self._trainer[1]

    def trained(self, asked: Frame, state: SiteState, received: Received) -> tuple[Update, Broadcast]:
        """Train from a broadcast; what stays is kept until it is known whether the update was taken in."""
        cast = self._cast(asked, state, training=True)
        update = self._trainer_for(asked, received).train(cast)
        state.keep(cast.round, cast.state.updated(update.state))
        return update, cast

    def answered(self, asked: Frame, state: SiteState, received: Received, masks: Masks, ledger: Ledger) -> Frame:
        """Reply to a broadcast with the update, or, if only sums may be seen, that this site is ready to mask it.

        A repeated broadcast gets the same reply without training again.
        """
        if self.config.secure_aggregation != "required":
            key = digest_of_request(asked)
            if self._replied is None or self._replied[0] != key:
                update, cast = self.trained(asked, state, received)
                self._replied = key, update_frame(update, cast, self.terms, {})
            return self._replied[1]
        run, session = text(asked.config, "run"), text(asked.config, "session")
        before = masks.again(run, session)
        if before is not None:
            return before
        update, cast = self.trained(asked, state, received)
        self._check_weight(asked, update)
        delta = picked(update.delta, cast.up) if self.terms.sends_model else None
        return masks.begin(session, update, delta, digest_of_cast(asked, self.terms), ledger)

    def _check_weight(self, asked: Frame, update: Update) -> None:
        """Validate the weight and budget that the server gives: with odd ones a sum would show one site's update."""
        budget = {name for name in ("counted", "local_epochs") if name in asked.config}
        counted = whole(asked.config, "counted") if "counted" in budget else update.examples
        good = self.data.examples <= counted <= update.examples and (not budget or bool(self.method.data))
        uniform = weights_of(self.config, self.method) == "uniform"
        expected = {1.0} if uniform else {float(update.examples), float(counted)}
        if not good or update.weight not in expected:
            raise Nonsense(
                f"the weight {update.weight:g} or the budget is not that of the experiment and of {self.site.name}"
            )

    def _trainer_for(self, asked: Frame, received: Received) -> LocalTrainer:
        """The trainer with the budget that the server names, where a method before the first round has changed it."""
        counted, epochs = (whole(asked.config, n) if n in asked.config else None for n in ("counted", "local_epochs"))
        return self.trainer(received, counted, epochs)

    def _cast(self, asked: Frame, state: SiteState, training: bool = False) -> Broadcast:
        accepted = None if asked.config.get("accepted") == -1 else whole(asked.config, "accepted")
        state.check_round(whole(asked.config, "round"), training)
        cast = cast_in(asked, self.terms, state.after(accepted, forget=training))
        if cast.client != self.site.client:
            raise Nonsense(f"it is for client {cast.client}, but this site is client {self.site.client}")
        return cast

    def measured(self, asked: Frame, state: SiteState, received: Received) -> Frame:
        """What the model is worth on what the site holds out, and what its own is; figures are all that leave."""
        cast = self._cast(asked, state)
        stays, v, b, mode = cast.state, cast.v, cast.b, self.config.buffers
        figures: dict[str, float] = {}
        score = self.evaluator.one(*serving(self.method, self.spec, mode, stays, v, b, own=False), self.data)
        figures["accuracy"], figures["loss"] = score.accuracy, score.loss
        if asked.config.get("own") is True:
            mine = serving(self.method, self.spec, mode, stays, v, b, own=True)
            if personal_models.tunes(self.method):
                slices = () if self.method.sync is None else self.method.sync.own(self.spec)
                down = complement(slices, self.spec.size) if slices else None
                start = b if mode == "average" else self.spec.flatten_buffers()
                update = self._trainer_for(asked, received).train(replace(cast, b=start, down=down, report=True))
                mine = (update.report["v"], update.buffers) if update.is_finite() else mine
            own = self.evaluator.one(*mine, self.data)
            figures["own_accuracy"], figures["own_loss"] = own.accuracy, own.loss
        return Frame("scores", {"client": self.site.client}, figures)
