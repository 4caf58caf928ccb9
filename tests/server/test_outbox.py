"""What peers were sent and have not read: it counts until they read it, and those who read nothing get no more."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvstore.handoff.messages import Done, RegionsAnswer
from kvstore.server.outbox import REPLIES_AHEAD, Outbox, Unread

OK = Done()


def regions(count: int) -> RegionsAnswer:
    """Which brings so many descriptors."""
    return RegionsAnswer(((0, 4096),) * count)


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Three connections: our end, and the peer's."""
    made = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    yield made
    for pair in made:
        for end in pair:
            end.close()


@pytest.fixture
def descriptor() -> Iterator[int]:
    with open(os.devnull, "rb") as file:
        yield file.fileno()


def test_past_the_share_each_has_one_and_who_has_some_unread_none(pairs: list[Pair], descriptor: int) -> None:
    outbox, (first, second, third) = Outbox(4), [ours for ours, _ in pairs]
    assert outbox.room(first, 3) == 3
    outbox.send(first, regions(3), [descriptor] * 3)
    assert outbox.room(second, 2) == 1, "with one everybody gets on"
    assert outbox.room(second, 1) == 1
    outbox.send(second, regions(1), [descriptor])
    assert outbox.room(third, 5) == 1
    with pytest.raises(Unread):
        outbox.room(first, 1)
    assert outbox.room(first, 0) == 0, "an answer without descriptors"


def test_what_was_read_counts_no_more(pairs: list[Pair], descriptor: int) -> None:
    outbox, (ours, theirs), (other, _) = Outbox(1), pairs[0], pairs[1]
    for _ in range(2 * REPLIES_AHEAD):
        assert outbox.room(ours, 1) == 1
        outbox.send(ours, regions(1), [descriptor])
        assert outbox.is_in_flight(ours)
        _, descriptors, _, _ = socket.recv_fds(theirs, 100, 1)
        os.close(descriptors[0])
        assert not outbox.is_in_flight(ours)
    assert outbox.room(other, 1) == 1
    outbox.send(other, regions(1), [descriptor])
    with pytest.raises(Unread):
        outbox.room(other, 1)


def test_who_reads_is_answered_for_ever(pairs: list[Pair]) -> None:
    outbox, (ours, theirs) = Outbox(1), pairs[0]
    for _ in range(2 * REPLIES_AHEAD):
        outbox.send(ours, OK)
        assert theirs.recv(100)
    for _ in range(REPLIES_AHEAD):
        outbox.send(ours, OK)
    with pytest.raises(Unread):
        outbox.send(ours, OK)
