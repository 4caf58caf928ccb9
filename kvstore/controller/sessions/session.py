"""A session: one client process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvstore.arena import Staging
from kvstore.catalog import Watcher
from kvstore.errors import InvalidRequest


@dataclass(eq=False)
class Session:
    """One client process. The ids of its staging, leases and reservations mean nothing in another session."""

    session_id: int
    secret: bytes = field(repr=False)
    stagings: dict[int, Staging] = field(default_factory=dict)
    stream_count: int = 0
    closed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return not self.closed.is_set()

    @property
    def staging_bytes(self) -> int:
        return sum(staging.byte_count for staging in self.stagings.values())

    def staging(self, staging_id: int) -> Staging:
        """Return the session's staging of this id. Raises InvalidRequest for one that it does not have."""
        try:
            return self.stagings[staging_id]
        except KeyError:
            raise InvalidRequest(f"this session has no staging {staging_id}") from None
