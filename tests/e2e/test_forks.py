"""A forked child has a client that works, and can do no harm to its parent's. Each scene is a process of its own: fork
is no friend of a test runner's threads."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import cast

import pytest
from kvstore_client import connect
from kvstore_client.connection import Connection
from kvstore_client.planes.place import Place
from kvstore_ops.sidecar import Sidecar

from kvstore.seams import SystemClock
from tests.conftest import CLIENTS
from tests.e2e.test_given_back import CACHE, SPEC, TOKENS
from tests.server.raw import eventually

LOCK_IS_HELD = """
import os, sys, threading, faulthandler
from kvstore_client import connect
from tests.e2e.test_given_back import SPEC, TOKENS
client = connect(sys.argv[1])
client.fetch(SPEC, TOKENS)
holder = threading.Thread(target=client._context.connection._lock.acquire)  # as of a thread that connects just now
holder.start()
holder.join()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)  # a child that hangs is not waited for
    if sys.argv[2] == "ask":
        assert client.lookup(SPEC, TOKENS).prefix_token_count == len(TOKENS)
        assert client.fetch(SPEC, TOKENS).token_count == len(TOKENS)
    client.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

CHILD_CLOSES = """
import os, sys, time, threading, faulthandler
from kvstore_client import Durability, connect
from tests.e2e.test_given_back import CACHE, SPEC, TOKENS, fresh
client, go = connect(sys.argv[1]), threading.Event()
client.fetch(SPEC, TOKENS)
session, watch, tokens = client.connect_now(), client.watch(), fresh()
client._context.committer.submit(go.wait, 60.0)
receipt = client.store(SPEC, tokens, CACHE)
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)
    began_s = time.monotonic()
    assert receipt.wait(3.0) is Durability.NONE, receipt.reason
    assert "fork" in receipt.reason
    watch.close()
    client.close()
    session.close()
    assert time.monotonic() - began_s < 3.0, "it waited for what its parent commits"
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
assert status == 0
assert receipt.wait(20.0) is Durability.MEMORY
assert next(watch).token_count == SPEC.chunk_tokens
assert client.fetch(SPEC, tokens).token_count == len(tokens)
assert client.statistics()["sessions"] == 1
"""

ASKS_FIRST = """
import os, sys, faulthandler
from kvstore_client import Durability, connect
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, TOKENS
from tests.specs import tokens_of
client, tokens = connect(sys.argv[1]), tokens_of(COUNT, 3000 + len(sys.argv[2]))
assert client.fetch(SPEC, TOKENS).token_count == len(TOKENS)  # its copier has threads
client.store(SPEC, TOKENS, CACHE).wait(20.0)  # and so has what commits
client.connect_now().returns.settle(20.0)  # gRPC makes no child ready that is forked in the middle of a call
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)
    if sys.argv[2] == "store":
        receipt = client.store(SPEC, tokens, CACHE)
    elif sys.argv[2] == "start_store":
        writer = client.start_store(SPEC, tokens)
        for layer, pair in enumerate(CACHE):
            writer.put_layer(layer, pair)
        receipt = writer.commit()
    else:
        receipt = client.put_bytes("of-a-child", "key", b"value")
    assert receipt.wait(5.0) is Durability.MEMORY, receipt.reason
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

ASKS_ASYNC = """
import asyncio, os, sys, faulthandler
from kvstore_client import connect_async
from tests.e2e.test_given_back import SPEC, TOKENS

async def asked():
    client = await connect_async(sys.argv[1])
    await asyncio.gather(*(client.lookup(SPEC, TOKENS) for _ in range(16)))  # now some of its threads are idle
    return client

client = asyncio.run(asked())
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)
    assert asyncio.run(client.fetch(SPEC, TOKENS)).token_count == len(TOKENS)
    asyncio.run(client.aclose())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

PARENT_ENDS = """
import os, sys
from kvstore_client import connect
from tests.e2e.test_given_back import SPEC, TOKENS
client = connect(sys.argv[1])
client.fetch(SPEC, TOKENS)
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print("forked", flush=True)
os._exit(0)
"""


IN_A_PREFILL = """
import os, sys, threading, faulthandler
from kvstore_client import connect
from kvstore_client.loading.call import Asked
from kvstore_client.prompt import Prompt
from tests.e2e.test_given_back import SPEC, TOKENS
client = connect(sys.argv[1])
call = client.planner.begin(Prompt.of(SPEC, TOKENS, (), None), Asked(len(TOKENS), 0, (), "off"))
held, go = threading.Event(), threading.Event()

def hold():  # as gRPC's thread that just receives
    with call._stream._state.condition:
        held.set()
        go.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)
    with call:
        call.end(1.0, 0.0, is_given_up=False, computed=None)
    os._exit(0)
status = os.waitpid(child, 0)[1]
go.set()
assert status == 0
assert client.stats().sessions.ticket_count == 1
call.close()
"""

