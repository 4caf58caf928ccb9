"""Room for messages that are on their way in. gRPC tells nobody how large a message is before all of it is there, so
each that is waited for counts as the largest there may be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import Exhausted

SESSION_MESSAGES = 4
TENANT_MESSAGES = 16
"""Messages of at most 64 MiB that a session, and a tenant's sessions together, have received at once at the most:
enough to fill a network, and 1 GiB of a process that all tenants share."""


class Inbox:
    """So many messages at once. Who comes later waits in line."""

    def __init__(self, message_count: int, whose: str) -> None:
        self.message_count = message_count
        self._whose = whose
        self._free = asyncio.Semaphore(message_count)

    @asynccontextmanager
    async def room(self, timeout_s: float) -> AsyncIterator[None]:
        """Room for one message until it is out of this process's memory. Raises Exhausted when none is free in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise Exhausted(
                f"{self.message_count} streams of this {self._whose} have a message on its way for {timeout_s} s "
                "(remote.stall_s): store by fewer streams at a time"
            ) from None
        try:
            yield
        finally:
            self._free.release()
