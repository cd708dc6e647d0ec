"""Model for tables with categorical columns.

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
"""Maximum width of an embedding."""


class Embeddings(nn.Module):
    """Concatenation of numeric inputs with learned embeddings of categorical inputs.

    Args:
        categories: Number of categories of each input, 0 for numeric inputs.
    """

    def __init__(self, categories: Sequence[int]) -> None:
        super().__init__()
        self.numbers = [j for j, values in enumerate(categories) if not values]
        self.coded = [j for j, values in enumerate(categories) if values]
        self.last = [values - 1 for values in categories if values]  # larger codes are clamped
        self.embeddings = nn.ModuleList(nn.Embedding(n, embedding_size(n)) for n in categories if n)
        self.features = len(self.numbers) + sum(embedding_size(n) for n in categories)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs ``[batch, inputs]`` to ``[batch, features]``."""
        parts = [x[:, self.numbers]] if self.numbers else []
        for embed, j, last in zip(self.embeddings, self.coded, self.last, strict=True):
            parts.append(embed(x[:, j].long().clamp(0, last)))
        return torch.cat(parts, 1)


def embedding_size(values: int) -> int:
    """Return the width of the embedding for a number of categories; 0 for a numeric input.

    >>> embedding_size(3), embedding_size(1000), embedding_size(0)
    (2, 50, 0)
    """
    return min(LARGEST, (values + 1) // 2)


class TableMLP(Classifier):
    """Multilayer perceptron with ReLU on numbers and embeddings of categories.

    Args:
        shape: Shape of a sample, `(inputs,)`.
        classes: Number of logits, or of predicted numbers.
        categories: Number of categories of each input, 0 for numeric inputs; empty if all inputs are numeric.
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
            raise ConfigError(f"The table-mlp has {inputs} inputs, but categories has {len(categories)} entries.")
        embeddings = Embeddings(categories or [0] * inputs)
        layers, features = hidden_layers(embeddings.features, hidden)
        super().__init__(nn.Sequential(nn.Flatten(), embeddings, *layers), features, classes)
