"""What each client sent last, against a dictionary."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedgist.core.message import message
from fedgist.core.replies import Order, Reply, gather
from fedgist.methods.common.latest_messages import NEVER, LatestMessages

CLIENTS = 4


@message(reduce="each")
class Note:
    words: torch.Tensor


def reply(client: int, number: int, value: float) -> Reply:
    return Reply(Order(client, "mlp"), number, "train", Note(torch.full((2,), value)))


EVENTS = st.lists(
    st.one_of(
        st.integers(0, CLIENTS - 1),  # forget this client
        st.lists(
            st.tuples(st.integers(0, CLIENTS - 1), st.integers(0, 5)), unique=True, max_size=6
        ),
    ),
    max_size=6,
)


@given(EVENTS)
def test_each_clients_newest_message_is_kept(events: list[int | list[tuple[int, int]]]) -> None:
    memory = LatestMessages.of_nobody(Note(torch.ones(2)), CLIENTS)
    expected: dict[int, tuple[int, float]] = {}
    for place, event in enumerate(events):
        if isinstance(event, int):
            memory = memory.without(event)
            expected.pop(event, None)
            continue
        sent = [(c, r, 100.0 * place + 10.0 * r + c + 1.0) for c, r in event]
        memory = memory.with_replies(gather([], [reply(*one) for one in sent]))
        for client, number, value in sorted(sent):
            if number >= expected.get(client, (NEVER, 0.0))[0]:
                expected[client] = (number, value)
    notes = memory.messages(Note)
    for client in range(CLIENTS):
        number, value = expected.get(client, (NEVER, 0.0))
        assert memory.round[client] == number
        assert notes.words[client].tolist() == [value, value]
