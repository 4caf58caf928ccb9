"""Streams leave nothing behind in the client's process, however they end: gRPC keeps 18 KB of one that nobody ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvstore_client import Client, connect
from kvstore_client.planes.shared_memory import resident
from kvstore_client.planes.shared_memory import session as shared_memory
from kvstore_client.planes.stream import prefix as streamed
from kvstore_client.planes.stream import session as stream
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(model_id="streams")
COUNT = 32
CALLS = 400
ROUNDS = 4
GROWN_BYTES_MAX = 3 << 20
"""Less than half of what so many streams leave behind that nobody ends."""


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def grows(call: Callable[[], object], calls: int = CALLS, bound: int = GROWN_BYTES_MAX) -> bool:
    """Return True when the process grew by more than ``bound`` in each of some rounds of ``calls``: what is left behind
    is so in every one of them; streams that busy processors have not ended yet, and what an allocator keeps, are
    not."""
    for _ in range(calls // 4):
        call()
    for _ in range(ROUNDS):
        before = own_bytes()
        for _ in range(calls):
            call()
        if own_bytes() - before < bound:
            return False
    return True


@pytest.fixture(scope="module")
def stored(client: Client) -> Client:
    client.store(SPEC, tokens_of(COUNT, 1), random_cache(SPEC, COUNT, 1)).wait(20)
    return client


def test_fetches_read_to_their_end(stored: Client) -> None:
    def fetch() -> None:
        assert [layer for layer, _ in stored.fetch_layers(SPEC, tokens_of(COUNT, 1))] == list(range(SPEC.layer_count))

    assert not grows(fetch)


def test_fetches_dropped_half_way(stored: Client) -> None:
    def fetch() -> None:
        assert next(iter(stored.fetch_layers(SPEC, tokens_of(COUNT, 1))))[0] == 0

    assert not grows(fetch)


def test_fetches_cancelled_before_they_are_read(stored: Client) -> None:
    def fetch() -> None:
        layers = stored.fetch_layers(SPEC, tokens_of(COUNT, 1))
        layers.cancel()
        layers.close()

    assert not grows(fetch)


def interrupt(*_: object, **_more: object) -> None:
    raise KeyboardInterrupt


def interrupted_fetch(client: Client) -> None:
    with pytest.raises(KeyboardInterrupt):
        client.fetch_layers(SPEC, tokens_of(COUNT, 1))


def test_fetches_interrupted_before_anybody_has_their_stream(
    stored: Client, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C does it, whenever it comes."""
    room, name = (shared_memory, "MappedPrefix") if plane == "local" else (stream, "StreamPrefix")
    monkeypatch.setattr(room, name, interrupt)
    assert not grows(lambda: interrupted_fetch(stored))
    eventually(lambda: stored.stats().sessions.lease_count == 0)


def test_a_fetch_interrupted_as_its_prefix_is_made_gives_its_lease_back(
    stored: Client, plane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = resident.ResidentPrefix if plane == "local" else streamed.StreamPrefix
    with monkeypatch.context() as interrupted:
        interrupted.setattr(base, "__init__", interrupt)
        interrupted_fetch(stored)
    eventually(lambda: stored.stats().sessions.lease_count == 0)


def test_watches(stored: Client) -> None:
    assert not grows(lambda: stored.watch().close())


def fd_count() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_clients_that_close_at_once(sidecar: Sidecar) -> None:
    """A stream that is still to be ended when its session ends is ended all the same: else gRPC keeps its connection,
    too."""

    def session() -> None:
        with connect(sidecar.address) as client:
            client.watch()
            layers = client.fetch_layers(SPEC, tokens_of(COUNT, 1))
            next(iter(layers), None)

    threads = threading.active_count()  # those that earlier files of this process left count in no way
    for _ in range(5):
        session()
    eventually(lambda: threading.active_count() <= threads + 8)
    descriptors = fd_count()
    assert not grows(session, 60)
    eventually(lambda: fd_count() <= descriptors + 8)


def test_a_remote_sidecar_that_is_not_there(plane: str) -> None:
    if plane == "local":
        pytest.skip("no gRPC call is made to a local one: its socket is not there")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def attempt() -> None:
        with pytest.raises(Unavailable):
            connect(address, timeout_s=5.0)

    assert not grows(attempt, 75, GROWN_BYTES_MAX // 6), "each left 15 KB behind"
