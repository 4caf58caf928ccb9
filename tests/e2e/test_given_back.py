"""Whatever is dropped half way gives back what it held, here and in the sidecar: leases, staging, threads."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from kvstore_client import Client, connect
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_ops.sidecar import Sidecar

from kvstore.handoff.messages import RegionsAnswer
from kvstore.spec import Durability
from tests.conftest import CLIENTS
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


def test_a_transfer_that_is_dropped_waits_for_no_writer(stored: Sidecar) -> None:
    with connect(stored.address) as client, connect(stored.address) as judge:
        with client.start_store(SPEC, fresh()) as writer:
            transfer = client.start_fetch(writer.ticket)
            bringing = transfer._bringing
            eventually(lambda: bringing.stream is not None)  # before that its thread looks itself
            assert judge.stats().sessions.stream_count == 1
            del transfer
            gc.collect()
            eventually(lambda: judge.stats().sessions.stream_count == 0)
            eventually(lambda: not any(each.name == "kvstore-transfer" for each in threading.enumerate()))


def test_a_client_that_is_dropped_ends_its_session(stored: Sidecar) -> None:
    """Not before what it gave is dropped, too."""
    with connect(stored.address) as judge:
        list(judge.fetch_layers(SPEC, TOKENS))  # starts the threads that a process keeps
        sessions = judge.stats().sessions.session_count
        threads = threading.active_count()
        streams = [connect(stored.address).fetch_layers(SPEC, TOKENS) for _ in range(TIMES)]
        gc.collect()
        assert judge.stats().sessions.session_count == sessions + TIMES
        assert [layer for layer, _ in streams[0]] == [0, 1]
        streams.clear()
        gc.collect()
        eventually(lambda: judge.stats().sessions.session_count == sessions)
        eventually(lambda: threading.active_count() <= threads)


def test_what_is_dropped_while_the_sidecar_stands_still_is_given_back_later(plane: str) -> None:
    """By the same session: longer than a call may take, and no call is forgotten."""
    with Sidecar("--capacity", "8 MiB", plane=plane) as sidecar:
        with connect(sidecar.address) as judge, connect(sidecar.address, timeout_s=0.5) as client:
            judge.store(SPEC, TOKENS, CACHE).wait(20.0)
            stream, writer, other = client.fetch_layers(SPEC, TOKENS), client.start_store(SPEC, fresh()), fresh()
            writer.put_layer(0, tuple(plane[:, :5] for plane in CACHE[0]))
            aborted = client.start_store(SPEC, other)
            aborted.put_layer(0, tuple(plane[:, :5] for plane in CACHE[0]))
            ticket = client.lookup(SPEC, TOKENS, hold=True).ticket
            os.kill(sidecar.pid, signal.SIGSTOP)
            try:
                client.release_ticket(ticket)
                aborted.abort()
                del stream, writer
                gc.collect()
                time.sleep(2.0)
            finally:
                os.kill(sidecar.pid, signal.SIGCONT)
            eventually(lambda: not any(held(judge).values()), 20.0)
            eventually(lambda: used(client)[2] == 0)
            assert client.statistics()["sessions"] == 1


def test_a_client_is_closed_in_time_whatever_it_has_to_commit(plane: str) -> None:
    with Sidecar("--capacity", "8 MiB", plane=plane) as sidecar:
        client, go = connect(sidecar.address, timeout_s=1.0), threading.Event()
        client._context.committer.submit(go.wait, 30.0)
        receipts = [client.store(SPEC, fresh(), CACHE) for _ in range(20)]
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            began_s = time.monotonic()
            go.set()
            client.close()
            assert time.monotonic() - began_s < 20.0, "each of them waited for a sidecar that stands still"
            assert {each.wait(0.0) for each in receipts} == {Durability.NONE}
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)


FORK = """
import gc, os, signal, sys
from kvstore_client import Durability, connect
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, TOKENS, fresh, tokens_of
client = connect(sys.argv[1])
stream, watch = client.fetch_layers(SPEC, TOKENS), client.watch()
writer = client.start_store(SPEC, tokens_of(COUNT, os.getpid()))
transfer = client.start_fetch(writer.ticket)
writer.put_layer(0, CACHE[0])
child = os.fork()
if child == 0:
    signal.alarm(30)  # a child that hangs is not waited for
    del stream, writer, watch, transfer, client
    gc.collect()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert [layer for layer, _ in stream] == [0, 1]
writer.put_layer(1, CACHE[1])
assert writer.commit().wait(20.0) is Durability.MEMORY
transfer.wait(20.0)
assert next(watch).token_count == SPEC.chunk_tokens
assert client.statistics()["sessions"] == 1
print("good", flush=True)
# and here the process ends, with everything as it is
left = client.fetch_layers(SPEC, TOKENS), client.start_store(SPEC, fresh()), client.watch()
left[1].put_layer(0, CACHE[0])
"""


FORK_USES = """
import faulthandler, os, sys
from kvstore_client import Durability, connect
from kvstore.errors import Unavailable
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, tokens_of
client = connect(sys.argv[1], timeout_s=2.0)
watch, writer = client.watch(), client.start_store(SPEC, tokens_of(COUNT, os.getpid()))
writer.put_layer(0, CACHE[0])
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(25.0, exit=True)  # a child that hangs is not waited for
    try:
        next(watch)
    except Unavailable:
        writer.put_layer(1, CACHE[1])
        receipt = writer.commit()
        assert receipt.wait() is Durability.NONE and "fork" in receipt.reason, receipt.reason
        os._exit(0)
    os._exit(1)
status = os.waitpid(child, 0)[1]
assert status == 0, status
writer.put_layer(1, CACHE[1])
assert writer.commit().wait(20.0) is Durability.MEMORY
assert next(watch).token_count == SPEC.chunk_tokens
print("good", flush=True)
"""


def test_an_answer_that_comes_after_the_end_keeps_no_descriptor(local_sidecar: Sidecar) -> None:
    with connect(local_sidecar.address) as client:
        session = client.connect_now()
        assert isinstance(session, MappedSession)
        session.close()
        reading, writing = os.pipe()
        session.take(RegionsAnswer(()), [reading])
        with pytest.raises(BrokenPipeError):
            os.write(writing, b"x")
        os.close(writing)


def test_a_fork_that_uses_what_is_its_parents_is_told_so(stored: Sidecar) -> None:
    """It has neither the threads nor the memory: it does not wait for ever, nor end, and its parent goes on."""
    command = [sys.executable, "-c", FORK_USES, stored.address]
    done = CLIENTS.run(command, timeout=60)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_a_fork_gives_back_nothing_of_its_parents(stored: Sidecar) -> None:
    command = [sys.executable, "-c", FORK, stored.address]  # an ordinary one: what its end says is looked at
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    with connect(stored.address) as judge:
        eventually(lambda: not any(held(judge).values()))
