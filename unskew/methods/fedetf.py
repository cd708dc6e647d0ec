"""FedETF: a fixed classifier whose class vectors have equal angles, the same at all clients.

Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier", 2023, arXiv:2303.10058. With the features ``a``, ``C`` classes and ``n_kc`` samples of class ``c``::

    M = sqrt(C / (C - 1)) Q (I - 1 1^T / C)                   Q [w, C] orthonormal, w >= C
    z = s M^T (U a + u) / ||U a + u||;    loss  CE(z + gamma log n_k, y)

The columns of ``M`` have the cosine ``-1 / (C - 1)``. The projection ``U``, ``u`` and the scale ``s`` are trained and
averaged like the body; ``M`` is a constant, so it is neither sent nor trained. As in the authors' code (``nodes.py`` of
ZexiLee/ICCV-2023-FedETF), absent classes count as one sample. ``Q`` is from normal numbers, which makes it uniform; the
authors draw uniform ones. Their personal models train ``U`` and ``M`` in turn; use ``fedetf+ft`` here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.methods.ccvr import CCVR
from unskew.methods.fedala import FedALA
from unskew.methods.fedrep import FedRep
from unskew.methods.head_replacement import HeadReplacement
from unskew.methods.logit_adjustment import LogitAdjustment
from unskew.protocol.rules import Method
from unskew.protocol.search_space import Space, log_range
from unskew.seeding import generator

TRAIN_HEADS = (CCVR, FedALA, FedRep)
"""Methods that train the head alone, also with classes that inherit from them."""


class EqualAngleHead(nn.Module):
    """Projection of features to unit vectors, and their products with fixed class vectors of equal angles."""

    def __init__(self, linear: nn.Linear, width: int, scale: float):
        super().__init__()
        self.projection = nn.Linear(linear.in_features, width).to(linear.weight)
        self.scale = nn.Parameter(linear.weight.new_tensor([scale]))
        frame = equal_angle_vectors(width, linear.out_features).to(linear.weight)
        self.frame = nn.Parameter(frame, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features ``[B, f]`` to logits ``[B, C]``."""
        return self.scale * (F.normalize(self.projection(x), dim=1) @ self.frame)


def equal_angle_vectors(width: int, classes: int) -> Tensor:
    """Return unit vectors with the cosine ``-1 / (C - 1)`` as columns, float64 ``[w, C]``; always the same ones.

    Args:
        width: Length ``w`` of the vectors, at least ``C``.
        classes: Number ``C`` of vectors, at least 2.
    """
    draws = torch.randn(width, classes, generator=generator(0, "fedetf classifier"), dtype=torch.float64)
    centered = torch.eye(classes, dtype=torch.float64) - 1 / classes
    q: Tensor = torch.linalg.qr(draws).Q
    return math.sqrt(classes / (classes - 1)) * q @ centered


@dataclass(frozen=True)
class FedETF(LogitAdjustment, HeadReplacement):
    """Fixed classifier of equal angles.

    Attributes:
        width: Length of the class vectors, at least the number of classes; 0 for the larger one of the numbers of classes
            and features.
        scale: Initial value of the scale of the logits, which is trained. The authors use 10, and 1 for ResNets.
        gamma: Strength of the correction by class counts; 0 removes it.
    """

    name: ClassVar[str] = "fedetf"
    summary: ClassVar[str] = "a fixed classifier of equal angles, and a loss balanced by class counts"
    paper: ClassVar[str] = "Li et al. 2023, arXiv:2303.10058"
    # From above the authors' 1 for ResNets, where few classes have large logits, to three times their 10.
    spaces: ClassVar[Mapping[str, Space]] = {"scale": log_range(1.0, 30.0)}

    width: Annotated[int, Field(ge=0)] = 0
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    gamma: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0

    @property
    def neutral(self) -> bool:
        """True if class counts do not change the logits."""
        return self.gamma == 0

    def new_head(self, linear: nn.Linear) -> EqualAngleHead:
        """Return the head that replaces a linear one.

        Args:
            linear: The linear head.

        Raises:
            ConfigError: If there are more classes than ``width``, or only one.
        """
        classes = linear.out_features
        width = self.width or max(classes, linear.in_features)
        if classes < 2 or width < classes:
            remedy = f"Use width={classes} or more" if classes > 1 else "Use data with at least two classes"
            raise ConfigError(
                f"fedetf needs two classes and class vectors of at least as many numbers, but there are {classes} classes "
                f"and width={width}. {remedy}."
            )
        return EqualAngleHead(linear, width, self.scale)

    def conflict_with(self, method: Method) -> str | None:
        """Reject rules that change the logits, or that replace or train the head alone."""
        for rule in method.rules:
            if isinstance(rule, TRAIN_HEADS):
                return f"{rule.name} trains the head of the model alone, but with fedetf the classifier is fixed. Remove one."
            if isinstance(rule, HeadReplacement) and not isinstance(rule, LogitAdjustment):
                return f"{rule.name} and fedetf both replace the head of the model. Remove one of them."
        return super().conflict_with(method)

    def adjust(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return ``z + gamma log n_k``, with one sample for absent classes."""
        return logits + self.gamma * torch.log(counts.clamp_min(1))
