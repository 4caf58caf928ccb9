"""Jobs of byte movers, from the request to the end.

A job that no mover took, or that was cancelled before one did, has failed like one that raised. So a caller that begins
several jobs waits for those that run, and counts only those that ended well. For this, only this package and the movers
call ``submit``: a refused job never interrupts a caller that is about to begin the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any

from kvstore.errors import Internal, KVStoreError, Unavailable
from kvstore.seams.scheduler import Result, Workers


class NotBegun(Unavailable):
    """No mover took the job, or it was cancelled before one did: nothing of it has happened."""


def begun(workers: Workers, function: Callable[..., Result], /, *args: object) -> Future[Result]:
    """Begin a job. Never raises: a refusal of the movers is the job's failure."""
    try:
        return workers.submit(function, *args)
    except Exception as error:  # noqa: BLE001 - no thread, no memory, closed: whatever it was, the job was not taken
        refused: Future[Result] = Future()
        refused.set_exception(_not_begun(error))
        return refused


async def done(workers: Workers, function: Callable[..., Result], /, *args: object) -> Result:
    """Begin one job, and wait for its end as ``to_its_end`` does."""
    return await to_its_end(asyncio.wrap_future(begun(workers, function, *args)))


async def to_its_end(job: asyncio.Future[Result]) -> Result:
    """Wait for a job, and return its result. A cancelled caller still waits until the job is done, because the job uses
    its memory until then. Raises the job's error; NotBegun when others cancelled the job."""
    cancelled: asyncio.CancelledError | None = None
    while not job.done():
        try:
            await asyncio.wait([job])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        failure_of(job)
        raise cancelled
    if job.cancelled():
        raise _not_begun(None)
    return job.result()


async def in_time(job: asyncio.Future[Result], timeout_s: float) -> Result:
    """Wait at most ``timeout_s`` for a job that uses none of the caller's memory, and return its result. Raises the
    job's error; TimeoutError; NotBegun when others cancelled the job."""
    try:
        await asyncio.wait([job], timeout=timeout_s)
        if not job.done():
            raise TimeoutError
    finally:
        job.cancel()
    if job.cancelled():
        raise _not_begun(None)
    return job.result()


async def given_up(jobs: Iterable[Future[Any]]) -> None:
    """Cancel the jobs that no mover has begun, and wait for the others. Afterwards none of them runs, and none will."""
    running = [asyncio.wrap_future(job) for job in jobs if not job.cancel() and not job.done()]
    await to_its_end(asyncio.gather(*running, return_exceptions=True))


def failure_of(job: asyncio.Future[Result] | Future[Result]) -> KVStoreError | None:
    """Return the error of a job that has ended; None when it ended well."""
    if job.cancelled():
        return _not_begun(None)
    error = job.exception()
    if error is None or isinstance(error, KVStoreError):
        return error
    if isinstance(error, CancelledError):
        return _not_begun(error)
    failure = Internal(f"a byte mover failed: {error!r}")
    failure.__cause__ = error
    return failure


def _not_begun(cause: BaseException | None) -> NotBegun:
    failure = NotBegun(f"no byte mover took the job: {cause or 'it was cancelled'}: try again later")
    failure.__cause__ = cause.with_traceback(None) if cause else None  # its frames hold the job's arguments
    return failure
