"""Gradients, gradient noise and curvature of mean losses at a fixed model.

The model is in eval mode, with fixed normalization buffers and without dropout. As in training, the loss of a set is the
mean of its samples' losses, weighted by their numbers of predictions (of a text, its tokens). Sets are processed in batches,
so memory does not depend on their size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.data.federation import Federation, take_rows
from unskew.engines.batches import InputNormalizer
from unskew.models.spec import ModelSpec
from unskew.tasks.base import Task

NUMBERS = 1 << 25
"""Maximum number of values of single-sample gradients in memory."""
BATCH = 256
"""Batch size for Hessian-vector products."""

Products = Callable[[Tensor], Tensor]
"""Maps directions ``U [P, d]`` to Hessian-vector products ``[P, d]``."""


@dataclass
class GroupMoments:
    """Running mean and scatter of groups of vectors (Chan, Golub, LeVeque 1983); exact if all vectors are equal.

    Attributes:
        count: Number of vectors so far, or the sum of their weights.
        mean: Mean of the vectors, ``[d]``.
        scatter: Sum of their squared distances from the mean.
    """

    count: float
    mean: Tensor
    scatter: float = 0.0

    def add(self, count: float, mean: Tensor, scatter: float = 0.0) -> None:
        """Add a group of ``count`` vectors.

        Args:
            count: Number of vectors, or the sum of their weights.
            mean: Mean of the group, ``[d]``.
            scatter: Sum of the group's squared distances from its mean.
        """
        total, apart = self.count + count, mean - self.mean
        self.scatter += scatter + float(apart.square().sum()) * self.count * count / total
        self.mean = self.mean + apart * (count / total)
        self.count = total

    @property
    def variance(self) -> float:
        """Mean squared distance from the mean."""
        return self.scatter / self.count


class GradientProbe:
    """Computes gradients and Hessian-vector products at one model.

    Args:
        spec: Layout of the model.
        task: Task that defines the loss.
        federation: Federation whose normalization applies to the inputs.
        v: Parameters, ``[d]``.
        b: Normalization buffers, ``[m]``.
    """

    def __init__(self, spec: ModelSpec, task: Task, federation: Federation, v: Tensor, b: Tensor):
        self.spec = spec
        self.task = task
        self.v = v
        self.b = b
        self.normalize = InputNormalizer(federation.normalization, federation.shape, spec.dtype, v.device)

    def loss(self, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of normalized inputs at ``v``.

        Args:
            v: Parameters of the model, ``[d]``.
            x: Normalized inputs, ``[B, ...]``.
            y: Targets, ``[B]``.
        """
        return self.task.loss(self.spec.forward(v, self.b, x).logits, y)

    def batches(self, x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of normalized inputs and targets on the model's device.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
            size: Samples per batch.

        Yields:
            Inputs and targets of a batch.
        """
        for index in torch.split(torch.arange(len(y), device=y.device), size):
            yield self.normalize(take_rows(x, index)), y[index].to(self.v.device)

    def moments(self, x: Tensor, y: Tensor) -> GroupMoments:
        """Compute mean and scatter of single-sample gradients.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
        """
        gradient = torch.func.grad(lambda v, x, y: self.loss(v, x[None], y[None]))
        each = torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="same")
        moments = GroupMoments(0, torch.zeros_like(self.v))
        for inputs, targets in self.batches(x, y, max(1, min(BATCH, NUMBERS // self.spec.size))):
            gradients, weights = each(self.v, inputs, targets).detach(), self.task.predictions(targets)
            if bool((weights == 1).all()):
                mean = gradients.mean(0)
                moments.add(len(targets), mean, float((gradients - mean).square().sum()))
            elif total := float(weights.sum()):
                mean = weights.to(gradients.dtype) @ gradients / total
                moments.add(total, mean, float(weights @ (gradients - mean).square().sum(1).to(weights.dtype)))
        return moments

    def products(self, x: Tensor, y: Tensor) -> Products:
        """Return the Hessian-vector product of the mean loss over a set, as a function of directions.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
        """
        count = max(1.0, float(self.task.predictions(y).sum()))

        def times(directions: Tensor) -> Tensor:
            total = torch.zeros_like(directions)
            for inputs, targets in self.batches(x, y, BATCH):
                leaf = self.v.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss(leaf, inputs, targets), leaf, create_graph=True)
                rows = [
                    torch.autograd.grad(gradient, leaf, u, retain_graph=True, materialize_grads=True)[0]
                    for u in directions
                ]
                total.add_(torch.stack(rows), alpha=float(self.task.predictions(targets).sum()) / count)
            return total

        return times


def largest_eigenvalues(products: Products, start: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Compute the largest absolute eigenvalues of ``P`` symmetric matrices by power iteration.

    ``||H u||`` of a unit vector ``u`` never exceeds the largest absolute eigenvalue and grows from step to step. So the
    result is a lower bound, and exact once ``u`` lies in the eigenspace.

    Args:
        products: Multiplies each matrix with its direction.
        start: Initial directions, ``[P, d]``.
        iterations: Maximum number of products.
        tolerance: Stop when no value has grown by more than this relative amount.

    Returns:
        The absolute eigenvalues, ``[P]``.
    """
    u = start / torch.linalg.vector_norm(start, dim=1, keepdim=True)
    value = torch.zeros(len(start), dtype=start.dtype, device=start.device)
    for _ in range(iterations):
        turned = products(u)
        before, value = value, torch.linalg.vector_norm(turned, dim=1)
        if bool((value - before <= tolerance * value).all()):
            break
        u = turned / value[:, None].clamp_min(torch.finfo(value.dtype).tiny)
    return value
