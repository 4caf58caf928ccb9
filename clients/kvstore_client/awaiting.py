"""Awaits the work of other threads without blocking a thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any


async def ended(future: Future[Any], timeout: float | None) -> bool:  # noqa: ASYNC109 - the caller's own bound
    """Wait until ``future`` is done, for at most ``timeout`` s; return True if it is done. Being cancelled leaves the
    future alone: others may wait for it."""
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not waiting.done():
            waiting.set_result(None)

    def from_its_thread(_: Future[Any]) -> None:
        try:
            loop.call_soon_threadsafe(wake)
        except RuntimeError:
            return  # the loop was closed: nobody waits any more

    future.add_done_callback(from_its_thread)
    await asyncio.wait({waiting}, timeout=timeout)
    waiting.cancel()
    return future.done()
