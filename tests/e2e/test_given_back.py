"""Whatever is dropped half way gives back what it held, here and in the sidecar: leases, staging, threads."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 64
TOKENS, CACHE = tokens_of(COUNT), random_cache(SPEC, COUNT)
TIMES = 5


def held(client: Client) -> dict[str, int]:
    """What the sidecar holds for its clients, apart from their sessions."""
    stats = client.stats()
    sessions = stats.sessions
    return {
        "leases": sessions.lease_count,
        "leased bytes": stats.arena.leased_bytes,
        "streams": sessions.stream_count,
        "tickets": sessions.ticket_count,
        "reservations": sessions.reservation_count,
        "reserved bytes": stats.arena.reserved_bytes,
        "watchers": sessions.watcher_count,
    }


@pytest.fixture(scope="module")
def stored(sidecar: Sidecar) -> Sidecar:
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    return sidecar


def not_iterated(client: Client) -> None:
    stream = client.fetch_layers(SPEC, TOKENS)
    assert stream.token_count == COUNT


def begun(client: Client) -> None:
    layers = iter(client.fetch_layers(SPEC, TOKENS))
    next(layers)


def closed(client: Client) -> None:
    client.fetch_layers(SPEC, TOKENS).close()


def in_a_cycle(client: Client) -> None:
    cycle: list[Any] = [client.fetch_layers(SPEC, TOKENS)]
    cycle.append(cycle)


def failed_in_the_caller(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        for layer, _ in client.fetch_layers(SPEC, TOKENS):
            layer // 0


ABANDONED: list[Callable[[Client], None]] = [not_iterated, begun, closed, in_a_cycle, failed_in_the_caller]


@pytest.mark.parametrize("abandon", ABANDONED)
def test_what_is_dropped_gives_back_what_it_held(stored: Sidecar, abandon: Callable[[Client], None]) -> None:
    with connect(stored.address) as client, connect(stored.address) as judge:
        for _ in range(TIMES):
            abandon(client)
        gc.collect()
        eventually(lambda: not any(held(judge).values()))
