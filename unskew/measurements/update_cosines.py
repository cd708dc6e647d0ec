"""Cosines of a round's updates with their mean, and of means of consecutive rounds (Zhu et al. 2025, arXiv:2503.20138).

Figure 2 of the paper compares individual updates with the true update, and true updates across rounds. The true update of a
round is the weighted mean over all clients, ``sum_k p_k Delta_k``, so it is measured if all clients take part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from unskew.measurements.base import Diagnostic

PREVIOUS = "previous"
"""Entry of the ``measured`` tensors in checkpoints: the mean update of the round before, ``[d]``."""


class UpdateCosines(Diagnostic):
    """Cosines of the updates that the server accepted in a round with their weighted mean, and with the previous mean.

    ``updates/cosine`` is the mean over clients of the cosine between ``Delta_k`` and ``sum_k p_k Delta_k``, with ``_min`` and
    ``_max`` its extremes. ``updates/cosine_across_rounds`` is the cosine between the means of this and of the previous round.
    Late updates are included, and only slices that are sent count. A cosine with a zero vector is NaN.
    """

    mean: Tensor | None = None

    def begin(self) -> None:
        """Start a round, and store the mean update of the round before."""
        if self.updates:
            self.server.observed["measured"][PREVIOUS] = self._mean()
        self.mean = None
        super().begin()

    def metrics(self) -> dict[str, float]:
        """Return the metrics."""
        mean = self._mean()
        cosines = [cosine for update in self.updates if not math.isnan(cosine := cosine_of(update.delta, mean))]
        previous = self.server.observed["measured"].get(PREVIOUS)
        return {
            "updates/cosine": sum(cosines) / len(cosines) if cosines else math.nan,
            "updates/cosine_min": min(cosines, default=math.nan),
            "updates/cosine_max": max(cosines, default=math.nan),
            "updates/cosine_across_rounds": math.nan if previous is None else cosine_of(mean, previous),
        }

    def _mean(self) -> Tensor:
        """Return the weighted mean of the finished round's updates in float64, ``[d]``, computed once."""
        if self.mean is None:
            total = torch.zeros_like(self.updates[0].delta, dtype=torch.float64)
            for update in self.updates:
                total.add_(update.delta, alpha=update.weight)
            self.mean = total / sum(update.weight for update in self.updates)
        return self.mean


def cosine_of(first: Tensor, second: Tensor) -> float:
    """Return the cosine of the angle between two vectors ``[d]``, in float64; NaN if one is zero.

    Args:
        first: First vector.
        second: Second vector.
    """
    a, b = first.to(torch.float64), second.to(torch.float64)
    lengths = float(torch.linalg.vector_norm(a) * torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / lengths if lengths else math.nan
