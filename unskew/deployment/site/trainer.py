"""Training and evaluation of one experiment at one site, with data and model kept loaded."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from unskew.config.experiment import Experiment
from unskew.data.federation import ClientData, Federation
from unskew.deployment.common.client_view import SingleClientView
from unskew.deployment.common.data_schema import DataSchema
from unskew.deployment.secagg.protocol import min_sites
from unskew.deployment.site.checkpoint import SiteCheckpoint
from unskew.deployment.site.config import SiteConfig
from unskew.deployment.site.data import SiteData
from unskew.deployment.site.ledger import DataLedger
from unskew.deployment.site.masking import SecAggClient
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import SiteState
from unskew.deployment.site.stored_update import update_from_tensors, update_to_tensors
from unskew.deployment.wire.context import WireContext, shared_buffers
from unskew.deployment.wire.digests import broadcast_digest, request_digest
from unskew.deployment.wire.fields import read_integer, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import decode_broadcast, encode_update, read_accepted
from unskew.deployment.wire.tensor_codec import InvalidMessageError, encode_record
from unskew.engines.base import EngineConfig
from unskew.engines.device import device_modes
from unskew.engines.local_trainer import LocalTrainer
from unskew.errors import ConfigError
from unskew.measurements.gradient_probe import GradientProbe
from unskew.methods.registry import method as method_of
from unskew.protocol.client_state_files import encode_tensors
from unskew.protocol.messages import Broadcast, ClientState, Tensors, Update, flatten_records, unflatten_records
from unskew.protocol.payload import gather_slices
from unskew.protocol.rules import most_final_steps, survey_times
from unskew.runs.build_model import initial_spec, match_model_input_range
from unskew.runs.round_plan import make_round_plan
from unskew.runs.validation import resolve_weighting
from unskew.secret_draws import SystemEntropy
from unskew.simulation import personal_models
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.parameter_slices import complement_slices
from unskew.simulation.personal_models import serving_model
from unskew.simulation.sampler import Sampler
from unskew.tasks.registry import TASKS

HIDDEN_SIZE = 1
"""Number of samples that a site reports if its number of samples must stay private."""


def size_report(site: SiteConfig, num_samples: int, held_out: int) -> dict[str, Any]:
    """Return the fields that report a site's client number, name and numbers of samples.

    Args:
        site: Configuration of the site.
        num_samples: Number of training samples.
        held_out: Number of held-out samples.
    """
    return {"client": site.client, "name": site.name, "num_samples": num_samples, "held_out": held_out}


class SiteTrainer:
    """Trainer of one experiment at one site.

    Args:
        site: Configuration of the site.
        config: Configuration of the experiment.
        reference: Data schema of the server.
        samples: The site's samples.

    Raises:
        ConfigError: If the experiment cannot run here.
        DataError: If the site's data do not fit the experiment.
    """

    def __init__(self, site: SiteConfig, config: Experiment, reference: DataSchema, samples: SiteData):
        self.site = site
        self.config = config
        self.reference = reference
        self.samples = samples
        self.device = torch.device(site.device)
        self.method = method_of(config.method)
        federation = samples.federation(reference, config.loss)
        every = initial_spec(config, federation, None, self.method)
        buffers = shared_buffers(config.buffers, every)
        self.spec = every.of_client(site.client).to(self.device)
        self.spec.others = ()  # those of other sites
        federation = match_model_input_range(federation, self.spec)
        self.original, self.total = federation, samples.total
        largest, plan = int(site.limits.max_message_mb * 1e6), make_round_plan(config, self.total, self.method)
        self.wire_context = WireContext(self.method, self.spec, buffers, site.limits.max_norm, largest, plan)
        self.noise = self.wire_context.site_noise
        self.private = any(rule.poisson_batches for rule in self.method.client)
        self.evaluator = Evaluator(self.spec, federation, federation.objective.unweighted, self.device)
        self._trainer: tuple[Any, LocalTrainer] | None = None
        self._replied: tuple[str, Frame] | None = None
        self._received: tuple[str, str] = ("", "")
        cohort = Sampler(self.total, config.participation, config.seed).size
        self.min_sites = min_sites(cohort, self.noise)

    @property
    def data(self) -> ClientData:
        """The site's samples before data rules were applied."""
        return self.original.clients[self.site.client]

    @cached_property
    def alone(self) -> SiteTrainer:
        """Trainer of the reference ``local`` instead of the experiment's method."""
        fields = {"method": "local", "buffers": "average", "client_weighting": "auto"}
        return SiteTrainer(self.site, self.config.model_copy(update=fields), self.reference, self.samples)

    def with_data(self, data: ClientData) -> Federation:
        """Return the federation with other samples for this site."""
        return replace(self.original, clients=SingleClientView(data, self.total))

    def initial_gradient(self) -> tuple[torch.Tensor, float]:
        """Return the mean gradient of the training samples at the initial model, ``[d]``, and the variance of gradients."""
        v, b = self.spec.flatten().to(self.device), self.spec.flatten_buffers().to(self.device)
        with device_modes(self.device, self.config.precision):
            probe = GradientProbe(self.spec, self.original.objective, self.original, v, b)
            moments = probe.moments(self.data.x, self.data.y)
        return moments.mean, moments.variance

    def class_counts(self) -> torch.Tensor:
        """Return the number of training samples of each class or label, ``[C]``; empty if there are none."""
        return self.count_classes(self.data)

    def count_classes(self, data: ClientData) -> torch.Tensor:
        """Return the number of samples of each class or label of some data."""
        if not self.reference.counted:
            return torch.zeros(0, dtype=torch.int64)
        return TASKS[self.reference.task].counts(data.y.cpu(), self.reference.counted).to(torch.int64)

    def client_info(self, data: ClientData) -> Frame:
        """Create a report of samples for the server: their number, class counts, and the size of the model."""
        needed = callable(self.method.weights)  # else the server learns class counts only from sums
        counts = {"class_counts": self.count_classes(data)} if needed and self.reference.counted else {}
        sizes = data.num_samples, len(data.y_test)
        if self.noise is not None:  # nothing that depends on the samples
            sizes = HIDDEN_SIZE, 0
        config = {**size_report(self.site, *sizes), "parameters": self.spec.size}
        return Frame("client_info", config, {}, encode_record("client_info", counts))

    def trainer(self, received: ReceivedData, counted: int | None, epochs: int | None) -> LocalTrainer:
        """Return the trainer for the site's samples and the data received before the first round.

        Args:
            received: Data received before the first round.
            counted: Number of samples on which the local budget is based, or None.
            epochs: Number of local epochs, if a data rule changed it.
        """
        key = (received.identity, counted, epochs)
        if self._trainer is not None and self._trainer[0] == key:
            return self._trainer[1]
        training = self.config.training
        if counted is not None:
            training = replace(training, counted=tuple(counted for _ in range(self.total)))
        if epochs is not None:
            training = replace(training, local_epochs=epochs)
        federation = self.with_data(received.applied(self.data))
        setup = EngineConfig(
            self.spec,
            federation,
            self.method.client,
            federation.objective,
            training,
            self.config.seed,
            self.device,
            self.config.buffers,
            received.common,
            plan=make_round_plan(self.config, self.total, self.method),
            keeps_encoded=True,
            secret=SystemEntropy(),
        )
        size = federation.num_samples(self.site.client)
        fewest = self.site.statistics.min_count
        if setup.validation and size - setup.num_trained(size) < fewest:
            raise ConfigError(
                f"{self.config.method} reports losses on {size - setup.num_trained(size)} validation samples of the site "
                f"{self.site.name}, and losses on few samples reveal them. Use a larger share validation, or set "
                f"statistics.min_count in site.yaml, which is {fewest}."
            )
        self._trainer = key, LocalTrainer(setup)
        return self._trainer[1]

    def trained(self, request: Frame, state: SiteState, received: ReceivedData) -> tuple[Update, Broadcast]:
        """Train from a broadcast and store the new state, until the server reports whether it accepted the update.

        Args:
            request: Message with the broadcast.
            state: State of the run at this site.
            received: Data received before the first round.
        """
        broadcast = self._read_broadcast(request, state, training=True)
        self.wire_context.check_request(broadcast)
        checkpoint = SiteCheckpoint(self.site, state.folder, request, broadcast.state)
        with device_modes(self.device, self.config.precision):
            update = self._trainer_for(request, received).train(broadcast, checkpoint)
        # With noise at the sites, an update that is not finite counts as zero, and the server must not learn of it.
        usable = self.noise is None or update.is_finite()
        state.keep(broadcast.round, broadcast.state.updated(update.state) if usable else broadcast.state)
        if self.private or self.noise is not None:
            checkpoint.remove()  # the reply is stored instead; other methods may have to train the last steps again
        return update, broadcast

    def without_data(self, upload: dict[str, Tensors], round: int) -> Update:
        """Return an update that contains nothing that depends on the samples, except uploads with noise.

        Args:
            upload: Uploads with noise, by rule and name.
            round: Number of the round, from 0.
        """
        b, none = self.spec.flatten_buffers(), torch.zeros(0)
        return Update(self.site.client, round, HIDDEN_SIZE, 1.0, none, b, upload, ClientState(), {})

    def reply_to_train(
        self, request: Frame, state: SiteState, received: ReceivedData, masks: SecAggClient, ledger: DataLedger
    ) -> Frame:
        """Reply to a broadcast with the update, or, under secure aggregation, with the readiness to mask it.

        A repeated broadcast gets the same reply without training again.

        Args:
            request: Message with the broadcast.
            state: State of the run at this site.
            received: Data received before the first round.
            masks: Secure aggregation of this site.
            ledger: Record of the sums that this site has opened.
        """
        self._check_agreed_round(request)
        if self.config.secure_aggregation != "required":
            key = request_digest(request)
            round = read_integer(request.config, "round")
            if self.private:
                stored = state.reply(round, key)
                if stored is not None:
                    return stored
            if self._replied is None or self._replied[0] != key:
                update, broadcast = self.trained(request, state, received)
                self._replied = key, encode_update(update, broadcast, self.wire_context)
            if self.private:
                state.keep_reply(round, key, self._replied[1])
            return self._replied[1]
        run, session = read_text(request.config, "run"), read_text(request.config, "session")
        before = masks.again(run, session)
        if before is not None:
            return before
        if self._received[0] != received.identity:
            self._received = received.identity, received.digest()
        accepted, round = read_accepted(request), read_integer(request.config, "round")
        state.check_round(round, new=False)
        before_training = hashlib.sha256(encode_tensors(state.after(accepted, forget=False).tensors())).hexdigest()
        digest = broadcast_digest(request, self.wire_context, state.known(accepted), self._received[1], before_training)
        if self.noise is not None:
            update = self._noisy(request, state, received, digest.signed, ledger)
            state.keep_known(accepted, round, digest.known)
            return masks.begin(session, update, None, digest, ledger, self.min_sites)
        if self.private:
            update, delta = self._private_update(request, state, received, digest.signed)
        else:
            update, delta = self._new_update(request, state, received)
        state.check_start(round, digest)
        state.keep_known(accepted, round, digest.known)
        return masks.begin(session, update, delta, digest, ledger, self.min_sites)

    def _new_update(
        self, request: Frame, state: SiteState, received: ReceivedData
    ) -> tuple[Update, torch.Tensor | None]:
        """Return an update for a masked sum, and the slices of the model that it contains, if any."""
        update, broadcast = self.trained(request, state, received)
        self._check_weight(request, update)
        return update, gather_slices(update.delta, broadcast.up) if self.wire_context.sends_model else None

    def _private_update(
        self, request: Frame, state: SiteState, received: ReceivedData, digest: str
    ) -> tuple[Update, torch.Tensor | None]:
        """Return what ``_new_update`` returns, with noise; for a repeated broadcast the same, from the disk."""
        round = read_integer(request.config, "round")
        tensors = state.noisy(round, digest)
        if tensors is None:
            tensors = update_to_tensors(*self._new_update(request, state, received))
            state.keep_noisy(round, digest, tensors)
        return update_from_tensors(tensors, self.site.client, round)

    def _noisy(
        self, request: Frame, state: SiteState, received: ReceivedData, digest: str, ledger: DataLedger
    ) -> Update:
        """Return this site's contribution with noise; for a repeated broadcast the same one, from the disk."""
        round = read_integer(request.config, "round")
        tensors = state.noisy(round, digest)
        if tensors is None:
            update, _ = self.trained(request, state, received)
            self._check_weight(request, update)
            tensors = flatten_records("upload", update.upload)
            ledger.begin()  # others may open the sum without this site
            state.keep_noisy(round, digest, tensors)
        return self.without_data(unflatten_records("upload", tensors), round)

    def _check_weight(self, request: Frame, update: Update) -> None:
        """Validate the weight and budget from the server, because unusual ones could reveal one site's update in a sum."""
        budget = {name for name in ("counted", "local_epochs") if name in request.config}
        counted = read_integer(request.config, "counted") if "counted" in budget else update.num_samples
        good = self.data.num_samples <= counted <= update.num_samples and (not budget or bool(self.method.data))
        uniform = resolve_weighting(self.config, self.method) == "uniform"
        if not good or update.weight != (1 if uniform else self.data.num_samples):
            raise InvalidMessageError(
                f"the weight {update.weight:g} or the budget differs from that of the experiment and {self.site.name}"
            )

    def _trainer_for(self, request: Frame, received: ReceivedData) -> LocalTrainer:
        """Return the trainer with the budget that the server sent, if a data rule has changed it."""
        counted, epochs = (
            read_integer(request.config, n) if n in request.config else None for n in ("counted", "local_epochs")
        )
        if (counted, epochs) != (None, None) and self.private:
            raise InvalidMessageError("it changes the number of local steps, which the private noise depends on")
        return self.trainer(received, counted, epochs)

    def _check_agreed_round(self, request: Frame) -> None:
        """Validate that a message is for one of the rounds of the experiment, or for the surveys after the last one."""
        done = read_integer(request.config, "round")
        after_last = request.kind == "evaluate" or request.config.get("closing") is True
        if request.config.get("closing") is True and not any("final" in survey_times(r) for r in self.method.client):
            raise InvalidMessageError("the method has no survey after the last round")
        # The number of a training after the last round tells how many were executed, see ``Training.final_round``.
        if done + (not after_last) > self.config.rounds * (1 + after_last):
            raise InvalidMessageError(
                f"round {done + 1} is beyond the {self.config.rounds} rounds that {self.site.name} has agreed to"
            )

    def _read_broadcast(self, request: Frame, state: SiteState, training: bool = False) -> Broadcast:
        accepted = read_accepted(request)
        state.check_round(read_integer(request.config, "round"), training)
        broadcast = decode_broadcast(request, self.wire_context, state.after(accepted, forget=training))
        if broadcast.client != self.site.client:
            raise InvalidMessageError(
                f"it is for client {broadcast.client}, but this site is client {self.site.client}"
            )
        return broadcast

    def reply_to_evaluate(self, request: Frame, state: SiteState, received: ReceivedData, ledger: DataLedger) -> Frame:
        """Evaluate the global and the personal model on the site's held-out samples; only metrics leave the site.

        Args:
            request: Message with the model.
            state: State of the run at this site.
            received: Data received before the first round.
            ledger: Record of the sums that this site has opened; masked runs allow one evaluation after each.
        """
        if self.noise is not None:
            raise InvalidMessageError(
                "metrics on held-out samples have no noise, and the experiment needs it at the sites"
            )
        self._check_agreed_round(request)
        broadcast = self._read_broadcast(request, state)
        masked = self.config.secure_aggregation == "required"
        most = 1 + (ledger.num_opened() if masked else self.config.rounds)
        state.check_evaluation(min(broadcast.round, self.config.rounds), request_digest(request), most)
        stays, mode = broadcast.state, self.config.buffers
        v, b = broadcast.v, broadcast.b
        metrics: dict[str, float] = {}
        score = self.evaluator.evaluate_client(
            *serving_model(self.method, self.spec, mode, stays, v, b, personal=False), self.data
        )
        metrics["accuracy"], metrics["loss"] = score.accuracy, score.loss
        if request.config.get("own") is True:
            own_model = serving_model(self.method, self.spec, mode, stays, v, b, personal=True)
            if personal_models.has_fine_tuning(self.method):
                slices = () if self.method.sync is None else self.method.sync.local_slices(self.spec)
                down = complement_slices(slices, self.spec.size) if slices else None
                untrained = most_final_steps(self.method.client) == 0
                start = b if mode == "average" or untrained else self.spec.flatten_buffers()
                local = replace(broadcast, b=start, down=down, report=True)
                with device_modes(self.device, self.config.precision):
                    update = self._trainer_for(request, received).train(local)
                own_model = (update.report["v"], update.buffers) if update.is_finite() else own_model
                state.keep_personal(*own_model)
            own = self.evaluator.evaluate_client(*own_model, self.data)
            metrics["own_accuracy"], metrics["own_loss"] = own.accuracy, own.loss
        return Frame("scores", {"client": self.site.client}, metrics)
