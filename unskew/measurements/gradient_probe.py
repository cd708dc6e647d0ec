"""A model looked at from outside: gradients, their noise and the curvature of mean losses over sets of samples.

All is in eval mode: the normalization statistics are those given, and nothing is dropped out, so a set's loss is the mean of
its samples' losses. Sets are read in batches; nothing grows with their size.
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
"""Numbers that the gradients of single samples may take at a time."""
BATCH = 256
"""Samples whose second derivatives are taken at a time."""

Products = Callable[[Tensor], Tensor]
"""From directions ``U [P, d]`` to Hessians times them, ``[P, d]``."""


@dataclass
class GroupMoments:
    """Mean and scatter of vectors that come in groups (Chan, Golub, LeVeque 1983): exact where all are equal.

    Attributes:
        count: Vectors so far.
        mean: Their mean, ``[d]``; a scalar 0 before the first.
        scatter: Sum of their squared distances from it.
    """

    count: int
    mean: Tensor
    scatter: float = 0.0

    def add(self, count: int, mean: Tensor, scatter: float = 0.0) -> None:
        """Take in a group of ``count`` vectors with this mean and scatter.

        Args:
            count: Number of vectors.
            mean: Their mean, ``[d]``.
            scatter: Sum of their squared distances from the mean.
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
    """Gradients and Hessians at one model.

    Args:
        spec: The model's layout.
        task: Its loss.
        federation: Whose inputs are normalized.
        v: The model, ``[d]``.
        b: Its statistics, ``[m]``.
    """

    def __init__(self, spec: ModelSpec, task: Task, federation: Federation, v: Tensor, b: Tensor):
        self.spec, self.task, self.v, self.b = spec, task, v, b
        self.normalize = InputNormalizer(federation.normalization, federation.shape, spec.dtype, v.device)

    def loss(self, v: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss at ``v`` of normalized inputs.

        Args:
            v: Parameters of the model, ``[d]``.
            x: Inputs of the model, ``[B, ...]``.
            y: Targets, ``[B]``.
        """
        return self.task.loss(self.spec.forward(v, self.b, x).logits, y)

    def batches(self, x: Tensor, y: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalized inputs and targets on the model's device.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
            size: Samples per batch.
        """
        for index in torch.split(torch.arange(len(y), device=y.device), size):
            yield self.normalize(take_rows(x, index)), y[index].to(self.v.device)

    def moments(self, x: Tensor, y: Tensor) -> GroupMoments:
        """Mean and scatter of the gradients of single samples at the model; ``x, y`` as stored.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
        """
        each = torch.func.vmap(torch.func.grad(lambda v, x, y: self.loss(v, x[None], y[None])), in_dims=(None, 0, 0))
        moments = GroupMoments(0, torch.zeros_like(self.v))
        for inputs, targets in self.batches(x, y, max(1, min(BATCH, NUMBERS // self.spec.size))):
            gradients = each(self.v, inputs, targets).detach()
            mean = gradients.mean(0)
            moments.add(len(targets), mean, float((gradients - mean).square().sum()))
        return moments

    def products(self, x: Tensor, y: Tensor) -> Products:
        """Products with the Hessian of the mean loss over a set.

        Args:
            x: Stored samples, ``[n, ...]``.
            y: Targets, ``[n]``.
        """

        def times(directions: Tensor) -> Tensor:
            total = torch.zeros_like(directions)
            for inputs, targets in self.batches(x, y, BATCH):
                leaf = self.v.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(self.loss(leaf, inputs, targets), leaf, create_graph=True)
                rows = [
                    torch.autograd.grad(gradient, leaf, u, retain_graph=True, materialize_grads=True)[0]
                    for u in directions
                ]
                total.add_(torch.stack(rows), alpha=len(targets) / len(y))
            return total

        return times


def largest_eigenvalues(products: Products, start: Tensor, iterations: int, tolerance: float) -> Tensor:
    """Largest eigenvalues in modulus of ``P`` symmetric matrices, by power iteration.

    ``||H u||`` of a unit vector is never above the eigenvalue's modulus and grows from step to step. So the result is a
    lower bound, and exact as soon as ``u`` lies in the eigenspace.

    Args:
        products: Each matrix times a direction of its own.
        start: First directions, ``[P, d]``.
        iterations: At most so many products.
        tolerance: Stop when no value has grown by more than this share of it.

    Returns:
        The moduli, ``[P]``.
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
