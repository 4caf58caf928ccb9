"""Room for incoming messages. gRPC does not tell a message's size before all of it has come, so each message that is
waited for counts as one of the largest size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.errors import Exhausted

SESSION_MESSAGES = 4
TENANT_MESSAGES = 16
"""Messages, of at most 64 MiB each, that a session and all sessions of a tenant may have in this process at once. They
are enough to fill a network, and at most 1 GiB per tenant of a process that all tenants share."""


class Inbox:
    """Room for ``message_count`` messages at once. Further streams wait in line. ``whose``: a word for refusals."""

    def __init__(self, message_count: int, whose: str) -> None:
        self.message_count = message_count
        self._whose = whose
        self._free = asyncio.Semaphore(message_count)

    @asynccontextmanager
    async def room(self, timeout_s: float) -> AsyncIterator[None]:
        """Take room for one message inside the context. Raises Exhausted when none is free in time."""
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
