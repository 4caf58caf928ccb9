"""Jobs from being asked for to their end: a refusal is an outcome, and nothing that was refused happens later."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from typing import Any

import pytest

from kvstore.errors import Internal
from kvstore.seams import WorkerThreads
from kvstore.seams.jobs import NotBegun, begun, done, failure_of, given_up
from tests.faulty_workers import FaultyWorkers, cancelled, raises, refused

WAIT_S = 10.0


def no_more_threads(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_a_call_that_found_no_thread_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller was told so, and has given away the memory it names."""
    workers, started, go = WorkerThreads(2, "test"), threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> None:
        started.set()
        go.wait(WAIT_S)

    busy = workers.submit(first)
    assert started.wait(WAIT_S)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more_threads)
        with pytest.raises(RuntimeError, match="new thread"):
            workers.submit(ran.append, "refused")
    go.set()
    busy.result(WAIT_S)
    workers.submit(ran.append, "later").result(WAIT_S)
    workers.close()
    assert ran == ["later"]


def test_a_call_that_was_taken_while_it_was_refused_is_done() -> None:
    """A thread that is free may begin it before the pool has noticed that it cannot start one more."""
    workers = WorkerThreads(2, "test")
    pool, real = workers._pool, workers._pool.submit

    def submit(*args: Any) -> Any:
        real(*args).result(WAIT_S)
        no_more_threads()

    pool.submit = submit  # type: ignore[method-assign]
    assert workers.submit(lambda: 5).result(WAIT_S) == 5
    workers.close()


def test_threads_have_the_priority_they_were_asked_for() -> None:
    """An engine beside the service must not wait for work that nobody waits for."""
    own, workers = os.getpriority(os.PRIO_PROCESS, 0), WorkerThreads(1, "test", nice=7)
    found = workers.submit(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result(WAIT_S)
    workers.close()
    assert found == 7
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


def test_a_cancelled_call_never_runs() -> None:
    workers, go = WorkerThreads(1, "test"), threading.Event()
    ran: list[str] = []
    busy, late = workers.submit(go.wait, WAIT_S), workers.submit(ran.append, "it was cancelled")
    assert late.cancel()
    go.set()
    assert busy.result(WAIT_S)
    workers.close()
    assert ran == []


def test_what_a_job_was_about_is_free_when_its_end_is_told() -> None:
    """Who hears of it takes memory of the same size next."""

    class Cache:
        pass

    workers, go, cache = WorkerThreads(1, "test"), threading.Event(), Cache()
    left, seen = weakref.ref(cache), []
    busy = workers.submit(go.wait, WAIT_S)
    done = workers.submit(id, cache)
    done.add_done_callback(lambda _: seen.append(left()))
    del cache
    go.set()
    assert busy.result(WAIT_S)
    done.result(WAIT_S)
    workers.close()
    assert seen == [None]


def test_an_error_goes_with_who_was_told_of_it() -> None:
    """Its frames hold the memory of the cache that was lost: they do not wait for garbage collection."""

    class LostError(Exception):
        pass

    def lose() -> None:
        raise LostError

    workers = WorkerThreads(1, "test")
    gc.disable()
    try:
        failed = workers.submit(lose)
        left = weakref.ref(failed.exception(WAIT_S))
        workers.close()
        del failed
        assert left() is None
    finally:
        gc.enable()


async def test_a_refusal_is_how_the_job_ended() -> None:
    workers = FaultyWorkers()
    workers.fail(refused)
    error = begun(workers, pytest.fail).exception()
    assert isinstance(error, NotBegun)
    assert "can't start new thread" in error.message
    workers.fail(cancelled)
    with pytest.raises(NotBegun, match="cancelled"):
        await asyncio.wait_for(done(workers, pytest.fail), WAIT_S)
    workers.fail(raises)
    with pytest.raises(OSError, match="the mover fails"):
        await done(workers, pytest.fail)
    workers.fail(raises)
    assert isinstance(failure_of(begun(workers, pytest.fail)), Internal)
    assert failure_of(begun(workers, int)) is None


async def test_who_is_cancelled_is_let_go_when_its_job_has_ended() -> None:
    workers, started, go = WorkerThreads(1, "test"), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go.wait(WAIT_S)

    waiting = asyncio.ensure_future(done(workers, work))
    await asyncio.to_thread(started.wait, WAIT_S)
    waiting.cancel()
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, WAIT_S)
    workers.close()


async def test_jobs_that_are_given_up_do_not_run_afterwards() -> None:
    workers, started, go = WorkerThreads(1, "test"), threading.Event(), threading.Event()
    ended: list[int] = []

    def work(number: int) -> None:
        started.set()
        go.wait(WAIT_S)
        ended.append(number)

    jobs = [begun(workers, work, number) for number in range(3)]
    await asyncio.to_thread(started.wait, WAIT_S)
    asyncio.get_running_loop().call_later(0.05, go.set)
    await asyncio.wait_for(given_up(jobs), WAIT_S)
    assert ended == [0]
    workers.close()
    assert ended == [0]
