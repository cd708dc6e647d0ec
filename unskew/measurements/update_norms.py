"""Norms of a round's updates and cosines between them (Zhu et al. 2025, arXiv:2503.20138, Figure 2)."""

from __future__ import annotations

import math

import torch

from unskew.measurements.base import Diagnostic


class UpdateNorms(Diagnostic):
    """Lengths of the updates ``Delta_k`` that the server took in this round, and cosines between them.

    ``updates/norm``, ``||Delta_k||_2``, and ``updates/cosine``, ``<Delta_j, Delta_k> / (||Delta_j|| ||Delta_k||)`` over the
    pairs ``j < k``: each its mean, and with ``_min`` and ``_max`` the least and the largest. Updates are as they were sent:
    also late ones, and of a method that sends slices these. Of a single update, or one of length zero, no cosine can be said.
    """

    def metrics(self) -> dict[str, float]:
        """The six figures."""
        deltas = torch.stack([update.delta for update in self.updates]).to(torch.float64)
        norms = torch.linalg.vector_norm(deltas, dim=1)
        unit = deltas[norms > 0] / norms[norms > 0, None]
        first, second = torch.triu_indices(len(unit), len(unit), offset=1)
        cosines = (unit @ unit.T)[first, second]
        return mean_min_max("norm", norms) | mean_min_max("cosine", cosines)


def mean_min_max(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean, least and largest of ``values``; not a number if there are none.

    Args:
        name: Prefix of the metrics.
        values: Values, ``[n]``.
    """
    mean, least, largest = (math.nan,) * 3 if not len(values) else (values.mean(), values.min(), values.max())
    return {
        f"updates/{name}": float(mean),
        f"updates/{name}_min": float(least),
        f"updates/{name}_max": float(largest),
    }
