"""Feddle's search for the combination of directions with the smallest loss (Zhu et al. 2025, Sections 3 and 4).

In domain the server minimizes, over the coefficients ``c`` of the directions ``A_bar [n, d]``::

    l(c) = CE(D_S; omega + sum_m c_m a_m) + lam / 2 sum_m (c_m - c'_m)^2

Out of domain the clients' head cannot be used. A new linear head ``theta`` is first trained on the features at ``c'`` and
then fixed, and ``h(c) = CE(D'_S; [body(omega + sum_m c_m a_m); theta]) + lam / 2 ...`` replaces ``l``.

The gradient is exact and does not need the directions in the autograd graph (Equations 16 and 17). With ``g`` the gradient
with respect to the model, ``dl/dc_m = <g, a_m> + lam (c_m - c'_m)``, a single matrix-vector product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from unskew.models.execution import Batch, GradFn, LossFn
from unskew.protocol.server_training import ServerTraining
from unskew.seeding import uniform

ROWS = 8
"""Number of half-precision anchors that are converted to the model's precision at a time."""
MEASURED = 500
"""Maximum number of samples on which a gradient is measured."""


@dataclass(frozen=True)
class Directions:
    """Directions ``a_bar_m = scale_m a_m``: anchors ``A [n, d]``, possibly in half precision, and scales ``[n]``."""

    A: Tensor
    scale: Tensor

    def at(self, v: Tensor, c: Tensor) -> Tensor:
        """Compute ``v + sum_m c_m a_bar_m``, ``[d]``.

        Args:
            v: Parameters of the model, ``[d]``.
            c: Coefficients, ``[n]``.
        """
        v, weights = v.clone(), c * self.scale
        for rows, part in self._parts(v.dtype):
            v.addmv_(part.T, weights[rows])
        return v

    def slopes(self, g: Tensor) -> Tensor:
        """Compute ``<g, a_bar_m>`` for every direction, ``[n]``."""
        return torch.cat([part @ g for _, part in self._parts(g.dtype)]) * self.scale

    def _parts(self, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
        step = len(self.A) if self.A.dtype == dtype else ROWS
        for start in range(0, len(self.A), step):
            rows = slice(start, start + step)
            yield rows, self.A[rows].to(dtype)


def norms(A: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the norms of the anchors in the model's precision, ``[n]``.

    Args:
        A: Anchors, ``[n, d]``.
        dtype: Data type of the model.
    """
    return torch.stack([torch.linalg.vector_norm(row.to(dtype)) for row in A])


def scales(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return factors ``[n]`` that scale anchors with norms ``lengths`` to their median norm ``r``, and ``r``.

    The factor of a zero anchor is 0. For an even number of anchors the median is the mean of the middle two. If more than
    half of the anchors are zero, ``r`` is the median of the others, because ``r = 0`` would remove all directions.

    >>> scales(torch.tensor([1.0, 2.0, 0.0, 4.0]))
    (tensor([1.5000, 0.7500, 0.0000, 0.3750]), tensor(1.5000))
    """
    r = torch.quantile(lengths, 0.5)
    if not r and bool(lengths.any()):
        r = torch.quantile(lengths[lengths > 0], 0.5)
    return torch.where(lengths > 0, r / lengths.clamp_min(torch.finfo(lengths.dtype).tiny), 0.0), r


def minimize(
    grad_fn: GradFn, batches: Iterable[Batch], v: Tensor, directions: Directions, c0: Tensor, lr: float, lam: float
) -> Tensor:
    """Return the coefficients ``[n]`` after one step of Adam per batch, starting from ``c0``.

    Args:
        grad_fn: Returns gradient and loss at parameters and a batch.
        batches: Batches of the server's data.
        v: Parameters of the model, ``[d]``.
        directions: Directions of the search.
        c0: Initial coefficients, ``[n]``.
        lr: Learning rate of Adam.
        lam: Weight of the squared distance from ``c0``.
    """
    c = c0.clone()
    m = torch.zeros_like(c0)
    s = torch.zeros_like(c0)
    for t, batch in enumerate(batches, start=1):
        g = directions.slopes(grad_fn(directions.at(v, c), batch)) + lam * (c - c0)
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        c = c - lr * m / (1 - 0.9**t) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)
    return c


def surrogate(at: ServerTraining, theta: Tensor) -> LossFn:
    """Return the loss ``h`` of features with a linear head.

    Args:
        at: Training at the server.
        theta: Linear head, ``[C', f + 1]``; its last column is the bias.
    """

    def loss_fn(v: Tensor, batch: Batch) -> Tensor:
        return at.task.loss(linear(theta, at.model(v, batch.x).features), batch.y)

    return loss_fn


def linear(theta: Tensor, features: Tensor) -> Tensor:
    """Compute the logits ``[B, C']`` of a linear head.

    Args:
        theta: Linear head, ``[C', f + 1]``.
        features: Features, ``[B, f]``.
    """
    return F.linear(features.to(theta.dtype), theta[:, :-1], theta[:, -1])


def new_head(key: Tensor, classes: int, width: int, like: Tensor) -> Tensor:
    """Initialize a linear head ``[C', f + 1]`` like PyTorch's linear layers.

    Args:
        key: Random key.
        classes: Number of classes.
        width: Number ``f`` of features.
        like: Tensor with the data type and device of the head.
    """
    bound = 1 / math.sqrt(width)
    return ((2 * uniform(key, (classes, width + 1)) - 1) * bound).to(like.dtype).to(like.device)


def train_head(at: ServerTraining, theta: Tensor, plan: Sequence[Tensor], v: Tensor, b: Tensor, lr: float) -> Tensor:
    """Return the head ``[C', f + 1]`` after one step of Adam per batch of ``plan``; features are computed once.

    Args:
        at: Training at the server.
        theta: Initial head, ``[C', f + 1]``.
        plan: Indices of the samples of each step.
        v: Parameters of the model whose body computes the features, ``[d]``.
        b: Buffers of the model, ``[m]``.
        lr: Learning rate of Adam.
    """
    assert at.data is not None
    if not plan:
        return theta
    used = torch.unique(torch.cat(list(plan)))
    x, y = at.data.x, at.data.y
    features = at.outputs(v, b, x[used.to(x.device)]).features
    targets = y[used.to(y.device)].to(features.device)
    theta = theta.clone()
    m, s = torch.zeros_like(theta), torch.zeros_like(theta)
    for t, index in enumerate(plan, start=1):
        where = torch.searchsorted(used, index).to(features.device)
        leaf = theta.requires_grad_()
        (g,) = torch.autograd.grad(at.task.loss(linear(leaf, features[where]), targets[where]), leaf)
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        theta = (theta - lr * m / (1 - 0.9**t) / ((s / (1 - 0.999**t)).sqrt() + 1e-8)).detach()
    return theta


def cosine(
    at: ServerTraining, theta: Tensor, v: Tensor, b: Tensor, directions: Directions, c: Tensor, key: Tensor
) -> float | None:
    """Compute the cosine between the gradients over ``c`` of ``h`` and of the clients' own loss on test samples.

    Both gradients are means over at most ``MEASURED`` samples. Without this diagnostic the result is None.

    Args:
        at: Training at the server.
        theta: Linear head, ``[C', f + 1]``.
        v: Parameters of the model, ``[d]``.
        b: Buffers of the model, ``[m]``.
        directions: Directions of the search.
        c: Coefficients, ``[n]``.
        key: Random key that selects samples.
    """
    if at.reference_samples is None:
        return None
    assert at.data is not None
    point = directions.at(v, c)

    def gradient(loss_fn: LossFn, x: Tensor, y: Tensor) -> Tensor:
        index = at.plan(key, len(y), local_epochs=1, batch_size=min(len(y), MEASURED), drop_last=True)[0]
        total = torch.zeros_like(point)
        for part in torch.split(index, 64):
            g = at.gradient(loss_fn, b, train=False)(point, at.batch(part, 0, x, y))
            total.add_(g, alpha=len(part) / len(index))
        return directions.slopes(total)

    def own(v: Tensor, batch: Batch) -> Tensor:
        assert at.reference_samples is not None
        return at.reference_samples.task.loss(at.model(v, batch.x).logits, batch.y)

    h = gradient(surrogate(at, theta), at.data.x, at.data.y)
    true = gradient(own, at.reference_samples.x, at.reference_samples.y)
    return float(F.cosine_similarity(h, true, dim=0))
