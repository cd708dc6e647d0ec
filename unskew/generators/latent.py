"""Generator of features, the inputs of a model's head, from labels and noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unskew.seeding import fold, uniform


@dataclass(frozen=True)
class LatentGenerator:
    """Generator ``G(y, eps) = W2 relu(W1 [onehot(y), eps] + b1) + b2`` as a pure function of a flat vector ``g``.

    It has no normalization, so a feature does not depend on the other ones of its batch.

    Attributes:
        classes: Number of classes.
        noise: Number of noise inputs.
        hidden: Number of hidden units.
        features: Number of outputs.
    """

    classes: int
    noise: int
    hidden: int
    features: int

    @property
    def sizes(self) -> list[int]:
        """Lengths of ``W1, b1, W2, b2`` in the vector."""
        return [self.hidden * (self.classes + self.noise), self.hidden, self.features * self.hidden, self.features]

    @property
    def size(self) -> int:
        """Length of the vector ``g``."""
        return sum(self.sizes)

    def init(self, key: Tensor) -> Tensor:
        """Draw ``g``, float32: uniform in ``+-1/sqrt(inputs)`` per layer, like PyTorch's linear layers."""
        inputs = [self.classes + self.noise] * 2 + [self.hidden] * 2
        return torch.cat(
            [
                (2 * uniform(fold(key, i), (size,)) - 1) / math.sqrt(fan_in)
                for i, (size, fan_in) in enumerate(zip(self.sizes, inputs, strict=True))
            ]
        )

    def __call__(self, g: Tensor, y: Tensor, eps: Tensor) -> Tensor:
        """Generate features ``[B, features]`` for labels ``y [B]`` and noise ``eps [B, noise]``."""
        w1, b1, w2, b2 = torch.split(g, self.sizes)
        onehot = (y[:, None] == torch.arange(self.classes, device=y.device)).to(g.dtype)
        hidden = torch.cat([onehot, eps], dim=1) @ w1.view(self.hidden, -1).T + b1
        return torch.relu(hidden) @ w2.view(self.features, self.hidden).T + b2


def diversity(eps: Tensor, z: Tensor) -> Tensor:
    """Compute ``exp(-mean_ij d(eps_i, eps_j) d'(z_i, z_j))`` over all pairs of a batch; small if features vary with noise.

    Distances are means over coordinates, as in the code of FedGen's authors: squared differences of ``eps [B, k]``, absolute
    differences of ``z [B, f]``. Norms would grow with the widths until the exponential vanishes.

    Args:
        eps: Noise, ``[B, k]``.
        z: Features, ``[B, f]``.
    """
    noise = (eps[:, None] - eps[None]).square().mean(-1)
    return torch.exp(-(noise * (z[:, None] - z[None]).abs().mean(-1)).mean())


def draw_labels(key: Tensor, present: Tensor, count: int) -> Tensor:
    """Draw labels ``[count]`` uniformly from the classes that ``present`` marks.

    Args:
        key: Random key.
        present: 1 for classes that may be drawn, 0 for others, ``[C]``.
        count: Number of labels.
    """
    ends = torch.cumsum(present.to(torch.float64), 0)
    drawn = uniform(key, (count,)).to(torch.float64) * ends[-1]
    return (drawn[:, None] >= ends[None, :]).sum(1)
