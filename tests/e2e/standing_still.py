"""Calls that are made ready while a sidecar runs, and made when it stands still."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kvstore_client import (
    AsyncClient,
    Client,
    Receipt,
    StoreWriter,
    Transfer,
)
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import KVStoreError
from kvstore.seams import WorkerThreads
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()

COUNT = 64

TOKENS, OTHERS = tokens_of(COUNT), tokens_of(COUNT, 1)

CACHE = random_cache(SPEC, COUNT)

TIMEOUT_S = 1.0

BOUND_S = 40.0
"""For all of them at once, on a machine that is busy. A call makes a few calls at most."""

Act = Callable[[], Any]

Case = Callable[[Client], Act]
"""Makes ready while the sidecar runs; what it gives is called when it stands still."""


def ticket_of(client: Client) -> bytes:
    ticket = client.lookup(SPEC, TOKENS, hold=True).ticket
    assert ticket is not None
    return ticket


def writer_of(client: Client, shards: int = 1) -> StoreWriter:
    writer = client.start_store(SPEC, fresh(), shards=shards)
    writer.put_layer(0, CACHE[0])
    return writer


_numbers = iter(range(100, 10_000))


def fresh() -> Any:
    """Tokens that nobody has stored."""
    return tokens_of(COUNT, next(_numbers))


def joined(client: Client) -> Transfer:
    """A transfer that waits for a writer."""
    writer = client.start_store(SPEC, fresh())
    transfer = client.start_fetch(writer.ticket)
    vars(transfer)["writer"] = writer  # as long as the transfer
    return transfer


def pending(client: Client, shards: int = 2) -> Receipt:
    """A receipt whose store waits for another writer."""
    writer = writer_of(client, shards)
    receipt = writer.commit()
    vars(receipt)["writer"] = writer
    return receipt


def stored(client: Client) -> Receipt:
    """A receipt whose store is in memory, and was not asked for the device."""
    receipt = client.store(SPEC, fresh(), CACHE)
    eventually(lambda: receipt.is_done)
    return receipt


@lru_cache(maxsize=1)
def runner() -> Any:
    from tests.e2e.test_kept_e import runner_of
    from tests.recompute.models import model_of

    return runner_of(model_of("llama-biased-mha", num_key_value_heads=4, max_position_embeddings=1024))


def on_loop(make: Callable[[AsyncClient], Callable[[], Any]]) -> Case:
    """A case of the asyncio client, on a loop of its own."""

    def ready(client: Client) -> Act:
        act = make(AsyncClient(client, WorkerThreads(8, "kvstore-async")))

        async def run() -> Any:
            return await act()

        return lambda: asyncio.run(run())

    return ready


async def drained(items: Any) -> list[Any]:
    return [item async for item in items]


def plain(attribute: str) -> Callable[[Any], Act]:
    return lambda thing: lambda: getattr(thing, attribute)


class Attempt:
    """One call on a thread of its own, and how it ended."""

    def __init__(self, name: str, act: Act) -> None:
        self.name, self._act = name, act
        self.took_s = 0.0
        self.problem: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        began_s = time.monotonic()
        try:
            self._act()
        except (KVStoreError, StopIteration, StopAsyncIteration):
            pass
        except BaseException as error:
            self.problem = error
        self.took_s = time.monotonic() - began_s


def stand_still(sidecar: Sidecar, attempts: list[Attempt], bound_s: float = BOUND_S) -> None:
    """Make the attempts while the sidecar is stopped."""
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        for attempt in attempts:
            attempt.thread.start()
        until_s = time.monotonic() + bound_s
        for attempt in attempts:
            attempt.thread.join(max(0.0, until_s - time.monotonic()))
        hanging = [attempt.name for attempt in attempts if attempt.thread.is_alive()]
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)
    assert not hanging, f"these did not end within {bound_s} s of a timeout of {TIMEOUT_S} s: {hanging}"
