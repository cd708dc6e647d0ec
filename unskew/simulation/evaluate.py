"""What a model is worth: on the global test set, and client by client on the client's own held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation
from unskew.engines.batches import Normaliser
from unskew.engines.machine import threads
from unskew.models.trainable import BoundModel
from unskew.models.vector import ModelSpec
from unskew.seeding import numpy_generator
from unskew.tasks import Task

BATCH = 500
CELLS = 1 << 26  # values of the widest layer that are held at once: 256 MB in float32
HELD_OUT = "the clients' held-out data"
BY_CLASS = "the test set, weighted by the clients' classes"
NOTHING = "nothing"
Models = Callable[[Sequence[int]], Iterable[tuple[Tensor, Tensor]]]
"""From client ids to the model ``v [d]`` and the statistics ``b [m]`` that serve each of them, in their order."""


@dataclass(frozen=True)
class Score:
    """Accuracy, mean loss and the task's own figures over a set of samples."""

    accuracy: float
    loss: float
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ClientScores:
    """Accuracy per client, ``[K']``, and what it was measured on."""

    accuracies: np.ndarray
    measured_on: str

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

    def figures(self, name: str) -> dict[str, float | None]:
        """The figures of the summary, under names that begin with ``name``."""
        return {
            f"{name}_mean": self.mean,
            f"{name}_std": self.std,
            f"{name}_worst": self.worst,
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
        self.batch = max(1, min(BATCH, CELLS // spec.widest))
        self.threads = torch.get_num_threads()  # an engine may take threads away for training

    def _samples(self, v: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """How right each sample is, how many predictions it asks for, each batch's summed loss, the sum of the tallies."""
        right, asked, losses, tallies = [], [], [], []
        with threads(self.threads):
            predict = self.model.predict(v, b)
            for first in range(0, len(y), self.batch):
                target = y[first : first + self.batch].to(self.model.device)
                logits = predict(self.normalise(x[first : first + self.batch])).logits
                right.append(self.task.correct(logits, target))
                asked.append(self.task.predictions(target))
                losses.append(self.task.loss(logits, target).to(torch.float64) * asked[-1].sum())
                tallies.append(self.task.tally(logits, target))
        return torch.cat(right), torch.cat(asked), torch.stack(losses), torch.stack(tallies).sum(0)

    def losses(self, v: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """The loss of every sample, ``[n]``, in float64."""
        each = torch.func.vmap(lambda logits, target: self.task.loss(logits[None], target[None]))
        vector = x.dim() == 2 and x.is_floating_point()
        size = 20 * BATCH if vector else self.batch  # a vector is small
        found = []
        with threads(self.threads):
            predict = self.model.predict(v, b)
            for first in range(0, len(y), size):
                target = y[first : first + size].to(self.model.device)
                found.append(each(predict(self.normalise(x[first : first + size])).logits, target).to(torch.float64))
        return torch.cat(found)

    def score(self, v: Tensor, b: Tensor) -> Score:
        """The model ``v [d], b [m]`` on the test set."""
        right, asked, losses, tally = self._samples(v, b, *self.test)
        loss = float(losses.sum() / asked.sum())
        return Score(mean(right, asked), loss, self.task.measure(tally, loss))

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
        if own is not None:
            judged = held or clients
            scores = [self.one(*served, c) for c, served in zip(judged, own([c.id for c in judged]), strict=True)]
            return ClientScores(np.array(scores), HELD_OUT if held else BY_CLASS)
        if not held:
            return ClientScores(self._by_class(v, b, [c.y for c in clients]), BY_CLASS)
        images = held[0].x_test.dim() == 4
        x = torch.cat([c.x_test.permute(0, 2, 3, 1) if images else c.x_test for c in held])
        joined = x.permute(0, 3, 1, 2) if images else x
        right, asked, *_ = self._samples(v, b, joined, torch.cat([c.y_test for c in held]))
        sizes = [len(c.y_test) for c in held]
        pairs = zip(torch.split(right, sizes), torch.split(asked, sizes), strict=True)
        return ClientScores(np.array([mean(*pair) for pair in pairs]), HELD_OUT)

    def one(self, v: Tensor, b: Tensor, client: ClientData) -> float:
        """A client's own model on its own data."""
        if len(client.y_test):
            return mean(*self._samples(v, b, client.x_test, client.y_test)[:2])
        return float(self._by_class(v, b, [client.y])[0])

    def _by_class(self, v: Tensor, b: Tensor, labels: list[Tensor]) -> np.ndarray:
        """Accuracy on the test set with its classes weighted as in each client's labels, ``[K]``."""
        right, *_ = self._samples(v, b, *self.test)
        classes = self.federation.classes
        y = self.test[1].cpu()
        total = torch.bincount(y, minlength=classes).to(torch.float64)
        correct = torch.bincount(y, weights=right.cpu(), minlength=classes)
        counts = torch.stack([torch.bincount(t.cpu(), minlength=classes) for t in labels]).to(torch.float64)
        shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
        accuracies = (shares @ correct) / (shares @ total).clamp_min(1e-12)
        return np.asarray(accuracies.numpy())


def mean(right: Tensor, asked: Tensor) -> float:
    """Accuracy over all predictions: ``right [n]`` of each sample, weighted by how many it asks for."""
    return float((right * asked).sum() / asked.sum().clamp_min(1))
