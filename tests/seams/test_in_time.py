"""Jobs that somebody waits for, but not for ever."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from kvstore.seams.jobs import NotBegun, in_time


def waited(job: Future[Any], timeout_s: float = 5.0) -> Any:
    async def wait() -> Any:
        return await in_time(asyncio.wrap_future(job), timeout_s)

    return asyncio.run(wait())


def test_what_a_job_found_or_raised_is_found_or_raised() -> None:
    done: Future[int] = Future()
    done.set_result(7)
    assert waited(done) == 7
    failed: Future[int] = Future()
    failed.set_exception(OSError(5, "the device"))
    with pytest.raises(OSError, match="the device"):
        waited(failed)


def test_a_job_that_others_cancelled_does_not_cancel_who_waits() -> None:
    """A cancelled lookup would look as if its caller had gone."""
    job: Future[int] = Future()
    job.cancel()
    job.set_running_or_notify_cancel()
    with pytest.raises(NotBegun):
        waited(job)


def test_a_job_that_does_not_end_is_given_up() -> None:
    job: Future[int] = Future()
    with pytest.raises(TimeoutError):
        waited(job, 0.0)
    assert job.cancelled(), "a job that nobody has begun is not begun later"


def test_who_is_cancelled_gives_the_job_up() -> None:
    job: Future[int] = Future()

    async def cancel() -> None:
        waiting = asyncio.ensure_future(in_time(asyncio.wrap_future(job), 60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)

    asyncio.run(cancel())
    assert job.cancelled()
