"""Byte movers that fail as movers can: each job in turn, in each way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvstore.seams import Workers
from tests.simulated import InlineWorkers

Job = Callable[..., Any]


def refused(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Not taken."""
    raise RuntimeError("can't start new thread")


def raises(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Taken, and failed before it did anything."""
    return _failed(OSError(5, "the mover fails"))


def raises_without_a_word(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """What Python raises where memory is short: its text is empty."""
    return _failed(MemoryError())


def fails_half_way(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Some of its bytes are there, and its answer is an error."""
    arrays = [each for each in args if isinstance(each, np.ndarray) and each.dtype == np.uint8]
    if arrays:
        arrays[-1][: arrays[-1].size // 2] = 0xEE
    return _failed(RuntimeError("interrupted"))


def cancelled(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Given up before a mover took it."""
    future: Future[Any] = Future()
    future.cancel()
    future.set_running_or_notify_cancel()
    return future


def answers_short(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Done, but its answer is cut."""
    future = InlineWorkers().submit(function, *args)
    result = future.result()
    cut: Future[Any] = Future()
    cut.set_result(result[:-1] if isinstance(result, bytes) else result)
    return cut


def lost(function: Job, args: tuple[object, ...]) -> Future[Any]:
    """Taken, and never heard of again."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


WAYS = (refused, raises, raises_without_a_word, fails_half_way, cancelled)
"""How any job may end badly."""


class FaultyWorkers:
    """Workers of which one job ends as ``way`` says: the one numbered ``target`` of those that ``is_meant`` names."""

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or InlineWorkers()
        self._way: Callable[[Job, tuple[object, ...]], Future[Any]] | None = None
        self._target = 0
        self._is_meant: Callable[[Job], bool] = lambda _: True
        self.names: list[str] = []
        """Every job that was submitted, by its function's name."""
        self.hit = ""
        """The job that was made to fail."""

    def fail(
        self, way: Callable[[Job, tuple[object, ...]], Future[Any]], target: int = 0, name: str | None = None
    ) -> None:
        """Have a job to come fail: the first but ``target``; of those named ``name``, where that is given."""
        self._way, self._target, self.hit = way, target, ""
        self._is_meant = lambda job: name is None or name_of(job) == name

    def submit(self, function: Job, /, *args: object) -> Future[Any]:
        self.names.append(name_of(function))
        if self._way is not None and self._is_meant(function):
            if self._target == 0:
                way, self._way, self.hit = self._way, None, name_of(function)
                return way(function, args)
            self._target -= 1
        return self._workers.submit(function, *args)

    def close(self) -> None:
        self._workers.close()


def name_of(job: Job) -> str:
    """A job by its function, as it is written."""
    return getattr(job, "__qualname__", type(job).__name__)
