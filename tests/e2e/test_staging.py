"""What a client's machine refuses it, memory and mappings, costs it that call: nothing of it is lost for the next."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from kvstore_client import Client, Durability, connect
from kvstore_client.planes.shared_memory import mapped, staging
from kvstore_client.planes.shared_memory.staging import SEGMENT_BYTES, StagingPool
from kvstore_ops.sidecar import Sidecar

from kvstore.config import LimitSettings
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, Unavailable
from kvstore.seams import mapping
from kvstore.seams.mapping import HUGE_BYTES, SharedMap
from tests.descriptors import open_files
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

COUNT = 64
STAGING_BYTES = LimitSettings.staging_bytes_max


class Grant:
    """A session that grants segments; the machine has pages for a part of them."""

    def __init__(self, backed_bytes_max: int) -> None:
        self.backed_bytes_max = backed_bytes_max
        self.ended = threading.Event()

    def create_staging(self, byte_count: int) -> tuple[int, SharedMap]:
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, byte_count)
        memory = SharedMap(descriptor, byte_count, writable=True)
        os.close(descriptor)

        def back(offset: int, size: int) -> None:
            if offset + size > self.backed_bytes_max:
                raise Exhausted("no memory")

        memory.back = back  # type: ignore[method-assign]
        return 1, memory


def test_a_run_that_finds_no_memory_is_there_when_memory_is() -> None:
    grant: Any = Grant(HUGE_BYTES)
    pool = StagingPool(grant)
    first = pool.take(HUGE_BYTES, 2 * HUGE_BYTES)
    for _ in range(3):
        with pytest.raises(Exhausted):
            pool.take(HUGE_BYTES, HUGE_BYTES)
    grant.backed_bytes_max = 2 * HUGE_BYTES
    second = pool.take(HUGE_BYTES, HUGE_BYTES)
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (0, HUGE_BYTES)


def test_a_store_that_finds_no_memory_gives_its_staging_back(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cache, take, taken, given = small_spec(), random_cache(small_spec(), COUNT), StagingPool.take, [], []

    def refuse(pool: StagingPool, byte_count: int, expected_bytes: int) -> Any:
        if len(taken) == 3:
            raise Exhausted("no memory")
        taken.append(take(pool, byte_count, expected_bytes))
        return taken[-1]

    with connect(local_sidecar.address) as client:
        give_back = StagingPool.give_back
        with monkeypatch.context() as patch:
            patch.setattr(StagingPool, "take", refuse)
            patch.setattr(StagingPool, "give_back", lambda pool, run: (given.append(run), give_back(pool, run)))
            assert client.store(spec, tokens_of(COUNT), cache).wait() is Durability.NONE
        assert len(taken) == 3
        assert [(run.staging_id, run.offset) for run in given] == [(run.staging_id, run.offset) for run in taken]
        assert client.store(spec, tokens_of(COUNT), cache).wait() is not Durability.NONE


@pytest.mark.parametrize("refused", [1, 2])
def test_a_client_that_may_not_map_fails_with_a_reason_and_keeps_no_descriptor(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    spec, calls, there = small_spec(), [], mapping._map
    with connect(local_sidecar.address) as client:  # so that there is a region to hand over
        client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait()

    def refuse(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == refused:
            raise OSError(12, "Cannot allocate memory")
        return there(*arguments)

    def memory() -> list[str]:
        return [name for name in open_files() if "kvstore-" in name]

    before = memory()
    monkeypatch.setattr(mapping, "_map", refuse)
    with pytest.raises(Unavailable, match="ulimit"):
        connect(local_sidecar.address)
    assert memory() == before


def test_staging_that_cannot_be_mapped_is_no_part_of_the_budget(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, there = small_spec(), mapping._map

    def refuse(descriptor: int, byte_count: int, protection: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    with connect(local_sidecar.address) as client:
        client.lookup(spec, tokens_of(COUNT))
        monkeypatch.setattr(mapping, "_map", refuse)
        for _ in range(12):  # 64 MiB each, of 512
            receipt = client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT))
            assert receipt.wait() is Durability.NONE
        monkeypatch.setattr(mapping, "_map", there)
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE


def test_staging_that_can_neither_be_mapped_nor_given_back_fails_its_store_alone(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar reads for another store of the session just then: the caller has made no mistake."""
    spec = small_spec()

    def refuse(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    def is_read(_: int) -> None:
        raise InvalidRequest("staging is being read: close it after its commit")

    with connect(local_sidecar.address) as client:
        client.lookup(spec, tokens_of(COUNT))
        with monkeypatch.context() as patch:
            patch.setattr(mapping, "_map", refuse)
            patch.setattr(client._context.connection.session(), "close_staging", is_read)
            assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is Durability.NONE
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE


@pytest.mark.parametrize("when", ["as soon as it is sent", "while it waits"])
def test_an_interrupt_while_staging_is_asked_for_leaves_no_answer_for_the_next(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Ctrl-C in a notebook, and the next store asks for more."""
    spec, send = small_spec(), mapped.send

    def interrupted(*arguments: Any) -> bool:
        if when == "as soon as it is sent":
            send(*arguments)
        raise KeyboardInterrupt

    with connect(local_sidecar.address) as client:
        client.lookup(spec, tokens_of(COUNT))
        session: Any = client._context.connection.session()
        with monkeypatch.context() as patch:
            place, name = (session._arrived, "wait_for") if when == "while it waits" else (mapped, "send")
            patch.setattr(place, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.create_staging(4096)
        session = client._context.connection.session()
        _, memory = session.create_staging(1 << 20)
        memory.back(0, 1 << 20)  # raises where less came
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE


def test_an_interrupt_just_when_staging_was_granted_takes_nothing_from_the_budget(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = small_spec()

    def interrupted(_: SharedMap) -> Any:
        raise KeyboardInterrupt

    with connect(local_sidecar.address) as client, connect(local_sidecar.address) as other:
        client.lookup(spec, tokens_of(COUNT))
        session: Any = client._context.connection.session()
        with monkeypatch.context() as patch:
            patch.setattr(staging, "StagingFile", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.staging.take(HUGE_BYTES, HUGE_BYTES)
        eventually(lambda: staging_bytes(other) == 0)
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE


def staging_bytes(client: Client) -> int:
    return int(client.stats().sessions.staging_bytes)


def test_what_a_client_stored_by_goes_back_when_it_is_idle(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sessions share a budget: what busy ones took once would be missing for the next for ever."""
    spec, others = small_spec(), set(threading.enumerate())
    monkeypatch.setattr(staging, "IDLE_S", 0.05)
    with connect(local_sidecar.address) as client, connect(local_sidecar.address) as other:
        for number in range(3):  # and it comes again with the next store
            assert client.store(spec, tokens_of(COUNT, number), random_cache(spec, COUNT)).wait() is not Durability.NONE
            eventually(lambda: staging_bytes(other) == 0)
        session: Any = client._context.connection.session()
        assert session.staging.used_bytes == 0
    eventually(lambda: all(each.name != "kvstore-staging" for each in set(threading.enumerate()) - others))


def test_what_a_store_still_uses_is_not_idle(local_sidecar: Sidecar) -> None:
    with connect(local_sidecar.address) as client:
        client.lookup(small_spec(), tokens_of(COUNT))
        pool: Any = StagingPool(client._context.connection.session())
        run = pool.take(HUGE_BYTES, HUGE_BYTES)
        before = staging_bytes(client)
        assert [pool.give_back_idle() for _ in range(3)] == [True] * 3
        assert staging_bytes(client) == before > 0
        run.memory[run.offset] = 1
        pool.give_back(run)
        assert pool.give_back_idle()  # it was used a moment ago
        assert staging_bytes(client) == before
        assert not pool.give_back_idle()
        assert staging_bytes(client) == 0
        assert pool.take(HUGE_BYTES, HUGE_BYTES) is not None


@pytest.mark.parametrize(
    "why", [InvalidRequest("staging is being read: close it after its commit"), Unavailable("it takes no packet now")]
)
def test_staging_that_the_sidecar_does_not_take_back_stays(local_sidecar: Sidecar, why: KVStoreError) -> None:
    with connect(local_sidecar.address) as client:
        client.lookup(small_spec(), tokens_of(COUNT))
        session: Any = client._context.connection.session()
        pool: Any = StagingPool(session)
        pool.give_back(pool.take(HUGE_BYTES, HUGE_BYTES))
        close, refused = session.close_staging, []

        def refuse(segment: int) -> None:
            refused.append(segment)
            raise why

        session.close_staging = refuse
        assert [pool.give_back_idle() for _ in range(3)] == [True] * 3
        assert refused
        run = pool.take(HUGE_BYTES, HUGE_BYTES)
        assert run.staging_id == refused[0]
        pool.give_back(run)
        session.close_staging = close
        assert pool.give_back_idle()
        assert not pool.give_back_idle()


def test_a_store_that_comes_while_idle_staging_goes_back_finds_room(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The idle segment is all that the limit grants the session."""
    monkeypatch.setattr(staging, "SEGMENT_BYTES", STAGING_BYTES // 4)
    with connect(local_sidecar.address) as client:
        client.lookup(small_spec(), tokens_of(COUNT))
        session: Any = client._context.connection.session()
        pool: Any = StagingPool(session)
        pool.give_back(pool.take(HUGE_BYTES, STAGING_BYTES))
        assert pool.give_back_idle()
        close, came = session.close_staging, []
        store = threading.Thread(target=lambda: came.append(pool.take(HUGE_BYTES, HUGE_BYTES)))

        def close_in_the_middle(segment: int) -> None:
            store.start()
            store.join(0.1)  # what needs no staging to go back first is through by then
            close(segment)

        session.close_staging = close_in_the_middle
        pool.give_back_idle()
        store.join()
        assert came[0] is not None


@pytest.mark.parametrize("is_taken", [False, True])
def test_staging_of_which_nobody_knows_whether_it_went_back_is_not_used_and_goes_back(
    local_sidecar: Sidecar, is_taken: bool
) -> None:
    """A sidecar that stood still goes on, and may be reading for a store: then it refuses."""
    with connect(local_sidecar.address) as client:
        client.lookup(small_spec(), tokens_of(COUNT))
        session: Any = client._context.connection.session()
        pool: Any = StagingPool(session)
        first = pool.take(HUGE_BYTES, HUGE_BYTES)
        pool.give_back(first)
        assert pool.give_back_idle()
        close = session.close_staging

        def answer_too_late(segment: int) -> None:
            if is_taken:
                close(segment)
            raise DeadlineExceeded("the hand-off did not answer")

        session.close_staging = answer_too_late
        assert pool.give_back_idle()
        run = pool.take(HUGE_BYTES, HUGE_BYTES)
        assert run.staging_id != first.staging_id
        pool.give_back(run)
        session.close_staging = close
        assert pool.give_back_idle()
        assert not pool.give_back_idle()
        assert staging_bytes(client) == 0


def test_a_session_outlives_a_sidecar_that_stands_still_while_idle_staging_goes_back() -> None:
    """Its tickets are still good, and the answer that comes late is nobody else's."""
    spec = small_spec()
    with Sidecar("--capacity", "32 MiB") as sidecar, connect(sidecar.address, timeout_s=0.5) as client:
        client.lookup(spec, tokens_of(COUNT))
        session: Any = client._context.connection.session()
        pool: Any = StagingPool(session)
        runs = [pool.take(HUGE_BYTES, SEGMENT_BYTES), pool.take(SEGMENT_BYTES, SEGMENT_BYTES)]
        for run in runs:
            pool.give_back(run)
        assert pool.give_back_idle()
        os.kill(sidecar.pid, signal.SIGSTOP)
        try:
            assert pool.give_back_idle()  # the other segment stays for a later time
        finally:
            os.kill(sidecar.pid, signal.SIGCONT)
        eventually(lambda: session._late_count == 0)
        assert session.is_usable
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE
        assert not pool.give_back_idle()


def test_a_store_whose_idle_staging_nobody_could_look_for_is_stored(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has no thread for it: then the staging stays until a thread can be had."""
    spec = small_spec()

    def refuse(*_: object) -> None:
        raise Unavailable("can't start new thread")

    with connect(local_sidecar.address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(staging, "start_thread", refuse)
            assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE
        session: Any = client._context.connection.session()
        assert not session.staging._is_watched
        session.staging._watch()
        assert session.staging._is_watched
