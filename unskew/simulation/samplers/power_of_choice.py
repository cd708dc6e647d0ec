"""Power-of-choice: of a number of candidates, the clients with the largest losses train.

Cho, Wang, Joshi, "Client Selection in Federated Learning: Convergence Analysis and Power-of-Choice Selection Strategies",
2020, arXiv:2010.01243, Section 4: ``D`` candidates are drawn without replacement, client ``k`` with probability
``n_k / sum_j n_j``; they report their losses of the global model, and the ``m`` with the largest ones train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic.dataclasses import dataclass

from unskew.errors import ConfigError
from unskew.protocol.client_sampler import ClientSampler, CohortDraws
from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.messages import Tensors
from unskew.protocol.round_plan import RoundPlan


@dataclass(frozen=True)
class PowerOfChoice(ClientSampler):
    """Selects the candidates with the largest losses.

    Attributes:
        candidates: Number of candidates ``D``.
    """

    name: ClassVar[str] = "power-of-choice"
    asks_loss: ClassVar[bool] = True

    candidates: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.candidates < 10**9:
            raise ConfigError("write power-of-choice:D with the number of candidates, such as power-of-choice:20")

    def check(self, plan: RoundPlan) -> None:
        """Validate that there are enough clients and candidates."""
        if not plan.cohort <= self.candidates <= plan.clients:
            raise ConfigError(
                f"sampling=power-of-choice:{self.candidates} needs at least as many candidates as clients per round "
                f"({plan.cohort}) and at most all clients ({plan.clients}). Change the number or participation."
            )

    def init(self, info: FederationInfo) -> Tensors:
        """Return the number of samples of each client, ``[K]``."""
        return {"sizes": torch.as_tensor(np.asarray(info.sizes()), dtype=torch.int64)}

    def draw(self, state: Tensors, round: int, idle: np.ndarray, plan: RoundPlan, draws: CohortDraws) -> np.ndarray:
        """Draw the candidates, with probabilities proportional to their numbers of samples; nobody if no client is idle."""
        if not len(idle):
            return idle
        sizes = state["sizes"].numpy()[idle]
        return draws.generator.choice(idle, size=min(self.candidates, len(idle)), replace=False, p=sizes / sizes.sum())

    def select(
        self, state: Tensors, candidates: Sequence[int], losses: Sequence[float], plan: RoundPlan
    ) -> Sequence[int]:
        """Return the candidates with the largest losses; a loss that is not a number counts as smallest."""
        values = np.nan_to_num(np.array(losses, float), nan=-np.inf, posinf=np.inf)
        largest = np.argsort(-values, kind="stable")[: plan.cohort]
        return [candidates[index] for index in largest]
