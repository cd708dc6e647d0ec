"""What a model is worth: on the global test set, and client by client on the client's own held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unskew.data.clients import batched
from unskew.data.federation import ClientData, Federation
from unskew.engines.batches import Normaliser
from unskew.engines.machine import threads
from unskew.models.trainable import BoundModel
from unskew.models.vector import ModelSpec
from unskew.seeding import numpy_generator
from unskew.tasks.metrics import metric_figures
from unskew.tasks.task import Task

BATCH = 500
CELLS = 1 << 26  # values of the widest layer that are held at once: 256 MB in float32
HELD_OUT = "the clients' held-out data"
BY_CLASS = "the test set, weighted by the clients' classes"
NOTHING = "nothing"
Models = Callable[[Sequence[int]], Iterable[tuple[Tensor, Tensor]]]
"""From client ids to the model ``v [d]`` and the statistics ``b [m]`` that serve each of them, in their order."""


@dataclass(frozen=True)
class Score:
    """Accuracy (or what else the task scores), mean loss and the task's own figures over a set of samples."""

    accuracy: float
    loss: float
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientScores:
    """What a model, or each client's own, is worth to single clients.

    Attributes:
        accuracies: Of each client, ``[K']``.
        measured_on: On what.
        losses: Mean loss of each client, ``[K']``.
        ids: Which clients these are, ``[K']``.
    """

    accuracies: np.ndarray
    measured_on: str
    losses: np.ndarray = field(default_factory=lambda: np.zeros(0))
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def mean(self) -> float | None:
        """Mean over clients."""
        return float(self.accuracies.mean()) if len(self.accuracies) else None

    @property
    def std(self) -> float | None:
        """Standard deviation over clients; these are all there are, so the sum is divided by their number."""
        return float(self.accuracies.std()) if len(self.accuracies) else None

    @property
    def worst(self) -> float | None:
        """The worst client."""
        return float(self.accuracies.min()) if len(self.accuracies) else None

    def figures(self, name: str, client_names: Sequence[str] = ()) -> dict[str, float | str | None]:
        """The figures of the summary, under names that begin with ``name``; where clients have names, the worst one's."""
        worst = {}
        if client_names and len(self.accuracies):
            worst = {f"{name}_worst_name": client_names[int(self.ids[self.accuracies.argmin()])]}
        return {
            f"{name}_mean": self.mean,
            f"{name}_std": self.std,
            f"{name}_worst": self.worst,
            **worst,
            f"{name}_worst_decile": self.worst_decile,
        }

    @property
    def worst_decile(self) -> float | None:
        """Mean of the worst tenth of the clients (at least one)."""
        if not len(self.accuracies):
            return None
        return float(np.sort(self.accuracies)[: max(1, len(self.accuracies) // 10)].mean())


class Evaluator:
    """Evaluates models in eval mode.

    Args:
        spec: Layout of the model.
        federation: Test set and clients.
        task: Loss and correctness.
        device: Where to evaluate.
    """

    def __init__(self, spec: ModelSpec, federation: Federation, task: Task, device: torch.device):
        self.federation, self.task = federation, task
        self.model = BoundModel(spec, device)
        self.normalise = Normaliser(federation.normalisation, federation.shape, spec.dtype, device)
        x, y = federation.test
        self.test = (x.to(device), y.to(device))
        self._test = [self.test[0]], [self.test[1]]
        self.batch = max(1, min(BATCH, CELLS // spec.widest))
        self.threads = torch.get_num_threads()  # an engine may take threads away for training

    def _samples(
        self,
        v: Tensor,
        b: Tensor,
        xs: Iterable[Tensor],
        ys: Iterable[Tensor],
        single: bool = False,
        kept: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of samples in pieces: how right each is, how many predictions it asks for, summed losses, the sum of the tallies.

        Losses are summed over the predictions of each batch, or with ``single`` over those of each sample. Probabilities
        are added to ``kept``, if there is such a list.
        """
        right, asked, losses, tallies = [], [], [], []
        with threads(self.threads):
            predict = self.model.predict(v, b)
            for x, y in zip(batched(xs, self.batch), batched(ys, self.batch), strict=True):
                target = y.to(self.model.device)
                logits = predict(self.normalise(x)).logits
                if kept is not None:
                    kept.append(self.task.probabilities(logits))
                right.append(self.task.correct(logits, target))
                asked.append(self.task.predictions(target))
                if single:
                    losses.append(self.task.losses(logits, target).to(torch.float64) * asked[-1])
                else:
                    losses.append((self.task.loss(logits, target).to(torch.float64) * asked[-1].sum())[None])
                tallies.append(self.task.tally(logits, target))
        return torch.cat(right), torch.cat(asked), torch.cat(losses), torch.stack(tallies).sum(0)

    def losses(self, v: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample, ``[n]``, in float64."""
        vector = x.dim() == 2 and x.is_floating_point()
        size = 20 * BATCH if vector else self.batch  # a vector is small
        found = []
        with threads(self.threads):
            predict = self.model.predict(v, b)
            for first in range(0, len(y), size):
                target = y[first : first + size].to(self.model.device)
                logits = predict(self.normalise(x[first : first + size])).logits
                found.append(self.task.losses(logits, target).to(torch.float64))
        return torch.cat(found)

    def score(self, v: Tensor, b: Tensor, metrics: Sequence[str] = ()) -> Score:
        """The model ``v [d], b [m]`` on the test set, with further figures that are asked for."""
        kept: list[Tensor] | None = [] if metrics else None
        right, asked, losses, tally = self._samples(v, b, *self._test, kept=kept)
        loss = float(losses.sum() / asked.sum())
        figures = self.task.measure(tally, loss)
        if kept is not None:
            sure, true = torch.cat(kept).cpu().numpy(), self.test[1].cpu().numpy()
            figures |= metric_figures(metrics, sure, true, self.federation.names)
        return Score(figures.pop(self.task.scored, mean(right, asked)), loss, figures)

    def clients(self, v: Tensor, b: Tensor, most: int, seed: int, own: Models | None = None) -> ClientScores:
        """The model on each client's own data.

        Clients with held-out samples are measured on these. If no client has any, each is measured on the test set,
        its classes weighted as in the client's training data; where a sample has no single label there are no such
        weights, and nothing is measured.

        Args:
            v: The model, ``[d]``.
            b: Its statistics, ``[m]``.
            most: At most so many clients, drawn by the seed.
            seed: Of the run.
            own: Gives the models and the statistics that serve the clients, where these differ between them.
        """
        total = len(self.federation.clients)
        ids = np.arange(total)
        if most < total:
            ids = np.sort(numpy_generator(seed, "evaluated clients").choice(total, most, replace=False))
        if not most:
            return ClientScores(np.zeros(0), NOTHING)
        clients = [self.federation.clients[int(k)] for k in ids]
        held = [c for c in clients if len(c.y_test)]
        if not held and self.federation.test[1].dim() > 1:
            return ClientScores(np.zeros(0), f"{NOTHING}, because no client holds out any samples")
        judged, measured_on = held or clients, HELD_OUT if held else BY_CLASS
        who = np.array([c.id for c in judged], np.int64)
        if own is not None:
            scores = [self.one(*served, c) for c, served in zip(judged, own(who.tolist()), strict=True)]
            accuracies, losses = np.array(scores).T
            return ClientScores(accuracies, measured_on, losses, who)
        if not held:
            accuracies, losses = self._by_class(v, b, [c.y for c in clients])
            return ClientScores(accuracies, measured_on, losses, who)
        inputs = (c.x_test for c in held)  # one client's after another's, not all at once
        measured = self._samples(v, b, inputs, [c.y_test for c in held], single=True)[:3]
        sizes = [len(c.y_test) for c in held]
        parts = zip(*(torch.split(t, sizes) for t in measured), strict=True)
        accuracies, losses = np.array([means(*part) for part in parts]).T
        return ClientScores(accuracies, measured_on, losses, who)

    def one(self, v: Tensor, b: Tensor, client: ClientData) -> tuple[float, float]:
        """Accuracy and loss of a client's own model on its own data."""
        if len(client.y_test):
            return means(*self._samples(v, b, [client.x_test], [client.y_test], single=True)[:3])
        accuracies, losses = self._by_class(v, b, [client.y])
        return float(accuracies[0]), float(losses[0])

    def _by_class(self, v: Tensor, b: Tensor, labels: list[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Accuracy and loss on the test set with its classes weighted as in each client's labels, ``[K]``."""
        right, _, summed, _ = self._samples(v, b, *self._test, single=True)
        classes = self.federation.classes
        y = self.test[1].cpu()
        total = torch.bincount(y, minlength=classes).to(torch.float64)
        correct, wrong = (torch.bincount(y, weights=each.cpu(), minlength=classes) for each in (right, summed))
        counts = torch.stack([torch.bincount(t.cpu(), minlength=classes) for t in labels]).to(torch.float64)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        weight = (shares @ total).clamp_min(1e-12)
        return ((shares @ correct) / weight).numpy(), ((shares @ wrong) / weight).numpy()


def means(right: Tensor, asked: Tensor, losses: Tensor) -> tuple[float, float]:
    """Accuracy and mean loss over all predictions of some samples, ``[n]`` each."""
    return mean(right, asked), float(losses.sum() / asked.sum().clamp_min(1))


def mean(right: Tensor, asked: Tensor) -> float:
    """Accuracy over all predictions: ``right [n]`` of each sample, weighted by how many it asks for."""
    return float((right * asked).sum() / asked.sum().clamp_min(1))
