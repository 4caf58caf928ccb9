"""Tells the directory which chunks this node has, so that other nodes can find them. It watches the catalog, as the
publisher of events does. No request waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator

from kvstore.catalog import Event, Namespace
from kvstore.controller import Controller
from kvstore.directory import KEEP_S, LIVE_S, NodeDirectory
from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import Clock
from kvstore.spec import CacheKind, EventKind, Tier

BATCH_COUNT_MAX = 64
"""Chunks that are told in one Redis pipeline, which takes a millisecond of the loop."""
BEAT_S = LIVE_S / 3
KEEP_S_MIN = 600.0
"""Seconds between the beginnings of two passes that keep all chunks, at least, as far as one does not take longer."""
LOOK_S = 1.0
"""Seconds between two checks whether everything must be told anew, and between two batches of chunks that are kept."""
TELL_PAUSES = 9
"""A node that tells all of its chunks pauses for so many times as long as Redis took for the last ones: after a
fail-over all nodes tell all, and their lookups wait for the same server."""
NOWHERE = bytes(32)
"""The storage key of no chunk: that it is not here is told to see whether this node may tell what leaves it."""
_log = logging.getLogger("kvstore.directory")


class Announcer:
    """Announces one tenant's chunks. ``key_of`` gives a chunk's storage key, the same on every node of the tenant. When
    Redis did not answer or events were lost, the node begins a new incarnation and tells all of its chunks again. Where
    a node of a cluster does not answer, the others are told on, and everything is told again once it answers.

    Each ``KEEP_S`` all chunks are kept, so that their entries do not expire: ``BATCH_COUNT_MAX`` a ``LOOK_S`` at most,
    so at most three commands for each of 64 chunks a second, and 38 million chunks before the first entries expire.
    Where entries are gone, as from a full Redis, all are kept again after ``KEEP_S_MIN``; this time doubles with each
    pass that misses none."""

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
        """True when everything must be told anew."""
        self._is_heard = False
        """True when the last beat was taken."""
        self._has_begun = False
        """True when an incarnation was told."""
        self._is_troubled = False
        """True from the log line that something fails, until everything was told."""
        self._missed: bytes | None = None
        """A key whose node of a cluster did not answer; its answer shows that everything can be told again."""
        self._told: Iterator[list[Event]] | None = None
        """These have yet to be told, of all; None once all were."""
        self._tell_s = 0.0
        """The time at which the next of them are told."""
        self._kept: Iterator[list[Event]] | None = None
        """This pass has yet to keep these; None between passes."""
        self._keep_s = self._pass_s = float("inf")
        """The time at which the next batch is kept, and that at which its pass began."""
        self._period_s = KEEP_S_MIN
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
                if self._missed is not None and not await self._directory.tell({self._missed: Tier.NONE}):
                    self._missed, self._is_behind = None, True  # all nodes of the cluster answer again
                if not is_known and not is_first:
                    self._is_behind = True  # Redis lost its keys
                is_first, self._is_heard = False, True
            except KVStoreError as error:
                self._failed(error)
            await self._clock.sleep(BEAT_S if self._directory.is_reachable else LOOK_S)

    async def _tell(self) -> None:
        """Tell what changes, and between two batches of that what there is to tell besides."""
        while True:
            if self._is_behind and self._is_heard:
                await self._begin()
            pause_s = await self._tell_on()
            await self._keep()
            try:
                async with asyncio.timeout(pause_s):
                    news = await self._watcher.take(BATCH_COUNT_MAX)
            except TimeoutError:
                continue
            if news is None:
                return
            if news.lost_count:
                self._is_behind = True
            if self._may_tell:
                await self._send(self._directory.tell, news.events)

    @property
    def _may_tell(self) -> bool:
        """True when Redis takes what is told, as far as we know; perhaps a node of a cluster does not. A request's
        question that failed is no reason to tell nothing: no beat would notice, and what left would stay told."""
        is_there = self._is_heard or self._directory.is_reachable
        return self._has_begun and is_there and (self._told is not None or not self._directory.problem)

    async def _begin(self) -> None:
        """Begin a new incarnation, which all chunks are then told of. One task tells them and what changes: a change is
        told after what it changes."""
        self._directory.renew()
        self._is_behind, self._told, self._keep_s = False, None, float("inf")
        try:
            await self._directory.beat()
            await self._directory.tell({NOWHERE: Tier.NONE})
        except KVStoreError as error:
            self._failed(error)
            return
        self._has_begun, self._told = True, self._controller.stored(BATCH_COUNT_MAX)

    async def _tell_on(self) -> float:
        """Tell the next chunks of all, when it is time. Returns the seconds until the next ones are told, or something
        else is done."""
        began_s = self._clock.monotonic()
        if self._told is None or began_s < self._tell_s:
            return LOOK_S if self._told is None else self._tell_s - began_s
        events = next(self._told, None)
        if events is not None:
            await self._send(self._directory.tell, events)
            pause_s = min(TELL_PAUSES * (self._clock.monotonic() - began_s), LOOK_S)
            self._tell_s = self._clock.monotonic() + pause_s
            return pause_s
        self._told = self._kept = None
        self._period_s = KEEP_S_MIN
        self._keep_s = began_s + self._period_s
        self._directory.problem = ""
        if self._missed is None:
            self._is_troubled = False
        return LOOK_S

    async def _keep(self) -> None:
        """Keep the next chunks, when it is time. One task keeps and tells: what left meanwhile is told afterwards."""
        now_s = self._clock.monotonic()
        if not self._may_tell or now_s < self._keep_s:
            return
        if self._kept is None:
            self._kept, self._pass_s = self._controller.stored(BATCH_COUNT_MAX), now_s
            self._directory.lost_count = 0
        events = next(self._kept, None)
        if events is not None:
            self._keep_s = now_s + LOOK_S
            lost_count, is_all_told = self._directory.lost_count, not self._watcher.has_news
            await self._send(self._directory.keep, events)
            if not is_all_told:
                self._directory.lost_count = lost_count  # what is not there may be what was not told yet
            return
        self._kept = None
        self._period_s = KEEP_S_MIN if self._directory.lost_count else min(2 * self._period_s, KEEP_S)
        self._keep_s = self._pass_s + self._period_s

    async def _send(self, tell: Callable[[dict[bytes, Tier]], Awaitable[list[bytes]]], events: Iterable[Event]) -> None:
        changes = {
            self._key_of(event.space, event.digest): Tier.NONE if event.kind is EventKind.REMOVED else event.tier
            for event in events if event.space.model_kind is not CacheKind.OPAQUE
        }  # fmt: skip
        if not changes:
            return
        try:
            missed = await tell(changes)
        except KVStoreError as error:
            self._failed(error)
            return
        if missed:
            self._missed = missed[0]
            self._warn("other nodes hear of a part of what is here", "a node of the cluster does not answer")

    def _failed(self, error: KVStoreError) -> None:
        """Have everything told anew, once Redis takes it."""
        self._is_behind, self._is_heard, self._told = True, False, None
        said = f"other nodes do not hear of this one (server.node = {self._directory.node}): {error.message}"
        self._directory.problem = "" if isinstance(error, Unavailable) else said
        self._warn("this node is not announced: other nodes do not hear what is here", error.message)

    def _warn(self, message: str, reason: str) -> None:
        """Log the first of several failures."""
        if not self._is_troubled:
            _log.warning(message, extra={"reason": reason})
        self._is_troubled = True
