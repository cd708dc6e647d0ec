"""Metrics of models at a site: only these leave it, never predictions, and only for models that its ``site.yaml`` allows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from unskew.config.metrics import AUTO
from unskew.deployment.common.small_counts import MIN_COUNT, reported_support
from unskew.deployment.site.config import EvaluationRules
from unskew.deployment.site.experiments import is_limited
from unskew.deployment.site.received import ReceivedData
from unskew.deployment.site.state import SiteState, read_reply, write_reply
from unskew.deployment.site.trainer import SiteTrainer
from unskew.deployment.wire.digests import request_digest
from unskew.deployment.wire.fields import read_number, read_text
from unskew.deployment.wire.frames import Frame
from unskew.deployment.wire.messages import read_accepted
from unskew.deployment.wire.tensor_codec import (
    InvalidMessageError,
    check_records,
    check_tensor,
    decode_record,
    encode_record,
)
from unskew.engines.device import device_modes
from unskew.errors import ConfigError, UnskewError
from unskew.protocol.messages import Broadcast, ClientState
from unskew.runs.metrics import run_metrics
from unskew.simulation.evaluate import Evaluator, truth_and_scores
from unskew.simulation.personal_models import has_fine_tuning, has_personal_models, serving_model
from unskew.simulation.sampler import Sampler
from unskew.simulation.samplers.poisson import PoissonSampler
from unskew.sums.base import HeldOutScores
from unskew.tasks.base import Task
from unskew.tasks.classification import MOST_RECALLS
from unskew.tasks.intervals import LEVEL, colliding_end
from unskew.tasks.metrics import TWO_CLASSES, MetricSet
from unskew.tasks.primary_metric import RECALL


@dataclass(frozen=True)
class SiteEvaluation:
    """Replies to requests for the metrics of a model on the site's held-out samples.

    From the metrics of many chosen models, held-out samples could be reconstructed. Therefore every reply is stored on the
    site's disk: a repeated request gets the same one, and the number of replies per experiment is limited.

    Attributes:
        policy: What the site allows.
        folder: Folder of the stored replies for the experiment.
        work: Trainer of the experiment.
    """

    policy: EvaluationRules
    folder: Path
    work: SiteTrainer

    def reply(self, request: Frame, state: SiteState) -> Frame:
        """Reply with the metrics of a model, or with the reason why the site does not score it.

        Args:
            request: ``score``, with a model or the name of a stored one, or ``local``, to train the reference ``local``.
            state: State of the run at this site.

        Raises:
            InvalidMessageError: If the message is not valid.
        """
        try:
            return self._scored(request, state)
        except InvalidMessageError:
            raise
        except UnskewError as error:
            return Frame("scored", {"client": self.work.site.client, "reason": str(error)})

    def _scored(self, request: Frame, state: SiteState) -> Frame:
        name, who = request.kind, f"The site {self.work.site.name}"
        if name == "score":
            name = read_text(request.config, "model")
            if name not in ("global", "personal", "foreign"):
                raise InvalidMessageError(f"it asks for the unknown model {name[:40]!r}")
        self._check_allowed(name, who)
        unshared = {key: value for key, value in request.config.items() if key != "share"}
        path = self.folder / request_digest(replace(request, config=unshared))
        stored = read_reply(path)
        if stored is None:
            self._check_number()
            stored = "", self._evaluated(name, request, state)
            write_reply(path, *stored)
        reply = stored[1]
        if request.config.get("share") is not True:
            return replace(reply, arrays={})
        if not self.policy.share_local:
            reason = f"{who} does not share its local model. Its site.yaml needs evaluate.share_local: true."
            return replace(reply, config={**reply.config, "withheld": reason}, arrays={})
        return reply

    def admit_sum(self, key: str) -> None:
        """Validate that the site scores the global model for a sum over all sites, and count it.

        Args:
            key: Digest of the requests.

        Raises:
            ConfigError: If it does not.
        """
        who = f"The site {self.work.site.name}"
        if self.work.config.secure_aggregation != "required" or self.work.noise is not None:
            raise ConfigError(f"{who} sends sums over its predictions only under secure aggregation, without noise.")
        self._check_allowed("global", who, masked=True)
        if not (self.folder / key).exists():
            self._check_number()
            write_reply(self.folder / key, "", Frame("sums"))

    def _check_number(self) -> None:
        """Validate that the site may score one more model (raises ``ConfigError`` otherwise)."""
        most = self.policy.max_models
        if self.folder.is_dir() and len([*self.folder.iterdir()]) >= most:
            raise ConfigError(
                f"The site {self.work.site.name} has scored {most} models of this experiment, the evaluate.max_models of its "
                "site.yaml."
            )

    def _check_allowed(self, name: str, who: str, masked: bool = False) -> None:
        """Validate that the site may score a model (raises ``ConfigError`` otherwise)."""
        work = self.work
        if work.config.secure_aggregation == "required" and not masked:
            raise ConfigError(f"{who} sends metrics of this experiment only as masked sums over all sites.")
        if name not in self.policy.allow:
            allowed = ", ".join(dict.fromkeys([*self.policy.allow, name]))
            raise ConfigError(f"{who} does not score {name} models. Its site.yaml needs evaluate.allow: [{allowed}].")
        if name == "local" and is_limited(work.config, work.method):
            raise ConfigError(
                f"{who} trains no local model, because it would lack the privacy of {work.config.method}."
            )
        if not masked and not len(work.data.y_test):
            raise ConfigError(
                f"{who} has no held-out samples. Set holdout in the experiment, or give its data a test split."
            )

    def _evaluated(self, name: str, request: Frame, state: SiteState) -> Frame:
        """Compute the metrics of a model; those of the reference ``local`` are stored with the model."""
        work = self.work.alone if name in ("local", "foreign") else self.work
        v, b = train_alone(work) if name == "local" else requested_model(work, name, request, state)
        federation, y = work.original, work.data.y_test
        metric_set = every_metric(work, read_number(request.config, "level", 0.5, 0.9999))
        evaluator = Evaluator(work.spec, federation, work.evaluator.task, work.device, metric_set)
        score = evaluator.evaluate_client(v, b, work.data, each=True)
        metrics = {federation.objective.scored: score.accuracy, "loss": score.loss, **score.metrics}
        support: list[str] = []
        if work.reference.counted:
            counts = federation.objective.counts(y.cpu(), work.reference.counted).tolist()
            support = reported_support(counts, MIN_COUNT, exclusive=y.dim() == 1)
        for label, count in zip(federation.names, support, strict=False):
            if not count.isdigit():  # the number of samples could follow from the value
                metrics = {key: value for key, value in metrics.items() if not is_recall(key, label)}
        names = [name for name in metric_names(federation.objective, metric_set) if name in metrics]
        config = {"client": work.site.client, "num_samples": len(y), "support": support, "metrics": names}
        return Frame("scored", config, metrics, encode_record("model", {"v": v, "b": b}) if name == "local" else {})


def requested_model(work: SiteTrainer, name: str, request: Frame, state: SiteState) -> tuple[Tensor, Tensor]:
    """Return the model of a request, ``v [d]`` and ``b [m]``, with what the site keeps of it.

    Args:
        work: Trainer of the experiment.
        name: ``global``, ``personal`` or ``foreign``.
        request: Message with the model.
        state: State of the run at this site.

    Raises:
        ConfigError: If the method has no personal models.
        SiteStateLostError: If the site's part of the model is lost.
    """
    spec = work.spec
    check_records(request, ("model",))
    v, b = check_model(decode_record(request, "model"), work)
    if name == "foreign":
        return v, b
    own = name == "personal"
    if own and has_fine_tuning(work.method):
        return state.personal()
    if own and not has_personal_models(work.method, spec):
        raise ConfigError(f"{work.config.method} has no personal models.")
    kept = ClientState()
    if own or work.config.buffers == "local":
        kept = state.after(read_accepted(request), forget=False)
    return serving_model(work.method, spec, work.config.buffers, kept, v, b, own)


def check_model(sent: Mapping[str, Tensor], work: SiteTrainer) -> tuple[Tensor, Tensor]:
    """Validate a received model and return it, ``v [d]`` and ``b [m]``.

    Args:
        sent: Tensors ``v`` and ``b`` of the message.
        work: Trainer of the experiment.

    Raises:
        InvalidMessageError: If the model does not have the size of the experiment's.
    """
    spec, norm = work.spec, work.wire_context.norm
    v = check_tensor("model/v", sent.get("v"), spec.flatten(), spec.size, norm)
    return v, check_tensor("model/b", sent.get("b"), spec.flatten_buffers(), sum(spec.buffer_sizes), norm)


def held_out_scores(work: SiteTrainer, v: Tensor, b: Tensor) -> HeldOutScores:
    """Return the scores of the global model on the site's held-out samples, for masked sums.

    Args:
        work: Trainer of the experiment.
        v: Parameters, ``[d]``.
        b: Buffers, ``[m]``.

    Raises:
        InvalidMessageError: If the model does not have the size of the experiment's.
    """
    data, task, empty = work.data, work.evaluator.task, np.zeros(0, np.int64)
    v, b = check_model({"v": v, "b": b}, work)
    if not len(data.y_test):
        tally = task.empty_tally(work.original.classes)
        sums, p, y = (
            torch.zeros(3 + tally.numel(), dtype=torch.float64),
            np.zeros((0, work.original.classes)),
            np.zeros(0, int),
        )
        return HeldOutScores(sums, p, y, y, *task.held_out_sums(np.zeros((0, *data.y.shape[1:])), p))
    sums, logits = work.evaluator.client_sums(v, b, data)
    if task.ranked:
        sums[1] = 0  # single rows are not correct or wrong
        return HeldOutScores(
            sums, np.zeros((0, 0)), empty, empty, *task.held_out_sums(*truth_and_scores(task, logits, data.y_test))
        )
    if "one_class" not in task.provides:
        return HeldOutScores(sums, np.zeros((0, 0)), empty, empty)
    y, p = truth_and_scores(task, logits, data.y_test)
    return HeldOutScores(sums, p, y, every_metric(work, LEVEL).decided(p))


def every_metric(work: SiteTrainer, level: float) -> MetricSet:
    """Return all metrics of the experiment's task, with intervals where it has them.

    Args:
        work: Trainer of the experiment.
        level: Level of the intervals.
    """
    federation, task = work.original, work.original.objective
    recalls = [f"{RECALL}{name}" for name in federation.names]
    few = federation.classes <= MOST_RECALLS and colliding_end(recalls, recalls) is None
    left_out = [*([] if few else ["recall"]), *TWO_CLASSES * (federation.classes != 2)]
    names = [name for name in task.requestable if name not in left_out]
    config = work.config.model_copy(update={"metrics": tuple(names), "objective": AUTO})
    computed = run_metrics(config, federation).computed
    return replace(computed, with_intervals=task.names_with_intervals(metric_names(task, computed)), level=level)


def metric_names(task: Task, computed: MetricSet) -> tuple[str, ...]:
    """Return the names of all metrics of a task, each once.

    Args:
        task: The task.
        computed: Metrics that are computed from predictions.
    """
    return tuple(dict.fromkeys((task.scored, "loss", *task.extra_metrics, *task.metric_names(computed))))


def is_recall(key: str, label: str) -> bool:
    """Return whether a key names the recall of a class, or an end of its interval.

    Args:
        key: Name of a metric or of an end of its interval.
        label: Name of the class.
    """
    return key in (f"{RECALL}{label}", f"{RECALL}{label}_low", f"{RECALL}{label}_high")


def train_alone(work: SiteTrainer) -> tuple[Tensor, Tensor]:
    """Train the reference ``local`` with the run's seed and budget, as a simulation does.

    Args:
        work: Trainer of the reference.

    Returns:
        Model ``[d]`` and buffers ``[m]``.
    """
    trainer, spec, state = work.trainer(ReceivedData(Path(), ()), None, None), work.spec, ClientState()
    plan, client = trainer.setup.plan, work.site.client
    # A site does not have the state of other samplers, so the reference takes part as often as with fixed cohorts.
    drawn_alone = PoissonSampler() if plan.sampling == "poisson" else None
    sampler = Sampler(plan.clients, plan.participation, work.config.seed, drawn_alone)
    v, b = spec.flatten(), spec.flatten_buffers()
    with device_modes(work.device, work.config.precision):
        for round in range(plan.rounds):
            if client in sampler.draw(round):
                broadcast = Broadcast(round, client, v, b, download={}, state=state, weight=1.0, down=(), up=())
                update = trainer.train(broadcast)
                state = state.updated(update.state) if update.is_finite() else state
    return (v if state.model is None else state.model), (b if state.buffers is None else state.buffers)
