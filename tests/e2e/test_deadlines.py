"""Every public method of the clients, and of what they return, ends in time beside a sidecar that stands still.

The methods are found by looking: one that the table below does not know fails the test.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import kvstore_client
import numpy as np
import pytest
from kvstore_client import (
    AsyncClient,
    Client,
    LayerStream,
    Receipt,
    StoreWriter,
    Transfer,
    Watch,
    connect,
    connect_async,
)
from kvstore_client.lookup.watch import AsyncWatch
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.seams import WorkerThreads
from tests.e2e.standing_still import (
    CACHE,
    COUNT,
    SPEC,
    TIMEOUT_S,
    TOKENS,
    Act,
    Attempt,
    Case,
    drained,
    fresh,
    joined,
    on_loop,
    pending,
    plain,
    runner,
    stand_still,
    stored,
    ticket_of,
    writer_of,
)
from tests.e2e.test_watch import store
from tests.server.raw import eventually

HOLDERS = (Client, AsyncClient, LayerStream, Transfer, StoreWriter, Receipt, Watch, AsyncWatch)
"""What has methods that may wait."""

NO_HOLDERS = (enum.Enum, Exception)
VALUES = {
    "TLS", "ChunkEvent", "ChunkMatch", "Extra", "FetchedKV", "Gate", "LayerSpec", "Location", "Match", "ModelSpec",
    "PageHashes", "Paged", "PrefixAt", "Recompute", "RopeSpec", "SegmentMatch",
}  # fmt: skip
"""Facts, and the gate over this user's own files: they wait for nobody."""

WAITING_SPECIALS = {
    "__iter__", "__next__", "__enter__", "__exit__", "__aiter__", "__anext__", "__aenter__", "__aexit__", "__del__",
}  # fmt: skip


def client_calls() -> dict[str, Case]:
    spec_e = runner().spec
    return {
        "connect_now": lambda c: c.connect_now,
        "lookup": lambda c: lambda: c.lookup(SPEC, TOKENS, hold=True),
        "locate": lambda c: lambda: c.locate(SPEC, TOKENS),
        "plan": lambda c: lambda: c.plan(SPEC, TOKENS),
        "locate_each": lambda c: lambda: c.locate_each(SPEC, [TOKENS, TOKENS]),
        "peek": lambda c: lambda: c.peek(SPEC, TOKENS),
        "release_ticket": lambda c: (lambda ticket: lambda: c.release_ticket(ticket))(ticket_of(c)),
        "fetch": lambda c: lambda: c.fetch(SPEC, TOKENS),
        "fetch_layers": lambda c: lambda: c.fetch_layers(SPEC, TOKENS),
        "store": lambda c: lambda: c.store(SPEC, fresh(), CACHE).wait(2 * TIMEOUT_S),
        "start_store": lambda c: lambda: c.start_store(SPEC, fresh()),
        "join_store": lambda c: (lambda w: lambda: c.join_store(w.ticket, 1))(writer_of(c, 2)),
        "stats": lambda c: c.stats,
        "statistics": lambda c: c.statistics,
        "close": lambda c: c.close,
        "plane": plain("plane"),
        "gate": plain("gate"),
        "__enter__": lambda c: c.__enter__,
        "__exit__": lambda c: lambda: c.__exit__(None, None, None),
        "watch": lambda c: c.watch,
        "put_bytes": lambda c: lambda: c.put_bytes("n", "k", b"x").wait(2 * TIMEOUT_S),
        "put_pieces": lambda c: lambda: c.put_pieces("n", "k", [b"x"]).wait(2 * TIMEOUT_S),
        "get_bytes": lambda c: lambda: c.get_bytes("n", "there"),
        "get_each": lambda c: lambda: c.get_each("n", ["there"], [bytearray(5)]),
        "put_each": lambda c: lambda: c.put_each("n", ["a", "b"], [b"x", b"y"], timeout_s=2 * TIMEOUT_S),
        "exists": lambda c: lambda: c.exists("n", ["there", "k"]),
        "count_leading": lambda c: lambda: c.count_leading("n", ["there", "k"]),
        "put_encoder": lambda c: lambda: c.put_encoder(SPEC, "k", np.zeros((2, 4), np.float32)).wait(2 * TIMEOUT_S),
        "get_encoder": lambda c: lambda: c.get_encoder(SPEC, "k"),
        "has_encoder": lambda c: lambda: c.has_encoder(SPEC, ["k"]),
        "store_segment": lambda c: lambda: c.store_segment(SPEC, fresh(), CACHE).wait(2 * TIMEOUT_S),
        "fetch_segment": lambda c: lambda: c.fetch_segment(SPEC, TOKENS),
        "fetch_segment_layers": lambda c: lambda: list(c.fetch_segment_layers(SPEC, TOKENS)),
        "find_segments": lambda c: lambda: c.find_segments(SPEC, TOKENS),
        "start_fetch": lambda c: (lambda ticket: lambda: c.start_fetch(ticket).wait())(ticket_of(c)),
        "start_fetch_prefix": lambda c: lambda: c.start_fetch_prefix(SPEC, TOKENS).wait(),
        "start_fetch_segment": lambda c: lambda: c.start_fetch_segment(SPEC, TOKENS).wait(),
        "fetch_projected": lambda c: lambda: c.fetch_projected(runner(), np.arange(40)),
        "partial_prefill": lambda c: lambda: c.partial_prefill(runner(), np.arange(40) % spec_e.vocab_size),
    }


