"""One client process."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.arena import Staging
from kvstore.catalog import Watcher
from kvstore.errors import InvalidRequest


@dataclass(eq=False)
class Session:
    """Ids of what one session owns mean nothing in another."""

    session_id: int
    secret: bytes = field(repr=False)
    stagings: dict[int, Staging] = field(default_factory=dict)
    stream_count: int = 0
    is_open: bool = True
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def staging_bytes(self) -> int:
        return sum(staging.byte_count for staging in self.stagings.values())

    def staging(self, staging_id: int) -> Staging:
        """Raises InvalidRequest for staging that this session does not have."""
        try:
            return self.stagings[staging_id]
        except KeyError:
            raise InvalidRequest(f"this session has no staging {staging_id}") from None
