"""FedDisco: clients whose classes are distributed unlike those of all get smaller weights.

Ye, Xu, Wang, Xu, Chen, Wang, "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", 2023, arXiv:2305.19229,
Equation 7. With ``n_k`` samples and class shares ``q_k`` at client ``k`` of the cohort ``S``::

    p_k ~ max(0, n_k / n_S - a d_k + b)        d_k = KL(q_k || target) / sum_{j in S} KL(q_j || target)

The other distances are those of the authors' code (``disco.py`` of MediaBrain-SJTU/FedDisco) and are not normalized. If all
weights would be 0, clients are weighted by samples, as there. Here the weights of a cohort have the sum ``n_S``, which means
do not depend on, so ``a = b = 0`` is exactly FedAvg, and a server with samples of its own (``hfcl``) has its share of them.

The server computes the weights from the clients' class counts, which it has before the first round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ClientRule
from unskew.protocol.search_space import Space, uniform_range

ROUNDING = 1e-12
"""Smaller divergences are rounding errors, which normalization must not enlarge."""


@dataclass(frozen=True)
class FedDisco(ClientRule):
    """Discrepancy-aware client weights.

    Attributes:
        a: Strength with which discrepancy reduces a weight.
        b: Constant that is added to all weights. With ``a=0,b=0`` it is FedAvg.
        distance: ``kl``, or ``l1``, ``l2`` or ``cosine``, which are not normalized over the cohort.
        target: Shares to compare with: equal for all classes, or those of ``all`` clients together.
    """

    name: ClassVar[str] = "feddisco"
    summary: ClassVar[str] = "smaller weights for clients with skewed classes"
    paper: ClassVar[str] = "Ye et al. 2023, arXiv:2305.19229"
    supports_delays: ClassVar[bool] = False
    needs = ("one_class",)
    tasks_reason: ClassVar[str] = "its weights compare the shares of classes"
    # Around the defaults.
    spaces: ClassVar[Mapping[str, Space]] = {"a": uniform_range(0.1, 0.9), "b": uniform_range(0.0, 0.3)}
    idle_options = (({"a": 0}, ("distance", "target")),)

    a: Annotated[float, Field(ge=0)] = 0.5
    b: Annotated[float, Field(ge=0)] = 0.1
    distance: Literal["kl", "l1", "l2", "cosine"] = "kl"
    target: Literal["uniform", "all"] = "uniform"

    def weights(self, federation_info: FederationInfo, cohort: Sequence[int]) -> np.ndarray:
        """Return the weights ``n_S p_k`` of a cohort, ``[len(cohort)]``, with ``p_k`` of sum 1.

        Args:
            federation_info: Server's information about the federation.
            cohort: Clients of the round.
        """
        counts = federation_info.class_counts()
        target = np.ones(federation_info.classes) if self.target == "uniform" else counts.sum(0)
        own = counts[list(cohort)]
        sizes = np.array([federation_info.size(client) for client in cohort], dtype=float)
        d = self.discrepancies(own / np.maximum(own.sum(1, keepdims=True), 1), target / target.sum())
        weights = np.maximum(0.0, sizes + sizes.sum() * (self.b - self.a * d))
        return weights * (sizes.sum() / weights.sum()) if weights.any() else sizes

    def discrepancies(self, shares: np.ndarray, target: np.ndarray) -> np.ndarray:
        """Return the discrepancy ``d_k`` of each client, ``[n]``.

        Args:
            shares: Class shares of the clients, ``[n, C]``.
            target: Class shares to compare with, ``[C]``.
        """
        if self.distance == "cosine":
            lengths = np.linalg.norm(shares, axis=1) * np.linalg.norm(target)
            cosine: np.ndarray = 1 - shares @ target / np.maximum(lengths, 1e-300)
            return cosine
        if self.distance != "kl":
            norms: np.ndarray = np.linalg.norm(shares - target, ord=int(self.distance[1]), axis=1)
            return norms
        ratios = np.divide(shares, target, out=np.ones_like(shares), where=shares > 0)
        kl: np.ndarray = (shares * np.log(ratios)).sum(1)
        kl[kl < ROUNDING] = 0.0
        return kl / max(float(kl.sum()), ROUNDING)
