"""Whatever is dropped half way gives back what it held, here and in the sidecar: leases, staging, threads."""

from __future__ import annotations

import gc
import os
import threading
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


_numbers = iter(range(100, 10_000))


def fresh() -> Any:
    """Tokens that nobody has stored."""
    return tokens_of(COUNT, next(_numbers))


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


def transfer_of_a_store_that_is_never_written(client: Client) -> None:
    writer = client.start_store(SPEC, fresh())
    assert writer.ticket
    transfer = client.start_fetch(writer.ticket)
    eventually(lambda: client.stats().sessions.stream_count > 0)
    assert not transfer.is_done


def transfer_not_waited_for(client: Client) -> None:
    client.start_fetch_prefix(SPEC, TOKENS)


def watch(client: Client) -> None:
    watch = client.watch()
    watch.pending()


def writer_with_pieces(client: Client) -> None:
    writer = client.start_store(SPEC, fresh())
    writer.put_layer(0, CACHE[0])
    writer.put_layer(1, tuple(plane[:, :5] for plane in CACHE[1]))


def writer_in_a_cycle(client: Client) -> None:
    writer = client.start_store(SPEC, fresh())
    writer.put_layer(0, tuple(plane[:, :5] for plane in CACHE[0]))
    vars(writer)["itself"] = writer


def joined_writer(client: Client) -> None:
    writer = client.start_store(SPEC, fresh(), shards=2)
    other = client.join_store(writer.ticket, 1)
    other.put_layer(1, tuple(plane[:, :5] for plane in CACHE[1]))


def writer_whose_caller_failed(client: Client) -> None:
    with pytest.raises(ZeroDivisionError):
        writer = client.start_store(SPEC, fresh())
        writer.put_layer(0, tuple(plane[:, :5] for plane in CACHE[0]))
        raise ZeroDivisionError


ABANDONED: list[Callable[[Client], None]] = [
    not_iterated, begun, closed, in_a_cycle, failed_in_the_caller, transfer_of_a_store_that_is_never_written,
    transfer_not_waited_for, watch, writer_with_pieces, writer_in_a_cycle, joined_writer, writer_whose_caller_failed,
]  # fmt: skip


@pytest.mark.parametrize("abandon", ABANDONED)
def test_what_is_dropped_gives_back_what_it_held(stored: Sidecar, abandon: Callable[[Client], None]) -> None:
    with connect(stored.address) as client, connect(stored.address) as judge:
        abandon(client)
        eventually(lambda: not any(held(judge).values()) or gc.collect() < 0)
        threads, descriptors, _ = used(client)
        for _ in range(TIMES):
            abandon(client)
        gc.collect()
        eventually(lambda: not any(held(judge).values()))
        # A thread or a socket may be made late; one for each that was dropped would be more.
        eventually(lambda: used(client)[0] < threads + TIMES)
        eventually(lambda: used(client)[1] < descriptors + TIMES)
        eventually(lambda: used(client)[2] == 0)


def used(client: Client) -> tuple[int, int, int]:
    """(threads, descriptors, bytes of staging in use) of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd")), client.connect_now().staging.used_bytes
