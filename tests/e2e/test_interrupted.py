"""A signal handler that raises keeps nobody waiting, wherever it comes: no lock of gRPC's stays taken, nor one of a
future's. Each scene is a process of its own, which has a main thread that signals come to, and a watchdog."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.conftest import CLIENTS

BEGIN = """
import faulthandler, itertools, os, random, signal, sys, threading, time
faulthandler.dump_traceback_later(50.0, exit=True)
from kvstore_client import Durability, connect
from kvstore.errors import KVStoreError, Unavailable
from kvstore_client.main_thread import _serve
from tests.e2e.test_given_back import CACHE, COUNT, SPEC, TOKENS, held
from tests.server.raw import eventually
from tests.specs import tokens_of

numbers = itertools.count(os.getpid() * 10_000)

class Interrupt(BaseException):
    pass

def fresh():
    return tokens_of(COUNT, next(numbers))  # nobody has stored them

def session_of(client):
    try:
        return client.connect_now()
    except Unavailable:  # it was interrupted while it connected, and waits before it tries again
        time.sleep(0.6)
        return client.connect_now()

def by_call(client):
    session = session_of(client)
    session.presence = None  # all that follows asks the sidecar
    return session

def works(client):
    by_call(client)
    assert client.lookup(SPEC, TOKENS).prefix_token_count == len(TOKENS)
    assert client.fetch(SPEC, TOKENS).token_count == len(TOKENS)
    assert client.store(SPEC, fresh(), CACHE).wait(8.0) >= Durability.MEMORY
    client.stats()

def works_elsewhere(client):
    done = threading.Event()
    threading.Thread(target=lambda: (works(client), done.set()), daemon=True).start()
    assert done.wait(15.0), "it waits for a lock that nobody gives back"

def threads_in(function):
    return sum(each.f_code is function.__code__ for each in sys._current_frames().values())

client = connect(sys.argv[1], timeout_s=100.0)
client.store(SPEC, TOKENS, CACHE).wait(8.0)
works(client)
ACTS = {
    "lookup": lambda: client.lookup(SPEC, TOKENS),
    "fetch": lambda: client.fetch(SPEC, TOKENS),
    "store": lambda: client.store(SPEC, fresh(), CACHE).wait(8.0),
    "transfer": lambda: client.start_fetch_prefix(SPEC, TOKENS).wait(8.0),
}
"""

END = """
works(client)
works_elsewhere(client)
assert not threads_in(threading.Condition.__enter__)
client.close()
eventually(lambda: threads_in(_serve) <= 1)
with connect(sys.argv[1]) as other:
    eventually(lambda: not held(other)["leases"] and not held(other)["streams"])
"""

EACH_STEP = (
    BEGIN
    + """
def interrupts_at(step, act):
    left = [step]

    def at_step(frame, event, _):
        # Python handles signals where a function begins, and after a call of compiled code.
        if event in ("call", "c_return", "c_exception"):
            left[0] -= 1
            if left[0] < 0:
                raise Interrupt

    try:
        sys.setprofile(at_step)
        act()
    except (Interrupt, Exception):  # code of Python's own may fail in another way
        pass
    finally:
        sys.setprofile(None)
    return left[0] < 0

by_call(client)
step, stride = 0, int(sys.argv[3])
while interrupts_at(step, ACTS[sys.argv[2]]):
    works_elsewhere(client)
    step += stride
assert step > 10 * stride
"""
    + END
)

AT_RANDOM = (
    BEGIN
    + """
def interrupt(*_):
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.01, 0.03))
    raise Interrupt

chance, hits = random.Random(7), 0
signal.signal(signal.SIGALRM, interrupt)
end_s = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end_s:
    try:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.01, 0.03))
        while time.monotonic() < end_s:
            by_call(client)
            ACTS[chance.choice([*ACTS])]()
    except Interrupt:
        hits += 1
    except Unavailable:
        time.sleep(0.01)
signal.signal(signal.SIGALRM, signal.SIG_IGN)
assert hits > 20, hits
"""
    + END
)


CALL_GOES_ON = (
    BEGIN
    + """
def interrupt(*_):
    raise Interrupt

