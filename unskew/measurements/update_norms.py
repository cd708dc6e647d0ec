"""Norms of a round's updates and cosines between them (Zhu et al. 2025, arXiv:2503.20138, Figure 2)."""

from __future__ import annotations

import math

import torch

from unskew.measurements.base import Diagnostic


class UpdateNorms(Diagnostic):
    """Norms of the updates ``Delta_k`` that the server accepted in a round, and cosines between them.

    ``updates/norm`` is ``||Delta_k||_2``, and ``updates/cosine`` is ``<Delta_j, Delta_k> / (||Delta_j|| ||Delta_k||)`` over
    pairs ``j < k``. Each is reported as its mean, and with ``_min`` and ``_max`` its extremes. Late updates are included, and
    only slices that are sent count. With fewer than two updates of nonzero length the cosine is NaN.
    """

    def metrics(self) -> dict[str, float]:
        """Return the six metrics."""
        deltas = torch.stack([update.delta for update in self.updates]).to(torch.float64)
        norms = torch.linalg.vector_norm(deltas, dim=1)
        unit = deltas[norms > 0] / norms[norms > 0, None]
        first, second = torch.triu_indices(len(unit), len(unit), offset=1)
        cosines = (unit @ unit.T)[first, second]
        return mean_min_max("norm", norms) | mean_min_max("cosine", cosines)


def mean_min_max(name: str, values: torch.Tensor) -> dict[str, float]:
    """Return mean, minimum and maximum of ``values``; NaN if there are none.

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
