"""FedAdagrad, FedYogi and FedAdam: adaptive server optimizers.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive Federated Optimization", 2020,
arXiv:2003.00295, Algorithm 2. With ``Delta = sum_k p_k delta_k``::

    m <- beta1 m + (1 - beta1) Delta                    (FedAdagrad: beta1 = 0, so m = Delta)
    v <- v + Delta^2                                    FedAdagrad
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)      FedYogi
    v <- beta2 v + (1 - beta2) Delta^2                  FedAdam
    theta <- theta + eta m / (sqrt(v) + tau)

Initially ``m = 0`` and ``v = tau^2``; there is no bias correction. ``tau`` is the adaptivity constant, unrelated to the
number of local steps. ``eta`` must be tuned per task (the paper's grid: powers of sqrt(10) from 1e-3 to 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from unskew.protocol.federation_info import FederationInfo
from unskew.protocol.rules import ServerRule, Tensors, Updates
from unskew.protocol.search_space import Space, log_range

_PAPER = "Reddi et al. 2020, arXiv:2003.00295"


class _FedOpt(ServerRule):
    """Common part of the three methods, which differ only in the second moment."""

    # The paper's grids.
    spaces: ClassVar[Mapping[str, Space]] = {"eta": log_range(1e-3, 10.0), "tau": log_range(1e-5, 0.1)}

    eta: float
    beta1: float
    tau: float

    def init(self, v: Tensor, federation_info: FederationInfo) -> Tensors:
        """Initialize ``m = 0`` and the second moment ``tau^2``."""
        return {"v": v, "m": torch.zeros_like(v), "second": torch.full_like(v, self.tau**2)}

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """Return the next second moment from the previous one and ``Delta^2``."""
        raise NotImplementedError

    def step(self, state: Tensors, updates: Updates) -> Tensors:
        """Take a server step, lines 11 to 13 of Algorithm 2."""
        delta = updates.aggregate.delta
        m = self.beta1 * state["m"] + (1 - self.beta1) * delta
        second = self.second_moment(state["second"], delta.square())
        return {"v": state["v"] + self.eta * m / (second.sqrt() + self.tau), "m": m, "second": second}


@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """Adagrad at the server.

    Attributes:
        eta: Server learning rate. Tune it per task; the paper's grid is the powers of √10 from 0.001 to 10.
        beta1: Decay of the first moment. The paper's 0 means ``m = Δ``.
        tau: Adaptivity; smaller is more adaptive. It is not the number of local steps.
    """

    name: ClassVar[str] = "fedadagrad"
    summary: ClassVar[str] = "Adagrad at the server"
    paper: ClassVar[str] = _PAPER

    eta: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.0
    tau: Annotated[float, Field(gt=0)] = 1e-3

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """``v + Delta^2``."""
        return second + square


@dataclass(frozen=True)
class FedYogi(_FedOpt):
    """Yogi at the server.

    Attributes:
        eta: Server learning rate. Tune it per task; the paper's grid is the powers of √10 from 0.001 to 10.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Adaptivity; smaller is more adaptive. It is not the number of local steps.
    """

    name: ClassVar[str] = "fedyogi"
    summary: ClassVar[str] = "Yogi at the server"
    paper: ClassVar[str] = _PAPER

    eta: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """``v - (1 - beta2) Delta^2 sign(v - Delta^2)``."""
        return second - (1 - self.beta2) * square * torch.sign(second - square)


@dataclass(frozen=True)
class FedAdam(_FedOpt):
    """Adam at the server.

    Attributes:
        eta: Server learning rate. Tune it per task; the paper's grid is the powers of √10 from 0.001 to 10.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        tau: Adaptivity; smaller is more adaptive. It is not the number of local steps.
    """

    name: ClassVar[str] = "fedadam"
    summary: ClassVar[str] = "Adam at the server"
    paper: ClassVar[str] = _PAPER

    eta: Annotated[float, Field(gt=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3

    def second_moment(self, second: Tensor, square: Tensor) -> Tensor:
        """``beta2 v + (1 - beta2) Delta^2``."""
        return self.beta2 * second + (1 - self.beta2) * square