def async_calls() -> dict[str, Case]:
    return {
        "call": on_loop(lambda a: lambda: a.call(a.client.stats)),
        "lookup": on_loop(lambda a: lambda: a.lookup(SPEC, TOKENS, hold=True)),
        "locate": on_loop(lambda a: lambda: a.locate(SPEC, TOKENS)),
        "plan": on_loop(lambda a: lambda: a.plan(SPEC, TOKENS)),
        "locate_each": on_loop(lambda a: lambda: a.locate_each(SPEC, [TOKENS])),
        "fetch": on_loop(lambda a: lambda: a.fetch(SPEC, TOKENS)),
        "fetch_layers": on_loop(lambda a: lambda: drained(a.fetch_layers(SPEC, TOKENS))),
        "store": on_loop(lambda a: lambda: a.store(SPEC, fresh(), CACHE)),
        "store_segment": on_loop(lambda a: lambda: a.store_segment(SPEC, fresh(), CACHE)),
        "fetch_segment": on_loop(lambda a: lambda: a.fetch_segment(SPEC, TOKENS)),
        "find_segments": on_loop(lambda a: lambda: a.find_segments(SPEC, TOKENS)),
        "wait": on_loop(lambda a: (lambda receipt: lambda: a.wait(receipt, TIMEOUT_S))(pending(a.client))),
        "partial_prefill": on_loop(lambda a: lambda: a.partial_prefill(runner(), np.arange(40))),
        "start_fetch": on_loop(lambda a: (lambda t: lambda: a.start_fetch(t))(ticket_of(a.client))),
        "start_fetch_prefix": on_loop(lambda a: lambda: a.start_fetch_prefix(SPEC, TOKENS)),
        "start_fetch_segment": on_loop(lambda a: lambda: a.start_fetch_segment(SPEC, TOKENS)),
        "fetch_projected": on_loop(lambda a: lambda: a.fetch_projected(runner(), np.arange(40))),
        "release_ticket": on_loop(lambda a: (lambda t: lambda: a.release_ticket(t))(ticket_of(a.client))),
        "start_store": on_loop(lambda a: lambda: a.start_store(SPEC, fresh())),
        "join_store": on_loop(lambda a: (lambda w: lambda: a.join_store(w.ticket, 1))(writer_of(a.client, 2))),
        "stats": on_loop(lambda a: a.stats),
        "watch": on_loop(lambda a: a.watch),
        "aclose": on_loop(lambda a: a.aclose),
        "__aenter__": on_loop(lambda a: a.__aenter__),
        "__aexit__": on_loop(lambda a: lambda: a.__aexit__(None, None, None)),
    }


def stream_calls() -> dict[str, Case]:
    def of(act: Callable[[LayerStream], Act]) -> Case:
        return lambda c: act(c.fetch_layers(SPEC, TOKENS))

    return {
        "__iter__": of(lambda s: lambda: list(s)),
        "cancel": of(lambda s: s.cancel),
        "close": of(lambda s: s.close),
        "abandon": of(lambda s: s.abandon),
        "waited_s": of(lambda s: lambda: s.waited_s),
    }


