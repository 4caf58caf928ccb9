"""Tells the directory which chunks this node has, so that other nodes can find them. It watches the catalog, as the
publisher of events does. No request waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from kvstore.catalog import Event, Namespace
from kvstore.controller import Controller
from kvstore.directory import LIVE_S, NodeDirectory
from kvstore.errors import Unavailable
from kvstore.seams import Clock
from kvstore.spec import CacheKind, EventKind, Tier

BATCH_COUNT_MAX = 64
"""Chunks that are told in one Redis pipeline, which takes a millisecond of the loop."""
BEAT_S = LIVE_S / 3
LOOK_S = 1.0
"""Seconds between two checks whether everything must be told anew."""
_log = logging.getLogger("kvstore.directory")


class Announcer:
    """Announces one tenant's chunks. ``key_of`` gives a chunk's storage key, the same on every node of the tenant. When
    Redis did not answer or events were lost, the node begins a new incarnation and tells all of its chunks again."""

    def __init__(
        self,
        controller: Controller,
        directory: NodeDirectory,
        key_of: Callable[[Namespace, bytes], bytes],
        clock: Clock,
    ) -> None:
        self._controller = controller
        self._directory = directory
        self._key_of = key_of
        self._clock = clock
        self._is_behind = True
        self._watcher = controller.watch_all()

    async def run(self) -> None:
        """Announce chunks for ever, or until the watcher is closed."""
        async with asyncio.TaskGroup() as group:
            beating = group.create_task(self._beat())
            await self._tell()
            beating.cancel()

    async def close(self) -> None:
        """Take this node out of the directory, after ``run`` has ended."""
        self._watcher.close()
        await self._directory.close()

    async def _beat(self) -> None:
        is_first = True
        while True:
            try:
                is_known = await self._directory.beat()
                if not is_known and not is_first:
                    self._is_behind = True  # Redis lost its keys
                is_first = False
            except Unavailable as error:
                if not self._is_behind:
                    _log.warning("the directory cannot be told what is here", extra={"reason": error.message})
                self._is_behind = True
            await self._clock.sleep(BEAT_S if self._directory.is_reachable else LOOK_S)

    async def _tell(self) -> None:
        while True:
            if self._is_behind and self._directory.is_reachable:
                await self._tell_all()
            try:
                async with asyncio.timeout(LOOK_S):
                    news = await self._watcher.take(BATCH_COUNT_MAX)
            except TimeoutError:
                continue
            if news is None:
                return
            if news.lost_count:
                self._is_behind = True
            if not self._is_behind:
                await self._send(news.events)

    async def _tell_all(self) -> None:
        """Begin a new incarnation, and tell all chunks. Changes meanwhile follow as events."""
        self._directory.renew()
        self._is_behind = False
        try:
            await self._directory.beat()
        except Unavailable:
            self._is_behind = True
            return
        for events in self._controller.stored(BATCH_COUNT_MAX):
            await self._send(events)
            if self._is_behind:
                return

    async def _send(self, events: Iterable[Event]) -> None:
        changes = {
            self._key_of(event.space, event.digest): Tier.NONE if event.kind is EventKind.REMOVED else event.tier
            for event in events if event.space.model_kind is not CacheKind.OPAQUE
        }  # fmt: skip
        if not changes:
            return
        try:
            await self._directory.tell(changes)
        except Unavailable:
            self._is_behind = True
