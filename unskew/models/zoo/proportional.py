"""Proportional hazards model for survival analysis: one linear effect shifts the hazards of all bins.

    z_ij = w . phi(x_i) + b_j

References:
    Cox 1972, "Regression Models and Life-Tables", Journal of the Royal Statistical Society B 34; with piecewise constant
    hazards: Friedman 1982, Annals of Statistics 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from unskew.models.zoo.basic import Classifier, OneHot, hidden_layers, num_features


class SharedEffect(nn.Linear):
    """Linear layer whose outputs have the same weights, `[1, features]`, and a bias each.

    All parameters start at 0, so that training starts at the marginal hazards.

    Args:
        features: Length of the feature vector.
        outputs: Number of outputs.
    """

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__(features, outputs)
        self.weight = nn.Parameter(torch.zeros(1, features))
        nn.init.zeros_(self.bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map features `[batch, features]` to outputs `[batch, outputs]`."""
        return input @ self.weight.T + self.bias


class Proportional(Classifier):
    """Proportional hazards: the inputs shift all outputs equally, and each output has an intercept.

    Each category has a weight of its own, without a reference category.

    Args:
        shape: Shape of a sample, `(features,)` or `(channels, height, width)`.
        classes: Number of bins.
        categories: Number of codes of each input, 0 for numeric inputs; empty if all inputs are numeric.
        hidden: Widths of the hidden layers.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, categories: Sequence[int] = (), hidden: Sequence[int] = ()
    ) -> None:
        features = num_features("The proportional model", shape)
        body: list[nn.Module] = [nn.Flatten()]
        if any(categories):
            body.append(OneHot(categories))
            features = sum(codes or 1 for codes in categories)
        layers, features = hidden_layers(features, hidden)
        super().__init__(nn.Sequential(*body, *layers), features, classes)
        self.head = SharedEffect(features, classes)