def transfer_calls() -> dict[str, Case]:
    def of(act: Callable[[Transfer], Act]) -> Case:
        return lambda c: act(joined(c))

    facts = ("layers", "error", "good_token_count", "ending", "is_done", "is_quiet", "failed", "measured", "overdue")
    return {
        "start": of(lambda t: lambda: None),  # the client has started it
        "brings": of(lambda t: lambda: t.brings(0)),
        "wait_layer": of(lambda t: lambda: t.wait_layer(1, TIMEOUT_S)),
        "landing": of(lambda t: lambda: t.landing(0)),
        "wait_hidden": of(lambda t: lambda: t.wait_hidden(1, TIMEOUT_S)),
        "landing_hidden": of(lambda t: lambda: t.landing_hidden(1)),
        "wait": of(lambda t: lambda: t.wait(TIMEOUT_S)),
        "poll": of(lambda t: t.poll),
        "stop": of(lambda t: t.stop),
        "cancel": of(lambda t: t.cancel),
        "__del__": of(lambda t: t.__del__),
        **{fact: (lambda fact: of(plain(fact)))(fact) for fact in facts},
    }


def writer_calls() -> dict[str, Case]:
    def of(act: Callable[[StoreWriter], Act]) -> Case:
        return lambda c: act(writer_of(c))

    return {
        "ticket": of(plain("ticket")),
        "wanted_token_count": of(plain("wanted_token_count")),
        "wanted_token_start": of(plain("wanted_token_start")),
        "put_layer": of(lambda w: lambda: w.put_layer(1, CACHE[1])),
        "put_hidden": of(lambda w: lambda: w.put_hidden(0, np.zeros((COUNT, 32), np.uint16))),
        "commit": of(lambda w: lambda: w.commit().wait()),
        "abort": of(lambda w: w.abort),
        "__enter__": of(lambda w: w.__enter__),
        "__exit__": of(lambda w: lambda: w.__exit__(None, None, None)),
        "__del__": of(lambda w: w.__del__),
    }


def receipt_calls() -> dict[str, Case]:
    async def waited(receipt: Receipt, client: Client) -> Any:
        return await receipt.waited(2 * TIMEOUT_S, AsyncClient(client, WorkerThreads(1, "kvstore-async")).call)

    return {
        "nothing": lambda c: lambda: Receipt.nothing("").wait(),
        "wait": lambda c: (lambda r: lambda: r.wait(2 * TIMEOUT_S))(stored(c)),
        "waited": lambda c: (lambda r: lambda: asyncio.run(waited(r, c)))(stored(c)),
        "is_done": lambda c: plain("is_done")(pending(c)),
        "stored_token_count": lambda c: plain("stored_token_count")(stored(c)),
        "reason": lambda c: plain("reason")(stored(c)),
        "reached": lambda c: plain("reached")(stored(c)),
        "missing": lambda c: plain("missing")(stored(c)),
    }


def watch_calls() -> dict[str, Case]:
    def of(act: Callable[[Watch], Act]) -> Case:
        return lambda c: act(c.watch())

    return {
        "__iter__": of(lambda w: w.__iter__),
        "__next__": of(lambda w: lambda: next(w)),
        "pending": of(lambda w: w.pending),
        "take": of(lambda w: w.take),
        "ready": of(lambda w: w.ready),
        "check": of(lambda w: w.check),
        "close": of(lambda w: w.close),
        "__enter__": of(lambda w: w.__enter__),
        "__exit__": of(lambda w: lambda: w.__exit__(None, None, None)),
    }


def async_watch_calls() -> dict[str, Case]:
    def of(act: Callable[[AsyncWatch], Callable[[], Any]]) -> Case:
        return on_loop(lambda a: act(AsyncWatch(a.client.watch(), a.call)))

    async def closed(watch: AsyncWatch) -> None:
        watch.close()

    return {
        "__aiter__": of(lambda w: lambda: drained(w)),
        "__anext__": of(lambda w: w.__anext__),
        "close": of(lambda w: lambda: closed(w)),
        "__aenter__": of(lambda w: w.__aenter__),
        "__aexit__": of(lambda w: lambda: w.__aexit__(None, None, None)),
    }


NO_CALLS = {"traced"}
"""What makes none."""


def functions() -> dict[str, Callable[[Sidecar], Act]]:
    """What is called before there is a client."""

    async def opened(address: str) -> None:
        await (await connect_async(address, timeout_s=TIMEOUT_S)).aclose()

    return {
        "connect": lambda sidecar: lambda: connect(sidecar.address, timeout_s=TIMEOUT_S),
        "connect_async": lambda sidecar: lambda: asyncio.run(opened(sidecar.address)),
    }


