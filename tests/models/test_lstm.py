"""The recurrent net of texts, against torch's own LSTM and the paper's counts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedgist.core.nets.net import split_head, stacked
from fedgist.models.lstm import LSTM, word_lstm


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 1_984_348), ({"embedding": 192, "hidden": 140, "layers": 2}, 4_278_644)],
)
def test_the_papers_counts(options: dict[str, int], count: int) -> None:
    with torch.device("meta"):
        net = word_lstm((20,), 10_004, **options)
    assert sum(p.numel() for p in net.parameters()) == count


def test_it_is_torchs_lstm_without_the_second_bias() -> None:
    torch.manual_seed(0)
    ours, torchs = LSTM(3, 4), nn.LSTM(3, 4, batch_first=True)
    with torch.no_grad():
        for name, value in (
            ("weight_ih_l0", ours.input.weight),
            ("bias_ih_l0", ours.input.bias),
            ("weight_hh_l0", ours.recurrent.weight),
            ("bias_hh_l0", torch.zeros(16)),
        ):
            torchs.get_parameter(name).copy_(value)
    x = torch.randn(5, 7, 3)
    torch.testing.assert_close(ours(x), torchs(x)[0])
    assert ours.input.bias[4:8].eq(1.0).all()  # of the forget gate
    assert ours.input.bias.sum() == 4.0


def test_stacked_texts_are_those_of_each_net() -> None:
    arch = split_head(
        lambda: word_lstm((6,), 30, embedding=5, hidden=4), (6,), 30, words=30, target="words"
    )
    nets = [arch.start(seed) for seed in (0, 1)]
    pair = stacked(nets[0], 2)
    pair = pair.with_arrays(
        {name: torch.stack([n.params[name] for n in nets]) for name in pair.params}
    )
    x = torch.randint(0, 30, (2, 3, 6))
    together = torch.func.vmap(lambda net, rows: net(rows))(pair, x)
    for i, net in enumerate(nets):
        torch.testing.assert_close(together[i], net(x[i]))


def test_what_comes_later_changes_nothing_before() -> None:
    net = split_head(
        lambda: word_lstm((6,), 30, embedding=5, hidden=4), (6,), 30, words=30, target="words"
    ).start(0)
    x = torch.randint(0, 30, (3, 6))
    other = x.clone()
    other[:, 4:] = 0
    assert torch.equal(net(x)[:, :4], net(other)[:, :4])


@pytest.mark.parametrize(
    ("shape", "options", "says"),
    [
        ((1, 28, 28), {}, r"word_lstm takes texts, word numbers \(length,\), not inputs of"),
        ((6,), {"hidden": 0}, "model.hidden must be at least 1, not 0"),
        ((6,), {"layers": True}, "model.layers must be at least 1, not True"),
    ],
)
def test_what_does_not_fit_is_named(
    shape: tuple[int, ...], options: dict[str, int], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        word_lstm(shape, 30, **options)
