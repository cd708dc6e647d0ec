"""Small text classifier that needs no download.

References:
    Joulin et al. 2016, "Bag of Tricks for Efficient Text Classification", arXiv:1607.01759.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unskew.errors import ConfigError
from unskew.models.zoo.basic import Classifier, hidden_layers

PADDING = -1


class PooledEmbedding(nn.Module):
    """Sum of the embeddings of a text's ``n`` tokens, divided by the square root of ``n``.

    Embeddings are initialized with a standard deviation of 0.1.

    Args:
        tokens: Number of tokens.
        width: Length of an embedding.
    """

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        nn.init.normal_(self.embedding.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids ``[batch, length]``, with -1 for padding, to ``[batch, width]``."""
        not_padding = (x != PADDING).unsqueeze(-1)
        vectors = self.embedding(x.clamp_min(0))
        total = torch.where(not_padding, vectors, torch.zeros_like(vectors)).sum(1)
        return total / not_padding.sum(1).clamp_min(1).to(total.dtype).sqrt()


class TextMLP(Classifier):
    """Linear layers with ReLU on the pooled embeddings of a text's tokens.

    Args:
        shape: Shape of a sample, `(length,)`.
        classes: Number of logits.
        tokens: Number of tokens; the default is that of the tokenizer `words`.
        width: Length of an embedding.
        hidden: Widths of the hidden layers.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        tokens: int = 1 << 14,
        width: int = 64,
        hidden: Sequence[int] = (),
    ) -> None:
        if len(shape) != 1:
            raise ConfigError(f"The text-mlp needs texts as token ids, but the inputs have shape {tuple(shape)}.")
        layers, features = hidden_layers(width, hidden)
        super().__init__(nn.Sequential(PooledEmbedding(tokens, width), *layers), features, classes)
        self.tokens = tokens
