"""Descriptors travel with their packet: all of them are the receiver's, or none is left open."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.handoff.messages import RegionsAnswer, StagingAnswer
from kvstore.handoff.passing import check_descriptors, peer_uid, receive, send
from tests.server.raw import eventually

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield made
    for end in made:
        end.close()


def test_what_was_sent_is_received_with_its_files(pair: Pair) -> None:
    reading, writing = os.pipe()
    send(pair[0], RegionsAnswer(((0, 4096), (1, 8192))), [reading, writing])
    answer, descriptors = receive(pair[1])
    assert answer == RegionsAnswer(((0, 4096), (1, 8192)))
    check_descriptors(answer, descriptors)
    os.write(descriptors[1], b"x")
    assert os.read(reading, 1) == b"x"
    assert not any(os.get_inheritable(each) for each in descriptors)
    for descriptor in (reading, writing, *descriptors):
        os.close(descriptor)


@pytest.mark.parametrize("packet", [b"{", b'{"op": "dance"}', b'{"op": "staging", "bytes": 4096}'])
def test_files_that_come_with_nonsense_are_closed(pair: Pair, packet: bytes) -> None:
    reading, writing = os.pipe()
    socket.send_fds(pair[0], [packet], [reading])
    os.close(reading)
    with pytest.raises(Unavailable, match="another release"):
        receive(pair[1])
    with pytest.raises(BrokenPipeError):
        os.write(writing, b"x")
    os.close(writing)


def test_the_other_ends_close_is_the_end(pair: Pair) -> None:
    pair[0].close()
    with pytest.raises(Unavailable, match="closed"):
        receive(pair[1])


def test_files_that_did_not_come_are_missed(pair: Pair) -> None:
    send(pair[0], StagingAnswer(1, 4096))
    with pytest.raises(Unavailable, match="ulimit -n"):
        check_descriptors(*receive(pair[1]))


def test_the_peer_is_who_the_kernel_says(pair: Pair) -> None:
    assert peer_uid(pair[0]) == os.getuid()


def test_a_client_without_a_file_more_says_so_and_keeps_no_staging(sidecar: Sidecar) -> None:
    """The kernel leaves the descriptor out of the answer."""
    with connect(sidecar.address) as client:
        session = client.connect_now()
        eventually(lambda: session.presence.is_there)
        before = client.stats().sessions.staging_bytes
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        try:
            with pytest.raises(Unavailable, match="ulimit -n"):
                session.create_staging(1 << 20)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert client.stats().sessions.staging_bytes == before
        session.create_staging(1 << 20)
