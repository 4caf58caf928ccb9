"""Awaits the work of other threads without blocking a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

_known: WeakKeyDictionary[Future[Any], Wakes] = WeakKeyDictionary()


async def ended(future: Future[Any], timeout: float | None) -> bool:  # noqa: ASYNC109 - the caller's own bound
    """Wait until ``future`` is done, for at most ``timeout`` s; return True if it is done. Being cancelled leaves the
    future alone: others may wait for it. A wait that was in vain leaves nothing behind in the future."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    def from_its_thread() -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    wakes = _wakes_of(future)
    wakes.add(from_its_thread)
    try:
        if not future.done():  # else its callbacks may have run before this one was added
            await asyncio.wait({waiting}, timeout=timeout)
    finally:
        wakes.discard(from_its_thread)
        waiting.cancel()
    return future.done()


class Wakes:
    """The one callback of a future that is waited for: it calls all who wait at that moment. A future keeps its
    callbacks until it is done, and one that is asked again and again would collect them. Without a lock, which a forked
    child might inherit: each step is one operation of a set or a dict."""

    def __init__(self) -> None:
        self._wakes: set[Callable[[], None]] = set()

    def add(self, wake: Callable[[], None]) -> None:
        self._wakes.add(wake)

    def discard(self, wake: Callable[[], None]) -> None:
        self._wakes.discard(wake)

    def __call__(self, _: Future[Any]) -> None:
        for wake in self._wakes.copy():
            wake()


def _wakes_of(future: Future[Any]) -> Wakes:
    mine = Wakes()
    found = _known.setdefault(future, mine)
    if found is mine:
        future.add_done_callback(mine)
    return found
