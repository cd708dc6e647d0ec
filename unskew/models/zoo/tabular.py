"""A model of tables with categories.

References:
    Guo and Berkhahn 2016, "Entity Embeddings of Categorical Variables", arXiv:1604.06737.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.zoo.basic import Classifier, hidden_layers, num_features

LARGEST = 50
"""Largest width of an embedding, for any number of categories."""


class Embeddings(nn.Module):
    """Numbers as they are, and behind them a learned vector for each category.

    Args:
        categories: Of each input, how many values its codes have; 0 of numbers.
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.numbers = [j for j, values in enumerate(categories) if not values]
        self.coded = [j for j, values in enumerate(categories) if values]
        self.last = [values - 1 for values in categories if values]  # no code is beyond, whoever gives it
        self.embeddings = nn.ModuleList(nn.Embedding(n, embedding_size(n)) for n in categories if n)
        self.features = len(self.numbers) + sum(embedding_size(n) for n in categories)

    def forward(self, x: Tensor) -> Tensor:
        """From inputs ``[batch, inputs]`` to ``[batch, features]``."""
        parts = [x[:, self.numbers]] if self.numbers else []
        for embed, j, last in zip(self.embeddings, self.coded, self.last, strict=True):
            parts.append(embed(x[:, j].long().clamp(0, last)))
        return torch.cat(parts, 1)


def embedding_size(values: int) -> int:
    """Length of the vector of a category with so many values, 0 of a number.

    >>> embedding_size(3), embedding_size(1000), embedding_size(0)
    (2, 50, 0)
    """
    return min(LARGEST, (values + 1) // 2)


class TableMLP(Classifier):
    """A multilayer perceptron with ReLU on numbers and embeddings of categories.

    Args:
        shape: Shape of a sample, `(inputs,)`.
        classes: Number of logits, or of the numbers that are predicted.
        categories: Of each input, how many values its codes have; 0 of numbers. Empty if all are numbers.
        hidden: Widths of the hidden layers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        categories: Sequence[int] = (),
        hidden: Sequence[int] = (64, 32),
    ) -> None:
        inputs = num_features("The table-mlp", shape)
        if categories and len(categories) != inputs:
            raise ConfigError(f"The table-mlp has {inputs} inputs, but is told of {len(categories)} columns.")
        embeddings = Embeddings(categories or [0] * inputs)
        layers, features = hidden_layers(embeddings.features, hidden)
        super().__init__(nn.Sequential(nn.Flatten(), embeddings, *layers), features, classes)
