"""The fence orders what is before it and what is behind it, by ARM's rules; and it stands where the orders matter."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_client.planes.shared_memory import resident
from kvstore_ops.sidecar import Sidecar

from kvstore import presence
from kvstore.arena import Arena
from kvstore.arena import arena as arenas
from kvstore.presence import RETIRED, PresenceTable, find, pack_news, tag_of, tags_of
from kvstore.seams import FaultPoints, fence
from kvstore.spec import ChunkState, MissReason
from tests.presence.shown import words_of
from tests.simulated import BytearrayMemory
from tests.specs import random_cache, small_spec, tokens_of


class Recorder:
    """A lock that writes down what is done with it."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def acquire(self) -> bool:
        self.done.append("acquire")
        return True

    def release(self) -> None:
        self.done.append("release")


def is_ordered(between: list[str]) -> bool:
    """Return True when an access before these operations is ordered before one behind them: a path of
    "barrier-ordered-before" edges of ARM's model (po;[L] and [A];po and [L];po;[A]) leads from the one to the other."""
    operations = ["load", *between, "load"]
    reached = {0}
    for later in range(1, len(operations)):
        for earlier in range(later):
            kinds = operations[earlier], operations[later]
            orders = kinds[1] == "release" or kinds[0] == "acquire" or kinds == ("release", "acquire")
            if earlier in reached and orders:
                reached.add(later)
    return len(operations) - 1 in reached


def test_the_fence_orders_what_reorders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_ordered([])
    assert not is_ordered(["acquire", "release"]), "a lock that is taken and given up is no fence"
    recorder = Recorder()
    monkeypatch.setattr(fence._own, "lock", recorder)
    fence.fence()
    assert is_ordered(recorder.done)


def test_every_thread_has_its_own() -> None:
    fence.fence()
    locks = [fence._own.lock]
    thread = threading.Thread(target=lambda: (fence.fence(), locks.append(fence._own.lock)))
    thread.start()
    thread.join(10.0)
    assert locks[0] is not locks[1]
    locks[0].release()  # as an interrupt may leave it
    fence.fence()
    assert locks[0].locked()


def test_a_child_does_not_wait_for_what_its_parent_held() -> None:
    """In a process of its own: fork is no friend of a test runner's threads."""
    code = """
import os
from kvstore.seams import fence
fence._own.lock.release()
before = fence._own.lock
child = os.fork()
if child == 0:
    fence.fence()
    os._exit(0 if fence._own.lock is not before and fence._own.lock.locked() else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_generation_that_changes_at_the_fence_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read behind the fence, which is behind the copies."""
    spec, tokens = small_spec(), tokens_of(64)
    with Sidecar("--capacity", "8 MiB") as sidecar, connect(sidecar.address) as client:
        client.store(spec, tokens, random_cache(spec, 64)).wait(20.0)
        session = client.connect_now()
        session.generations = np.array(session.generations)
        assert client.fetch(spec, tokens).token_count == 64

        def bump() -> None:
            session.generations[:] += np.uint64(1)

        monkeypatch.setattr(resident, "fence", bump)
        fetched = client.fetch(spec, tokens)
        assert (fetched.token_count, fetched.reason) == (0, MissReason.STALE)


def test_a_generation_changes_before_its_bytes_may(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(BytearrayMemory(), FaultPoints(), capacity_bytes=1 << 20, region_bytes=1 << 20)
    placement = arena.allocate((4096, 4096))
    assert placement is not None
    seen: list[Any] = []
    values = arena.generations.bytes.view(np.uint64)
    monkeypatch.setattr(arenas, "fence", lambda: seen.append((int(values[placement.slot]), arena.chunk_count)))
    arena.free(placement)
    assert seen == [(placement.generation + 1, 1)]


def test_a_tables_flags_are_read_after_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PresenceTable(BytearrayMemory())
    digest = bytes(range(32))
    table.put(tag_of(5, digest), pack_news(ChunkState.HIT))
    words = np.array(words_of(table))
    found = find(words, tags_of(5, digest))
    assert found is not None
    assert found.news.all()

    def retire() -> None:
        words[0] = RETIRED

    monkeypatch.setattr(presence, "fence", retire)
    assert find(words, tags_of(5, digest)) is None


def test_a_tables_words_are_written_before_its_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    table = PresenceTable(BytearrayMemory())
    table.put(1 << 63 | 1 << 12, pack_news(ChunkState.HIT))
    old = words_of(table)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(presence, "fence", lambda: seen.append((int(old[0]), table.known().size)))
    table.put_all(np.array([1 << 63 | 2 << 12], np.uint64), pack_news(ChunkState.HIT))
    assert seen == [(0, 2), (0, 2)], "the words were not whole, or the flag was set already"