def table() -> dict[type, dict[str, Case]]:
    return {
        Client: client_calls(),
        AsyncClient: async_calls(),
        LayerStream: stream_calls(),
        Transfer: transfer_calls(),
        StoreWriter: writer_calls(),
        Receipt: receipt_calls(),
        Watch: watch_calls(),
        AsyncWatch: async_watch_calls(),
    }


def methods_of(kind: type) -> set[str]:
    """What a caller may use: methods, properties, and the specials by which Python waits for it."""
    found = set()
    for name in dir(kind):
        member = inspect.getattr_static(kind, name)
        if (not name.startswith("_") and (callable(member) or isinstance(member, property | staticmethod))) or (
            name in WAITING_SPECIALS
        ):
            found.add(name)
    return found


def test_the_table_knows_every_public_method() -> None:
    known = table()
    for kind in HOLDERS:
        assert methods_of(kind) <= known[kind].keys(), f"{kind.__name__} has methods that no deadline is tested of"
    public = {name: getattr(kvstore_client, name) for name in kvstore_client.__all__}
    classes = {name for name, each in public.items() if isinstance(each, type) and not issubclass(each, NO_HOLDERS)}
    assert classes - {each.__name__ for each in HOLDERS} == VALUES
    assert {name for name, each in public.items() if inspect.isfunction(each)} - NO_CALLS == functions().keys()


@pytest.mark.slow
def test_every_call_ends_in_time_when_the_sidecar_stands_still(plane: str) -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__SESSION_COUNT_MAX": "512"}
    with Sidecar("--capacity", "32 MiB", plane=plane, environment=environment) as sidecar:
        with connect(sidecar.address) as judge:
            judge.store(SPEC, TOKENS, CACHE).wait(20.0)
            judge.store_segment(SPEC, TOKENS, CACHE).wait(20.0)
            judge.put_bytes("n", "there", b"value").wait(20.0)
            clients: list[Client] = []
            attempts = [Attempt(name, make(sidecar)) for name, make in functions().items()]
            for kind, cases in table().items():
                for name, case in cases.items():
                    clients.append(connect(sidecar.address, timeout_s=TIMEOUT_S))
                    attempts.append(Attempt(f"{kind.__name__}.{name}", case(clients[-1])))
            stand_still(sidecar, attempts)
            for attempt in attempts:
                assert attempt.problem is None, f"{attempt.name}: {attempt.problem!r}"
            for client in clients:
                client.close()
            attempts.clear()
            eventually(lambda: judge.stats().sessions.session_count == 1, 30.0)


def test_those_who_wait_for_a_connection_wait_once() -> None:
    """Not one after the other, each as long as a call may take."""
    with Sidecar("--capacity", "8 MiB") as sidecar:
        client = connect(sidecar.address, required=False, timeout_s=TIMEOUT_S)
        attempts = [Attempt(str(number), lambda: client.lookup(SPEC, TOKENS)) for number in range(40)]
        stand_still(sidecar, attempts)
        assert max(each.took_s for each in attempts) < 20 * TIMEOUT_S
        client.close()


def test_a_hand_off_whose_queue_is_full_is_not_waited_for() -> None:
    with Sidecar("--capacity", "8 MiB") as sidecar, connect(sidecar.address, timeout_s=TIMEOUT_S) as client:
        session = client.connect_now()
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            while session._socket.send(b'{"op": "looked_up"}', socket.MSG_DONTWAIT):
                pass
        except BlockingIOError:
            pass  # full, and it stays so until the sidecar goes on
        attempts = [Attempt("create_staging", lambda: session.create_staging(1 << 20))]
        stand_still(sidecar, attempts)
        assert attempts[0].problem is None


def test_a_sidecar_that_stands_still_is_no_watch() -> None:
    with Sidecar("--capacity", "8 MiB") as sidecar, connect(sidecar.address, timeout_s=TIMEOUT_S) as client:
        watch, problems = client.watch(), []

        def raising(call: Act) -> Act:
            def act() -> None:
                with pytest.raises((DeadlineExceeded, Unavailable)) as raised:
                    call()
                problems.append(raised.value)

            return act

        attempts = [Attempt("watch", raising(client.watch)), Attempt("next", raising(lambda: next(watch)))]
        stand_still(sidecar, attempts, 12 * TIMEOUT_S)
        assert [each.problem for each in attempts] == [None, None]
        assert {type(each) for each in problems} == {DeadlineExceeded, Unavailable}
        with pytest.raises(Unavailable, match="watch again"):
            next(watch)
        with client.watch() as again:
            store(client, 16, 5)
            assert next(again).token_count == 16