IN_A_FETCH = """
import faulthandler, os, sys
from concurrent.futures import Future
from kvstore_client import connect
from kvstore.errors import Unavailable
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, TOKENS, tokens_of
client = connect(sys.argv[1])
writer = client.start_store(SPEC, tokens_of(COUNT, 5000), shards=2)
transfer, new, begun = client.start_fetch(writer.ticket), *(client.fetch_layers(SPEC, TOKENS) for _ in range(2))
begun_layers = iter(begun)
next(begun_layers)
copy = Future()
copy.set_running_or_notify_cancel()
begun_layers.gi_frame.f_locals["landing"].layers[1].append(copy)  # it runs just now
client.planner._lock.acquire()  # as by a thread that learns a rate just now
child = os.fork()
if child == 0:
    faulthandler.dump_traceback_later(8.0, exit=True)
    client.planner.given_up()
    for ask in (transfer.wait, lambda: transfer.wait_layer(0), lambda: list(new), lambda: list(begun_layers)):
        try:
            ask()
        except Unavailable as error:
            assert "fork" in error.message, error
        else:
            raise AssertionError(f"{ask} goes on without its thread")
    assert transfer.is_done
    os._exit(0)
status = os.waitpid(child, 0)[1]
client.planner._lock.release()
copy.set_result(None)
assert status == 0, status
assert [layer for layer, _ in new] == [0, 1]
assert [layer for layer, _ in begun_layers] == [1]
for shard in (writer, client.join_store(writer.ticket, 1)):
    for layer, (k, v) in enumerate(CACHE):
        heads = range(1) if shard is writer else range(1, k.shape[0])
        shard.put_layer(layer, (k[heads.start : heads.stop], v[heads.start : heads.stop]), heads=heads)
    shard.commit()
transfer.wait(20.0)
"""


def run(code: str, *arguments: str) -> None:
    done = CLIENTS.run([sys.executable, "-c", code, *arguments], timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["ask", "close"])
def test_a_child_does_not_wait_for_a_lock_that_its_parent_holds(sidecar: Sidecar, what: str) -> None:
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(LOCK_IS_HELD, sidecar.address, what)


@pytest.mark.parametrize("call", ["store", "start_store", "put_bytes"])
def test_whatever_a_child_asks_first_is_done(sidecar: Sidecar, call: str) -> None:
    """By threads of its own: its parent's are not there."""
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(ASKS_FIRST, sidecar.address, call)


def test_an_asyncio_client_has_threads_in_a_child(local_sidecar: Sidecar) -> None:
    with connect(local_sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(ASKS_ASYNC, local_sidecar.address)


def test_a_child_that_closes_everything_closes_nothing_of_its_parents(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(CHILD_CLOSES, sidecar.address)


def test_a_child_that_leaves_a_prefill_leaves_it_to_its_parent(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(IN_A_PREFILL, sidecar.address)


def test_a_child_is_told_that_a_fetch_is_its_parents(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        client.store(SPEC, TOKENS, CACHE).wait(20.0)
    run(IN_A_FETCH, sidecar.address)


def test_a_session_ends_with_its_process_whatever_forks_live_on(local_sidecar: Sidecar) -> None:
    command = [sys.executable, "-c", PARENT_ENDS, local_sidecar.address]
    with connect(local_sidecar.address) as judge:
        process = CLIENTS.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "forked\n"
        eventually(lambda: judge.stats().sessions.session_count == 1)
        process.stdin.close()
        assert process.wait(20) == 0
        process.stdout.close()


OF_THE_PARENT = """
import gc, os, sys
from kvstore_client.planes.session import noted

class Call:
    def __del__(self):
        os.write(1, b"destroyed\\n")

call = noted(Call())
child = os.fork()
if child == 0:
    del call
    gc.collect()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
os.write(1, b"of the child: nothing\\n")
del call
os._exit(0)
"""


def test_a_child_destroys_no_call_of_its_parents() -> None:
    """gRPC's destructors wait for locks, and who held one in the parent is not in the child."""
    done = CLIENTS.run([sys.executable, "-c", OF_THE_PARENT], timeout=60)
    assert (done.returncode, done.stdout) == (0, "of the child: nothing\ndestroyed\n"), done.stderr


class AnyPlace:
    """A place whose sessions are alive."""

    def open(self, _: float) -> SimpleNamespace:
        return SimpleNamespace(is_usable=True)


def test_threads_of_a_child_that_ask_at_once_wait_for_no_lock_of_the_parents() -> None:
    """One of them stands still wherever it has changed the connection; the lock is taken for ever."""
    others: list[threading.Thread] = []

    class Watched(Connection):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name in ("_pid", "_lock", "_session") and threading.current_thread() not in others and is_child:
                others.append(threading.Thread(target=self.session, daemon=True))
                others[-1].start()
                others[-1].join(0.2)

    is_child = False
    connection = Watched(cast(Place, AnyPlace()), SystemClock(), 1.0)
    connection._lock.acquire()
    connection._pid = -1
    is_child = True
    connection.session()
    for each in others:
        each.join(5.0)
    assert others
    assert not any(each.is_alive() for each in others)