signal.signal(signal.SIGALRM, interrupt)
watches = [client.watch() for _ in range(3)]
for watch in watches:
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        next(watch)  # nothing happens, so this waits
    except Interrupt:
        pass
client.stats()
assert threads_in(_serve) == 1
works(client)
works_elsewhere(client)
sys.exit(0)  # while three waits go on
"""
)

HANDLER_CALLS = (
    BEGIN
    + """
found = []

def calls(*_):
    found.append(client.lookup(SPEC, TOKENS).prefix_token_count)

signal.signal(signal.SIGALRM, calls)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
with client.watch() as watch:
    threading.Timer(0.5, works, [client]).start()
    next(watch)
signal.setitimer(signal.ITIMER_REAL, 0.0)
assert found
assert set(found) == {len(TOKENS)}
"""
    + END
)

HANDLER_CLOSES = (
    BEGIN
    + """
late = connect(sys.argv[1], timeout_s=2.0)
signal.signal(signal.SIGALRM, lambda *_: late.close())
server_pid = client.connect_now().server_pid
late.connect_now().close()
os.kill(server_pid, signal.SIGSTOP)
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    late.connect_now()  # it waits for the sidecar until the close, or its time, ends it
    raise AssertionError("nobody answers")
except KVStoreError:
    pass
finally:
    os.kill(server_pid, signal.SIGCONT)
assert not signal.getitimer(signal.ITIMER_REAL)[0], "the handler ran meanwhile"
"""
    + END
)

NO_THREAD = (
    BEGIN
    + """
import _thread

def refuses(*_):
    raise RuntimeError("can't start new thread")

import kvstore_client.main_thread as room
room._main._free = None
start, _thread.start_new_thread = _thread.start_new_thread, refuses
by_call(client)
assert client.lookup(SPEC, TOKENS).prefix_token_count == len(TOKENS)
_thread.start_new_thread = start
"""
    + END
)

AT_THE_END = """
import builtins, faulthandler, sys
sys.path.append(".")
faulthandler.dump_traceback_later(50.0, exit=True)
from kvstore_client import connect
from tests.e2e.test_given_back import CACHE, SPEC, TOKENS

class Engine:
    def __init__(self, client):
        self.client = client

    def __del__(self):
        assert sys.is_finalizing()
        self.client.stats()
        self.client.close()
        print("ended", flush=True)

client = connect(sys.argv[1])
client.store(SPEC, TOKENS, CACHE).wait(8.0)
builtins.engine = Engine(client)  # it goes last
"""


def run(scene: str, *arguments: str) -> None:
    done = CLIENTS.run([sys.executable, "-c", scene, *arguments], timeout=60.0)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("act", "stride"), [("lookup", 3), ("fetch", 23), ("store", 31), ("transfer", 17)])
def test_an_interrupt_at_any_step_keeps_nobody_waiting(sidecar: Sidecar, act: str, stride: int) -> None:
    run(EACH_STEP, sidecar.address, act, str(stride))


def test_a_client_that_is_interrupted_at_random_works(sidecar: Sidecar) -> None:
    run(AT_RANDOM, sidecar.address, "1.5")


def test_a_call_that_was_interrupted_goes_on_beside_the_next_ones(sidecar: Sidecar) -> None:
    run(CALL_GOES_ON, sidecar.address)


def test_a_signal_handler_may_call_in_the_midst_of_a_call(sidecar: Sidecar) -> None:
    run(HANDLER_CALLS, sidecar.address)


def test_a_signal_handler_may_close_a_client_that_connects(sidecar: Sidecar) -> None:
    run(HANDLER_CLOSES, sidecar.address)


def test_where_no_thread_is_to_be_had_calls_are_made_on_the_main_thread(sidecar: Sidecar) -> None:
    run(NO_THREAD, sidecar.address)


def test_a_destructor_at_the_interpreters_end_may_call(sidecar: Sidecar, tmp_path: Path) -> None:
    scene = tmp_path / "scene.py"  # by ``-c`` its objects stay at the end
    scene.write_text(AT_THE_END)
    done = CLIENTS.run([sys.executable, str(scene), sidecar.address], timeout=60.0)
    assert done.stdout == "ended\n", done.stderr[-4000:]
