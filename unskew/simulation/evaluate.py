"""Evaluation of a model: on the global test set, and on each client's held-out data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import ArrayClients, iterate_batches
from unskew.data.federation import ClientData, Federation
from unskew.data.packing import PADDING
from unskew.engines.batches import InputNormalizer
from unskew.engines.cpu import num_threads
from unskew.models.execution import BoundModel
from unskew.models.spec import ModelSpec
from unskew.seeding import numpy_generator
from unskew.simulation.client_scores import ClientScores
from unskew.tasks.base import Task
from unskew.tasks.intervals import clip_interval, metric_interval, student_interval
from unskew.tasks.metrics import MetricSet
from unskew.tasks.primary_metric import metric_info

BATCH = 500
BATCH_ON_DEVICE = 10_000  # fewer kernels, each of which takes longer to launch than to execute
CELLS = 1 << 26  # values of the widest layer in memory at once: 256 MB in float32
HELD_OUT = "the clients' held-out data"
BY_CLASS = "the test set, weighted by the clients' classes"
NOTHING = "nothing"
MOST_BOOTSTRAPS = 100
"""Maximum number of clients whose metrics get intervals of the bootstrap."""
Models = Callable[[Sequence[int]], Iterable[tuple[Tensor, Tensor]]]
"""Maps client ids to the model ``v [d]`` and the buffers ``b [m]`` that serve each of them, in the same order."""


@dataclass(frozen=True)
class Score:
    """Primary metric (``accuracy``), mean loss and further task metrics over a set of samples."""

    accuracy: float
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)


class Evaluator:
    """Evaluates models in eval mode.

    Args:
        spec: Layout of the model.
        federation: Test set and clients.
        task: Task that defines loss and correctness.
        device: Device of the evaluation.
        metrics: Metrics computed from all predictions at once.
        first: Number of the first client, on which its architecture depends; above 0 for unseen clients.

    Attributes:
        architectures: Evaluator of each architecture, if clients have models of different ones.
    """

    def __init__(
        self,
        spec: ModelSpec,
        federation: Federation,
        task: Task,
        device: torch.device,
        metrics: MetricSet | None = None,
        first: int = 0,
    ):
        self.first = first
        self.federation = federation
        self.task = task
        self.metrics = MetricSet() if metrics is None else metrics
        self.model = BoundModel(spec, device)
        self.packed = getattr(spec.module, "packed", False)
        self.normalize = InputNormalizer(federation.normalization, federation.shape, spec.dtype, device)
        x, y = federation.test
        self.test = (x.to(device), y.to(device))
        self._test = [self.test[0]], [self.test[1]]
        self.batch = max(1, min(BATCH if device.type == "cpu" else BATCH_ON_DEVICE, CELLS // spec.widest))
        self.threads = torch.get_num_threads()  # engines may reduce the number of threads during training
        self.architectures = [self]
        for other in spec.others:
            evaluator = copy.copy(self)
            evaluator.model = BoundModel(other, device)
            evaluator.batch = max(1, min(self.batch, CELLS // other.widest))
            self.architectures.append(evaluator)

    def _samples(
        self,
        v: Tensor,
        b: Tensor,
        xs: Iterable[Tensor],
        ys: Iterable[Tensor],
        single: bool = False,
        stored_parts: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Evaluate samples in chunks: correctness, number of predictions and loss per sample, and the summed tallies.

        Losses are summed over the predictions of each batch, or with ``single`` over those of each sample. What the
        task stores of each batch, usually the logits, is appended to ``stored_parts``, if it is a list.
        """
        right = []
        scores = []
        losses = []
        tallies = []
        with num_threads(self.threads):
            predict = self.model.predict(v, b)
            for x, y in zip(iterate_batches(xs, self.batch), iterate_batches(ys, self.batch), strict=True):
                if self.packed:  # rows are as long as packed training rows, and mostly padding
                    width = int(((x != PADDING) | (y != PADDING)).any(0).sum())
                    x, y = x[:, :width], y[:, :width]
                target = y.to(self.model.device)
                logits = predict(self.normalize(x)).logits
                right.append(self.task.correct(logits, target))
                stored = self.task.stored_outputs(logits, right[-1])
                if stored_parts is not None:
                    stored_parts.append(stored)
                scores.append(self.task.predictions(target))
                if single:
                    losses.append(self.task.losses(logits, target).to(torch.float64) * scores[-1])
                else:
                    losses.append((self.task.loss(logits, target).to(torch.float64) * scores[-1].sum())[None])
                tallies.append(self.task.tally(stored, target))
        return torch.cat(right), torch.cat(scores), torch.cat(losses), torch.stack(tallies).sum(0)

    def losses(self, v: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of every sample, ``[n]``, in float64.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
        """
        vector = x.dim() == 2 and x.is_floating_point()
        size = 20 * BATCH if vector else self.batch  # vectors are small
        losses_list = []
        with num_threads(self.threads):
            predict = self.model.predict(v, b)
            for first in range(0, len(y), size):
                target = y[first : first + size].to(self.model.device)
                logits = predict(self.normalize(x[first : first + size])).logits
                losses_list.append(self.task.losses(logits, target).to(torch.float64))
        return torch.cat(losses_list)

    def predict_classes(self, v: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """Return the predicted class of every sample, ``[n]``; -1 if its logits are not finite.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            x: Stored samples, ``[n, ...]``.
        """
        with num_threads(self.threads):
            predict = self.model.predict(v, b)
            logits = [predict(self.normalize(part)).logits for part in iterate_batches([x], self.batch)]
        return torch.cat([torch.where(part.isfinite().all(1), part.argmax(1), -1) for part in logits])

    def evaluate_test(self, v: Tensor, b: Tensor) -> Score:
        """Evaluate the model on the test set.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
        """
        stored: list[Tensor] | None = [] if self.metrics or self.task.ranked else None
        right, scores, losses, tally = self._samples(v, b, *self._test, stored_parts=stored)
        loss = float(losses.sum() / scores.sum())
        metrics = self.task.measure(tally, loss)
        if stored is not None:
            metrics |= self._of_all(self.task, stored, self.test[1], "the test set")
        return Score(metrics.pop(self.task.scored, mean_accuracy(right, scores)), loss, metrics)

    def test_scores(self, v: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return the true values of the test set and the model's probabilities or predictions for it.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
        """
        logits: list[Tensor] = []
        self._samples(v, b, *self._test, stored_parts=logits)
        return truth_and_scores(self.task, logits, self.test[1])

    def _of_all(
        self, task: Task, logits: Sequence[Tensor], y: Tensor, where: str, defined: bool = True
    ) -> dict[str, float]:
        """Compute the metrics of some samples from their logits."""
        arrays = truth_and_scores(task, logits, y)
        requested = task.requested_metrics(self.metrics, *arrays, where, defined) if self.metrics else {}
        return task.measure_all(*arrays) | requested

    def _primary(self, logits: Sequence[Tensor], y: Tensor) -> float:
        """Compute the primary metric of a task for which it depends on all samples together; NaN if it is undefined."""
        arrays = truth_and_scores(self.task, logits, y.to(self.model.device))
        return self.task.measure_all(*arrays).get(self.task.scored, np.nan)

    def _others(self, stored: Tensor, y: Tensor, loss: float, client: int) -> dict[str, float]:
        """Compute all metrics of one client except the primary metric and the loss."""
        y, task = y.to(stored.device), self.task.of_other_rows
        metrics = task.measure(task.tally(stored, y), loss)
        where = f"held-out samples of {self.federation.client_label(client)}"
        metrics |= self._of_all(task, [stored], y, where, defined=False) if self.metrics or task.ranked else {}
        metrics.pop(task.scored, None)
        return metrics | self._intervals(task, self.metrics, stored, y)

    def _intervals(self, task: Task, metric_set: MetricSet, logits: Tensor, y: Tensor) -> dict[str, float]:
        """Compute the intervals of a client's primary metric and objective; NaN if undefined.

        The R² of a client is a mean over its samples, because it divides by the variance of all clients; its interval is
        Student's t. For many clients, metrics that need a bootstrap have no interval.
        """
        if not metric_set.with_intervals:
            return {}
        arrays, few = truth_and_scores(task, [logits], y), len(self.federation.clients) <= MOST_BOOTSTRAPS
        intervals: dict[str, float] = {}
        for name in metric_set.with_intervals:
            if name == task.scored and "counts" not in task.provides and not task.ranked:
                interval = student_interval(task.correct(logits, y).tolist(), metric_set.level)
                interval = clip_interval(interval, metric_info(name))
            else:
                interval = metric_interval(name, task, *arrays, metric_set, bootstrap=few)
            low, high = interval or (np.nan, np.nan)
            intervals |= {f"{name}_low": low, f"{name}_high": high}
        return intervals

    def evaluate_clients(
        self,
        v: Tensor,
        b: Tensor,
        most: int,
        seed: int,
        personal_models: Models | None = None,
        each: bool = False,
        pooled: bool = False,
    ) -> ClientScores:
        """Evaluate a model, or personal models, on each client's data.

        Clients with held-out samples are evaluated on these. If no client has any, each is evaluated on the test set
        reweighted to the class distribution of its training data. Without single labels there are no such weights, and
        nothing is evaluated.

        Args:
            v: Model, ``[d]``.
            b: Buffers, ``[m]``.
            most: Maximum number of clients to evaluate; a seeded random subset is used if there are more.
            seed: Seed of the run.
            personal_models: Returns the models and the buffers that serve the clients, if these differ between clients.
            each: Whether to compute all metrics of each client, in addition to the primary metric and the loss.
            pooled: Whether to compute all metrics on the held-out samples of these clients together.
        """
        if not most:
            return ClientScores(np.zeros(0), NOTHING)
        clients = [self.federation.clients[k] for k in evaluated_clients(len(self.federation.clients), most, seed)]
        evaluated = [c for c in clients if len(c.y_test)]
        if not evaluated and "one_class" not in self.task.provides:
            return ClientScores(np.zeros(0), f"{NOTHING}, because no client holds out any samples")
        judged, measured_on = evaluated or clients, HELD_OUT if evaluated else BY_CLASS
        who, scored = np.array([c.id for c in judged], np.int64), self.task.scored
        if personal_models is not None:
            scores = [
                self.evaluate_client(*served, c, each)
                for c, served in zip(judged, personal_models(who.tolist()), strict=True)
            ]
            accuracies, losses = np.array([(score.accuracy, score.loss) for score in scores]).T
            others = metrics_by_name([score.metrics for score in scores])
            return ClientScores(accuracies, measured_on, losses, who, scored, others)
        if not evaluated:
            accuracies, losses = self._by_class(v, b, [c.y for c in clients])
            return ClientScores(accuracies, measured_on, losses, who, scored)
        stored_parts: list[Tensor] | None = [] if each or pooled or self.task.ranked else None
        inputs = (c.x_test for c in evaluated)  # lazily, so that the inputs of all clients need not fit in memory
        targets = [c.y_test for c in evaluated]
        right, sums_of, summed, tally = self._samples(v, b, inputs, targets, single=True, stored_parts=stored_parts)
        sizes = [len(c.y_test) for c in evaluated]
        parts = zip(*(torch.split(t, sizes) for t in (right, sums_of, summed)), strict=True)
        accuracies, losses = np.array([mean_accuracy_and_loss(*part) for part in parts]).T
        stored = () if stored_parts is None else torch.split(torch.cat(stored_parts), sizes)
        if self.task.ranked:
            accuracies = np.array([self._primary([part], y) for part, y in zip(stored, targets, strict=True)])
        others = {}
        pooled_metrics: dict[str, float] = {}
        if each:
            trios = zip(evaluated, stored, losses.tolist(), strict=True)
            others = metrics_by_name([self._others(part, c.y_test, loss, c.id) for c, part, loss in trios])
        if pooled:
            pooled_metrics = self.task.measure(tally, float(summed.sum() / sums_of.sum().clamp_min(1)))
            if self.metrics or self.task.ranked:
                y = torch.cat(targets).to(self.model.device)
                pooled_metrics |= self._of_all(self.task, stored, y, "the held-out samples of the clients")
            if not self.task.ranked:  # otherwise the primary metric of all samples is not a mean over clients
                pooled_metrics.pop(scored, None)
        return ClientScores(accuracies, measured_on, losses, who, scored, others, pooled_metrics)

    def evaluate_client(self, v: Tensor, b: Tensor, client: ClientData, each: bool = False) -> Score:
        """Evaluate a client's own model on its data.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            client: Data of the client.
            each: Whether to compute all metrics, in addition to the primary metric and the loss.
        """
        own = self.architectures[(self.first + client.id) % len(self.architectures)]
        if own is not self:
            return own.evaluate_client(v, b, client, each)
        if len(client.y_test):
            parts: list[Tensor] | None = [] if each or self.task.ranked else None
            scores = self._samples(v, b, [client.x_test], [client.y_test], single=True, stored_parts=parts)
            accuracy, loss = mean_accuracy_and_loss(*scores[:3])
            if self.task.ranked and parts:
                accuracy = self._primary(parts, client.y_test)
            others = self._others(torch.cat(parts), client.y_test, loss, client.id) if each and parts else {}
            return Score(accuracy, loss, others)
        accuracies, losses = self._by_class(v, b, [client.y])
        return Score(float(accuracies[0]), float(losses[0]))

    def client_sums(self, v: Tensor, b: Tensor, client: ClientData) -> tuple[Tensor, list[Tensor]]:
        """Return sums over a client's held-out samples, and what the task stores of them, usually logits, in parts.

        Args:
            v: Parameters of the model, ``[d]``.
            b: Buffers of the model, ``[m]``.
            client: Data of the client.

        Returns:
            Number of predictions, correct ones, sum of the losses, and the tally of the task, float64 ``[3 + T]``.
        """
        stored: list[Tensor] = []
        samples = [client.x_test], [client.y_test]
        right, scored, losses, tally = self._samples(v, b, *samples, single=True, stored_parts=stored)
        sums = torch.stack([scored.sum(), (right * scored).sum(), losses.sum()])
        return torch.cat([sums, tally.reshape(-1).to(torch.float64)]).cpu(), stored

    def client_constants(self, like: ClientScores) -> dict[int, dict[str, float]]:
        """Return each client's metrics of a constant: the class shares, or the mean, of its own training samples.

        There are none if clients are loaded one by one, because each would be loaded twice.

        Args:
            like: Scores of a model; constants are evaluated for the same clients on the same samples.
        """
        constants: dict[int, dict[str, float]] = {}
        if not isinstance(self.federation.clients, ArrayClients):
            return constants
        for client in (self.federation.clients[k] for k in like.ids.tolist()):
            if like.measured_on == BY_CLASS:
                y = self.test[1]
                weights = self.task.counts(client.y, self.federation.classes).to(y.device, torch.float64)[y]
                metrics = self._constant_metrics(client.y, y, weights)
            else:
                metrics = self._constant_metrics(client.y, client.y_test, each=True)
            constants[client.id] = {f"constant_{name}": value for name, value in metrics.items()}
        return constants

    def test_constant(self) -> dict[str, float]:
        """Return the metrics of a constant on the test set, from all training samples.

        There are none if clients are loaded one by one.
        """
        clients = self.federation.clients
        if not isinstance(clients, ArrayClients):
            return {}
        held_out_from = np.repeat(clients.splits, np.diff(clients.offsets))
        training = torch.from_numpy(np.arange(len(held_out_from)) < held_out_from)
        return self._constant_metrics(clients.y[training.to(clients.y.device)], self.test[1])

    def _constant_metrics(
        self, known: Tensor, y: Tensor, weights: Tensor | None = None, each: bool = False
    ) -> dict[str, float]:
        """Evaluate the constant for the targets ``known`` on the targets ``y``; empty for a task without constants.

        A constant is not trained, so no class weights correct it. Custom metrics are left out, because their functions need
        not accept constants.

        Args:
            known: Targets that the constant describes.
            y: Targets of the evaluated samples.
            weights: Weights of these samples; only the primary metric is then computed.
            each: Whether the samples are those of one client, for which R² is a mean over samples.
        """
        task, y = self.task.unweighted, y.to(self.model.device)
        task = task.of_other_rows if each else task
        metric_set = replace(self.metrics, own={}, trained_with=())
        constant = task.constant(known.to(y.device), self.federation.classes)
        if constant is None:
            return {}
        logits = constant.expand(len(y), *constant.shape)
        right, scored = task.correct(logits, y), task.scored
        if weights is not None:
            return {scored: float(right @ weights / weights.sum())}
        loss = float(task.losses(logits, y).to(torch.float64).mean())
        metrics = {scored: float(right.mean()), "loss": loss, **task.measure(task.tally(logits, y), loss)}
        if metric_set:
            metrics |= task.requested_metrics(metric_set, *truth_and_scores(task, [logits], y), "a constant")
        if task.ranked:
            metrics |= task.measure_all(*truth_and_scores(task, [logits], y))
        if not each:
            return metrics
        primary = metrics[scored] if task.ranked else float(right.mean())
        return metrics | {scored: primary, **self._intervals(task, metric_set, logits, y)}

    def _by_class(self, v: Tensor, b: Tensor, labels: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Return accuracy and loss on the test set reweighted to the classes in each client's labels, ``[K]`` each."""
        right, _, summed, _ = self._samples(v, b, *self._test, single=True)
        classes = self.federation.classes
        y = self.test[1].cpu()
        total = torch.bincount(y, minlength=classes).to(torch.float64)
        correct, wrong = (torch.bincount(y, weights=each.cpu(), minlength=classes) for each in (right, summed))
        counts = torch.stack([torch.bincount(t.cpu(), minlength=classes) for t in labels]).to(torch.float64)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        weight = shares @ total  # 0, and the metrics undefined, if the test set has none of a client's classes
        return ((shares @ correct) / weight).numpy(), ((shares @ wrong) / weight).numpy()


def evaluated_clients(total: int, most: int, seed: int) -> list[int]:
    """Return the clients to evaluate, in order: at most ``most`` of ``total``, drawn with the seed of the run.

    Args:
        total: Number of clients.
        most: Largest number of evaluated clients.
        seed: Seed of the run.
    """
    if most >= total:
        return list(range(total))
    return sorted(numpy_generator(seed, "evaluated clients").choice(total, most, replace=False).tolist())


def truth_and_scores(task: Task, logits: Sequence[Tensor], y: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the true values of some samples, and their probabilities or predictions.

    Args:
        task: Task that defines both.
        logits: Outputs of the model, in parts.
        y: Targets of the samples, ``[n]``.
    """
    scores = torch.cat([task.scores(part) for part in logits])
    return task.truth(y).cpu().numpy(), scores.cpu().numpy()


def mean_accuracy_and_loss(right: Tensor, predictions: Tensor, losses: Tensor) -> tuple[float, float]:
    """Return the accuracy and the mean loss over all predictions of some samples.

    Args:
        right: Share of correct predictions per sample, ``[n]``.
        predictions: Number of predictions per sample, ``[n]``.
        losses: Loss per sample, ``[n]``.
    """
    return mean_accuracy(right, predictions), float(losses.sum() / predictions.sum().clamp_min(1))


def mean_accuracy(right: Tensor, predictions: Tensor) -> float:
    """Return the accuracy over all predictions: ``right [n]``, weighted by the number of predictions per sample.

    Args:
        right: Share of correct predictions per sample, ``[n]``.
        predictions: Number of predictions per sample, ``[n]``.
    """
    return float((right * predictions).sum() / predictions.sum().clamp_min(1))


def metrics_by_name(rows: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Turn the metrics of each client into one array per metric; NaN where a client lacks one."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, np.nan) for row in rows]) for name in names}
