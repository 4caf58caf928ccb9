"""The asyncio client: waits take no thread from what they wait for, and a cancelled task gives back what it held."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from kvstore_client import AsyncClient, Client, EventKind, Match, connect, connect_async
from kvstore_client.aio import CALLS_AT_ONCE
from kvstore_client.awaiting import ended
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.spec import Durability
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, TOKENS, held
from tests.server.raw import eventually
from tests.specs import bits, tokens_of

MANY = 3 * CALLS_AT_ONCE
GIVEN_BACK_S = 20.0
"""Less than the 30 s after which a ticket goes by itself."""
LIMIT_S = 40.0
"""The sidecar ends a store that nobody commits after 60 s: who is still waiting then waited in vain."""


async def test_waits_leave_the_threads_to_those_they_wait_for(sidecar: Sidecar) -> None:
    """More transfers, layers and receipts wait than there are threads, for writers of this very client."""
    async with await connect_async(sidecar.address) as client, asyncio.timeout(LIMIT_S):
        all_wait = asyncio.Event()
        waiting: set[int] = set()

        async def one(number: int) -> None:
            writer = await client.start_store(SPEC, tokens_of(COUNT, 1000 + number), shards=2)
            transfer = await client.start_fetch(writer.ticket)
            receipt = await client.call(writer.commit)
            waits = [
                asyncio.ensure_future(client.call(transfer.wait, 60.0)),
                asyncio.ensure_future(client.call(transfer.wait_layer, 1)),
                asyncio.ensure_future(client.wait(receipt)),
            ]
            await asyncio.sleep(0.1)
            waiting.add(number)
            if len(waiting) == MANY:
                all_wait.set()
            await all_wait.wait()
            other = await client.join_store(writer.ticket, 1)
            for layer, pair in enumerate(CACHE):
                await client.call(other.put_layer, layer, pair)
            assert await client.wait(await client.call(other.commit)) is Durability.MEMORY
            _, (k, _), level = await asyncio.gather(*waits)
            assert (bits(k) == CACHE[1][0]).all()
            assert level is Durability.MEMORY

        await asyncio.gather(*(one(number) for number in range(MANY)))


async def test_many_watchers_wait_beside_a_writer(sidecar: Sidecar) -> None:
    tokens = tokens_of(16, 2001)
    async with await connect_async(sidecar.address) as client, asyncio.timeout(LIMIT_S):
        watches = [await client.watch() for _ in range(CALLS_AT_ONCE + 2)]
        events = [asyncio.ensure_future(anext(each)) for each in watches]
        await asyncio.sleep(0.2)
        await client.store(SPEC, tokens, [(k[:, :16], v[:, :16]) for k, v in CACHE])
        assert {each.kind for each in await asyncio.gather(*events)} == {EventKind.STORED}
        waiting = asyncio.ensure_future(anext(watches[0]))
        await asyncio.sleep(0.1)
        for each in watches:
            each.close()
        with pytest.raises(StopAsyncIteration):
            await waiting


async def test_awaited_waits_say_what_the_others_say(sidecar: Sidecar) -> None:
    async with await connect_async(sidecar.address) as client:
        writer = await client.start_store(SPEC, tokens_of(COUNT, 2002))
        transfer = await client.start_fetch(writer.ticket)
        for late in (
            client.call(transfer.wait, 0.2), client.call(transfer.wait_layer, 0, 0.2),
            client.call(transfer.wait_layer, 0, timeout=0.2),
        ):  # fmt: skip
            with pytest.raises(DeadlineExceeded, match=r"did not land within 0\.2 s"):
                await late
        with pytest.raises(InvalidRequest, match="not part of this transfer"):
            await client.call(transfer.wait_layer, 7)
        assert await client.call(transfer.cancel, 20.0)
        await client.call(writer.abort)
        two = await client.start_store(SPEC, tokens_of(COUNT, 2003), shards=2)
        with pytest.raises(DeadlineExceeded, match=r"did not finish within 0\.2 s"):
            await client.wait(two.commit(), 0.2)
        other = await client.join_store(two.ticket, 1)
        await client.call(other.abort)  # or whoever closes waits for the first half


async def test_a_lookup_that_was_cancelled_holds_nothing(sidecar: Sidecar) -> None:
    """Its ticket is in no hand when it comes."""
    with connect(sidecar.address) as judge:
        judge.store(SPEC, TOKENS, CACHE).wait(20.0)
        async with await connect_async(sidecar.address) as client:
            has_it, go = threading.Event(), threading.Event()

            def late() -> Match:
                match = client.client.lookup(SPEC, TOKENS, hold=True)
                has_it.set()
                assert go.wait(20.0)
                return match

            running = asyncio.ensure_future(client.call(late))
            assert await asyncio.to_thread(has_it.wait, 20.0)
            assert held(judge)["tickets"] == 1
            running.cancel()
            await asyncio.wait({running}, timeout=20.0)
            go.set()
            await asyncio.to_thread(eventually, lambda: held(judge)["tickets"] == 0, 20.0)


async def test_a_cancelled_connect_holds_up_nobody_and_leaves_no_session(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as judge:
        before = judge.stats().sessions.session_count
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            connecting = asyncio.ensure_future(connect_async(sidecar.address))
            await asyncio.sleep(0.2)
            connecting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await connecting
            assert "kvstore-async_0" in [each.name for each in threading.enumerate()], "its end was waited for"
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)
        await asyncio.to_thread(eventually, lambda: judge.stats().sessions.session_count == before, 20.0)


async def test_a_release_that_is_cancelled_is_done_all_the_same(sidecar: Sidecar) -> None:
    """Also where no thread has begun it."""
    with connect(sidecar.address) as judge:
        judge.store(SPEC, TOKENS, CACHE).wait(20.0)
        async with await connect_async(sidecar.address) as client:
            match, go = await client.lookup(SPEC, TOKENS, hold=True), threading.Event()
            assert held(judge)["tickets"] == 1
            busy = [asyncio.ensure_future(client.call(go.wait, 20.0)) for _ in range(CALLS_AT_ONCE)]
            await asyncio.sleep(0.05)
            releasing = asyncio.ensure_future(client.release_ticket(match.ticket))
            await asyncio.sleep(0.05)
            releasing.cancel()
            await asyncio.wait({releasing}, timeout=20.0)
            go.set()
            await asyncio.gather(*busy)
            await asyncio.to_thread(eventually, lambda: held(judge)["tickets"] == 0, 5.0)


@pytest.mark.parametrize("kind", ["reservations", "streams", "watchers", "leases"])
async def test_what_comes_for_a_task_that_is_gone_is_given_back_at_once(sidecar: Sidecar, kind: str) -> None:
    """The error of the cancelled task keeps it: to wait for garbage collection is to wait for long."""
    if kind == "leases" and sidecar.plane == "remote":
        pytest.skip("a short prefix has been sent before anybody reads it: its lease is back")
    with connect(sidecar.address) as judge, judge.start_store(SPEC, tokens_of(COUNT, 2006)) as unwritten:
        judge.store(SPEC, TOKENS, CACHE).wait(20.0)
        before = held(judge)[kind]
        async with await connect_async(sidecar.address) as client:
            has_it, go, kept = threading.Event(), threading.Event(), []

            def late() -> Any:
                make = {
                    "reservations": lambda: client.client.start_store(SPEC, tokens_of(COUNT, 2007)),
                    "streams": lambda: client.client.start_fetch(unwritten.ticket),
                    "watchers": client.client.watch,
                    "leases": lambda: client.client.fetch_layers(SPEC, TOKENS),
                }
                kept.append(make[kind]())
                has_it.set()
                assert go.wait(20.0)
                return kept[0]

            running = asyncio.ensure_future(client.call(late))
            assert await asyncio.to_thread(has_it.wait, 20.0)
            await asyncio.to_thread(eventually, lambda: held(judge)[kind] == before + 1, 10.0)
            running.cancel()
            await asyncio.wait({running}, timeout=20.0)
            go.set()
            await asyncio.to_thread(eventually, lambda: held(judge)[kind] == before, 5.0)


async def holding(client: AsyncClient) -> None:
    match = await client.lookup(SPEC, TOKENS, hold=True)
    await client.release_ticket(match.ticket)  # who has the match has its ticket


async def fetching_layers(client: AsyncClient) -> None:
    async for _ in client.fetch_layers(SPEC, TOKENS):
        await asyncio.sleep(30.0)


async def starting_a_fetch(client: AsyncClient) -> None:
    await client.start_fetch_prefix(SPEC, TOKENS)


async def joining_a_store(client: AsyncClient) -> None:
    writer = await client.start_store(SPEC, tokens_of(COUNT, 2004))
    await client.call(writer.put_layer, 0, CACHE[0])
    transfer = await client.start_fetch(writer.ticket)
    await client.call(transfer.wait)


async def starting_a_store(client: AsyncClient) -> None:
    await client.start_store(SPEC, tokens_of(COUNT, 2005))


async def watching(client: AsyncClient) -> None:
    async for _ in await client.watch():
        pass


@pytest.mark.parametrize(
    "task", [holding, fetching_layers, starting_a_fetch, joining_a_store, starting_a_store, watching]
)
@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.3])
async def test_a_cancelled_task_gives_back_what_it_held(
    sidecar: Sidecar, task: Callable[[AsyncClient], Awaitable[Any]], after_s: float
) -> None:
    with connect(sidecar.address) as judge:
        judge.store(SPEC, TOKENS, CACHE).wait(20.0)
        async with await connect_async(sidecar.address) as client:
            for _ in range(3):
                running = asyncio.ensure_future(task(client))
                await asyncio.sleep(after_s)
                running.cancel()
                await asyncio.wait({running}, timeout=20.0)
                assert running.done()
                del running

            def nothing_is_held() -> bool:
                gc.collect()  # what a cancelled call brings later lies in a cycle with the error that ended its task
                return not any(held(judge).values())

            await asyncio.to_thread(eventually, nothing_is_held, GIVEN_BACK_S)
        eventually(nothing_is_held, GIVEN_BACK_S)


class Begins(Sequence[Any]):
    """No extras. Says when a call looks at what it was given."""

    def __init__(self) -> None:
        self.was_seen = threading.Event()

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: Any) -> Any:
        self.was_seen.set()
        raise IndexError


@pytest.mark.parametrize("kind", ["stored", "stored by a partial", "fetched"])
async def test_when_a_cancelled_call_has_ended_the_memory_that_it_used_is_its_callers(
    own_sidecar: Sidecar, kind: str
) -> None:
    """A store of what the caller writes there next would be of wrong bytes, for everybody."""
    begins, ours = Begins(), [(k.copy(), v.copy()) for k, v in CACHE]
    async with await connect_async(own_sidecar.address) as client:
        await client.lookup(SPEC, TOKENS)
        if kind == "fetched":
            assert await client.wait(await client.store(SPEC, TOKENS, CACHE)) is Durability.MEMORY
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            use = {
                "stored": lambda: client.store(SPEC, TOKENS, ours, extras=begins),
                "stored by a partial": lambda: client.call(
                    partial(client.client.store, SPEC, TOKENS, ours, extras=begins)
                ),
                "fetched": lambda: client.fetch(SPEC, TOKENS, into=ours, extras=begins),
            }
            running = asyncio.ensure_future(use[kind]())
            assert await asyncio.to_thread(begins.was_seen.wait, 20.0)
            running.cancel()
            if not (await asyncio.wait({running}, timeout=0.2))[0]:
                os.kill(own_sidecar.pid, signal.SIGCONT)
                await asyncio.wait({running})
            assert running.cancelled()
            for plane in (plane for pair in ours for plane in pair):
                plane.fill(7)
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
    with connect(own_sidecar.address) as judge:  # behind the close: the call in its thread has ended
        found = judge.fetch(SPEC, TOKENS)
        assert all(bits(a).tolist() == bits(b).tolist() for (a, _), (b, _) in zip(found, CACHE, strict=False))
        assert all((plane == 7).all() for pair in ours for plane in pair)


async def test_a_close_waits_for_what_a_cancelled_call_brings(sidecar: Sidecar) -> None:
    """A client that is gone by then could not give it back, and the ticket would be held until it expires."""
    has_it, go = threading.Event(), threading.Event()
    with connect(sidecar.address) as judge:
        judge.store(SPEC, TOKENS, CACHE).wait(20.0)
        client = await connect_async(sidecar.address)

        def late() -> Match:
            match = client.client.lookup(SPEC, TOKENS, hold=True)
            has_it.set()
            assert go.wait(20.0)
            return match

        running = asyncio.ensure_future(client.call(late))
        assert await asyncio.to_thread(has_it.wait, 20.0)
        running.cancel()
        await asyncio.wait({running}, timeout=20.0)
        closing = asyncio.ensure_future(client.aclose())
        await asyncio.sleep(0.1)  # it would have closed the client by now
        go.set()
        await closing
        await asyncio.to_thread(eventually, lambda: not any(held(judge).values()), 10.0)


def test_a_method_takes_what_the_clients_of_that_name_takes() -> None:
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        taken = inspect.signature(getattr(AsyncClient, name, method)).parameters
        if name.startswith("_") or any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            continue
        assert set(inspect.signature(method).parameters) <= set(taken), name


async def test_waits_in_vain_leave_nothing_behind_in_what_they_waited_for() -> None:
    future: Future[None] = Future()
    for _ in range(100):
        assert not await ended(future, 0.0)
    assert len(future._done_callbacks) == 1
    waits = [asyncio.ensure_future(ended(future, 10.0)) for _ in range(3)]
    await asyncio.sleep(0)
    threading.Thread(target=future.set_result, args=(None,)).start()
    assert await asyncio.gather(*waits) == [True] * 3
    assert await ended(future, 0.0)
