"""A bag of words: the mean of a text's word vectors, and a small network on it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

PADDING = 0  # the number of the padding token


def text_mean(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    words: int,
    embedding: int = 64,
    hidden: int = 64,
    dropout: float = 0.0,
) -> nn.Module:
    """Return a classifier of texts: the mean word vector, a ReLU layer, and a linear layer.

    It maps word numbers (batch, length) to logits (batch, ``num_classes``). ``words`` is the size
    of the vocabulary, which the data state.

    Joulin, Grave, Bojanowski, Mikolov 2017, "Bag of tricks for efficient text classification"; here
    with a hidden layer, whose outputs are the features.

    Parameters
    ----------
    embedding
        Width of the word vectors.
    hidden
        Width of the hidden layer, and of the features.
    dropout
        Dropout rate before the last layer.
    """
    if len(input_shape) != 1 or not words:
        raise ValueError(f"text_mean takes texts, not inputs of {list(input_shape)}")
    for name, size in (("embedding", embedding), ("hidden", hidden)):
        if isinstance(size, bool) or size < 1:
            raise ValueError(f"model.{name} must be at least 1, not {size!r}")
    return nn.Sequential(
        MeanVector(words, embedding),
        nn.Linear(embedding, hidden),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, num_classes),
    )


class MeanVector(nn.Module):
    """The mean of the vectors of a text's words, without padding: (batch, length) to (batch, m)."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(words, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean vectors; a text of padding alone has zeros."""
        present = (x != PADDING).unsqueeze(-1)
        total = (self.vectors(x) * present).sum(1)
        mean: Tensor = total / present.sum(1).clamp(min=1)
        return mean
