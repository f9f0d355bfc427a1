"""Recurrent networks for texts: they predict the next word after each word."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def word_lstm(
    input_shape: Sequence[int],
    num_classes: int,
    *,
    embedding: int = 96,
    hidden: int = 70,
    layers: int = 1,
) -> nn.Module:
    """Return a word-level LSTM: embedding, LSTM layers projected to its width, linear output.

    It maps word numbers (batch, length) to logits (batch, length, ``num_classes``). With 10,004
    words it has the 1,984,348 parameters of codistillation's small model. The large model, with
    4,278,644 parameters, has ``embedding = 192``, ``hidden = 140``, ``layers = 2``.

    Lichtarge, Amid, Kumar, Yang, Anil, Mathews, "Heterogeneous federated learning using knowledge
    codistillation", appendix E; the counts are those of FedJAX's word model (Ro, Suresh, Wu 2021).

    Parameters
    ----------
    embedding
        Width of the word embedding.
    hidden
        Width of the LSTM layers.
    layers
        Number of LSTM layers.
    """
    if len(input_shape) != 1:
        raise ValueError(
            f"word_lstm takes texts, word numbers (length,), not inputs of {list(input_shape)}"
        )
    for name, size in (("embedding", embedding), ("hidden", hidden), ("layers", layers)):
        if isinstance(size, bool) or size < 1:
            raise ValueError(f"model.{name} must be at least 1, not {size!r}")
    body: list[tuple[str, nn.Module]] = [("embedding", nn.Embedding(num_classes, embedding))]
    for i in range(1, layers + 1):
        body += [
            (f"lstm{i}", LSTM(embedding, hidden)),
            (f"tanh{i}", nn.Tanh()),
            (f"back{i}", nn.Linear(hidden, embedding)),
        ]
    return nn.Sequential(OrderedDict([*body, ("out", nn.Linear(embedding, num_classes))]))


class LSTM(nn.Module):
    """An LSTM layer with one bias, from (batch, length, in) to its outputs (batch, length, out).

    Torch's LSTM has two biases, one of them redundant. The gates are input, forget, cell and
    output. The forget gate's bias starts at 1, so that a cell remembers at first (Jozefowicz,
    Zaremba, Sutskever 2015).
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.input = nn.Linear(width, 4 * hidden)
        self.recurrent = nn.Linear(hidden, 4 * hidden, bias=False)
        with torch.no_grad():
            self.input.bias.zero_()
            self.input.bias[hidden : 2 * hidden] = 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states (batch, length, out) for inputs (batch, length, in).

        The initial state is 0.
        """
        from_input = self.input(x)  # all places at once
        h = c = x.new_zeros(x.shape[0], self.hidden)
        states = []
        for gates in from_input.unbind(1):
            i, f, g, o = (gates + self.recurrent(h)).chunk(4, -1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)
