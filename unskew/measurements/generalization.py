"""Measured quantities of the generalization bounds of Gholami and Seferoglu 2024, arXiv:2404.11754, section 4.

With ``S_k`` the training samples of client ``k``, ``R_{S_k}`` the mean loss on them, ``R_k`` the expected loss on the
client's distribution, ``theta_k`` its model after local training, ``w_k`` its weight and ``mean`` the weighted average::

    Delta_k = R_k(theta_k) - R_{S_k}(theta_k)        generalization gap of a client's model
    delta_k = R_{S_k}(mean) - R_{S_k}(theta_k)       non-iidness
    gap     = sum_k w_k (R_k(mean) - R_{S_k}(mean))

Theorem 4.1 bounds the expected gap after one round, for a ``mu``-strongly convex and ``L``-smooth loss, by
``sum_k w_k [(L w_k^2 / mu) Delta_k + 2 sqrt(L / mu) w_k sqrt(delta_k Delta_k)]``. ``L`` and ``mu`` are not measured, so the
two sums are reported without them. If ``K'`` of ``K`` clients take part (Appendix C), the inner ``w_k`` is replaced by
``1 / K'`` if they are drawn with replacement (scheme 1), or by ``w_k K / K'`` if without (scheme 2). The sum over all clients
is estimated from the participants, each with weight ``w_k K / K'``. Theorem 4.3 bounds the gap after ``R`` rounds by
``1/R sum_r sum_k w_k [2 (L w_k^2 / mu) A + sqrt(8 L / mu) w_k sqrt(A B)]``, where ``A`` and ``B`` bound ``Delta_k`` and
``delta_k`` up to unspecified constants. Its trend is measured with ``Delta_k`` and ``delta_k`` instead of ``A`` and ``B`` and
with ``L = mu``, over the evaluated rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unskew.data.federation import ClientData, Federation
from unskew.measurements.base import Diagnostic
from unskew.simulation.evaluate import Evaluator
from unskew.simulation.server import Server


class Generalization(Diagnostic):
    """Generalization gaps of the local models of a round, and of their mean.

    The expected loss is the mean over the test set. Unless the partition is iid, the test set's classes are weighted as
    in the client's training data. All samples are evaluated without augmentation.

    Args:
        evaluator: Evaluator of the run.
        server: Server of the run, whose updates are collected from now on.
        federation: Data that the clients train on.
        history: Rows of the run so far, which is extended during the run.
    """

    def __init__(self, evaluator: Evaluator, server: Server, federation: Federation, history: Sequence[dict[str, Any]]):
        super().__init__(server)
        self.evaluator = evaluator
        self.federation = federation
        self.history = history
        self.iid = str(federation.partition).startswith("iid")

    def metrics(self) -> dict[str, float]:
        """Return the gaps, the skew, the two sums of Theorem 4.1, and the round's term and the trend of Theorem 4.3."""
        total = sum(update.weight for update in self.updates)
        weights = [update.weight / total for update in self.updates]
        models = self.models()
        mean = torch.stack([w * v for w, v in zip(weights, models, strict=True)]).sum(0)
        b = torch.stack([w * u.buffers for w, u in zip(weights, self.updates, strict=True)]).sum(0)
        everywhere = self.evaluator.losses(mean, b, *self.evaluator.test)
        gap = local = skew = first = second = 0.0
        pairs: list[tuple[float, float]] = []
        for w, v, update in zip(weights, models, self.updates, strict=True):
            client = self.federation.clients[update.client]
            seen = float(self.evaluator.losses(v, update.buffers, client.x, client.y).mean())
            unseen = self._expected(self.evaluator.losses(v, update.buffers, *self.evaluator.test), client)
            mean_seen = float(self.evaluator.losses(mean, b, client.x, client.y).mean())
            mean_unseen = self._expected(everywhere, client)
            big, small = unseen - seen, mean_seen - seen
            gap += w * (mean_unseen - mean_seen)
            local += big / len(models)
            skew += small / len(models)
            pairs.append((big, 2 * math.sqrt(max(0.0, small) * max(0.0, big))))
            first += w**3 * big
            second += w**2 * pairs[-1][1]
        term = 2 * first + math.sqrt(2) * second
        earlier = [row["generalization/round"] for row in self.history if row.get("generalization/round") is not None]
        return {
            "generalization/gap": gap,
            "generalization/local_gap": local,
            "generalization/ratio": gap / local if local else math.nan,
            "generalization/skew": skew,
            "generalization/bound_first": first,
            "generalization/bound_second": second,
            "generalization/round": term,
            "generalization/trend": (sum(earlier) + term) / (len(earlier) + 1),
            **self._partial(pairs),
        }

    def _partial(self, pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
        """Return the sums of Theorem 4.1 under partial participation, from each update's ``Delta_k`` and second term."""
        federation_info, taking_part = self.server.setup.federation_info, len(self.updates)
        if taking_part == federation_info.clients:
            return {}
        metrics = dict.fromkeys(
            (f"generalization/scheme{n}_{part}" for n in (1, 2) for part in ("first", "second")), 0.0
        )
        total = federation_info.total_weight()
        for update, (big, second) in zip(self.updates, pairs, strict=True):
            outer = update.weight / total * federation_info.clients / taking_part
            for scheme, inner in ((1, 1 / taking_part), (2, outer)):
                metrics[f"generalization/scheme{scheme}_first"] += outer * inner**2 * big
                metrics[f"generalization/scheme{scheme}_second"] += outer * inner * second
        return metrics

    def _expected(self, losses: Tensor, client: ClientData) -> float:
        """Return the mean test loss, weighted to the client's class distribution."""
        y = self.evaluator.test[1].cpu()
        if self.iid or "one_class" not in self.evaluator.task.provides:
            return float(losses.mean())
        classes = self.federation.classes
        shares = torch.bincount(client.y.cpu(), minlength=classes).to(torch.float64) / len(client.y)
        counts = torch.bincount(y, minlength=classes).clamp_min(1)
        return float(((shares / counts)[y] * losses.cpu()).sum())
