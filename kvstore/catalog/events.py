"""Events: watchers hear of chunks that are stored, removed or moved.

Cost while nobody watches: one addition per event. A watcher's queue is bounded: a slow watcher loses events and learns
how many, and holds up nobody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple

from kvstore.catalog.namespace import Namespace
from kvstore.errors import Exhausted
from kvstore.spec import EventKind, MissReason, Tier


class Event(NamedTuple):
    """One chunk that was stored, removed or moved. ``tier``: the fastest tier that has it now; for a removed chunk the
    tier that had it last. ``sequence`` grows by one with every event, watched or not."""

    sequence: int
    kind: EventKind
    space: Namespace
    digest: bytes
    parent: bytes
    token_count: int
    tier: Tier
    reason: MissReason


class EventBatch(NamedTuple):
    """The next events for a watcher, in order, and the number of events lost after them. ``sequence``: the number of
    the last of all these, lost ones included."""

    events: list[Event]
    lost_count: int
    sequence: int


class Watcher:
    """A bounded queue of events. When it is full, new events are counted as lost until the queue was emptied, so that
    the lost events form one gap."""

    def __init__(self, events: Events, event_count_max: int) -> None:
        self._events = events
        self._event_count_max = event_count_max
        self._queue: deque[Event] = deque()
        self._lost_count = 0
        self._sequence = events.sequence
        self._changed = asyncio.Event()
        self._is_closed = False

    def put(self, event: Event) -> None:
        if self._lost_count or len(self._queue) >= self._event_count_max:
            self.lose(1, event.sequence)
            return
        self._queue.append(event)
        self._changed.set()

    def lose(self, count: int, sequence: int) -> None:
        """Count events, the last of them ``sequence``, as lost."""
        self._lost_count += count
        self._sequence = sequence
        self._changed.set()

    @property
    def has_news(self) -> bool:
        """True when ``take`` would not wait."""
        return bool(self._queue or self._lost_count or self._is_closed)

    async def take(self, count_max: int) -> EventBatch | None:
        """Wait for an event, then return the next ones, at most ``count_max``. None once the watcher is closed."""
        while not self.has_news:
            self._changed.clear()
            await self._changed.wait()
        if self._is_closed:
            return None
        batch = [self._queue.popleft() for _ in range(min(count_max, len(self._queue)))]
        if batch:
            sequence = batch[-1].sequence
        if self._queue or not self._lost_count:
            return EventBatch(batch, 0, sequence)
        lost, self._lost_count = self._lost_count, 0
        return EventBatch(batch, lost, self._sequence)

    def close(self) -> None:
        """Take no more events; a call that waits in ``take`` returns None. Idempotent."""
        self._is_closed = True
        self._queue.clear()
        self._events.forget(self)
        self._changed.set()


class Events:
    """The sequence of events, and the watchers."""

    def __init__(self) -> None:
        self.sequence = 0
        self.watchers: list[Watcher] = []

    def watch(self, event_count_max: int, watcher_count_max: int) -> Watcher:
        """Return a new watcher for events from now on. Raises Exhausted past limits.watcher_count_max."""
        if len(self.watchers) >= watcher_count_max:
            raise Exhausted(f"{len(self.watchers)} are watching: raise limits.watcher_count_max")
        watcher = Watcher(self, event_count_max)
        self.watchers.append(watcher)
        return watcher

    def forget(self, watcher: Watcher) -> None:
        if watcher in self.watchers:
            self.watchers.remove(watcher)

    def deliver(self, event: Event) -> None:
        for watcher in self.watchers:
            watcher.put(event)

    def lose(self, count: int) -> None:
        """Count ``count`` events that are too many to be told one by one as lost by every watcher."""
        self.sequence += count
        for watcher in self.watchers:
            watcher.lose(count, self.sequence)
