"""A session: one client process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.arena import Staging
from kvstore.catalog import Watcher
from kvstore.errors import InvalidRequest


@dataclass(eq=False)
class Session:
    """One client process. The ids of its staging, leases and reservations mean nothing in another session.
    ``is_operator``: an operator's command, whose fetches save no engine anything."""

    session_id: int
    secret: bytes = field(repr=False)
    stagings: dict[int, Staging] = field(default_factory=dict)
    stream_count: int = 0
    is_open: bool = True
    is_operator: bool = False
    watchers: set[Watcher] = field(default_factory=set)
    _waits: list[Callable[[], object]] = field(default_factory=list, repr=False)

    @property
    def staging_bytes(self) -> int:
        return sum(staging.byte_count for staging in self.stagings.values())

    def staging(self, staging_id: int) -> Staging:
        """Return the session's staging of this id. Raises InvalidRequest for one that it does not have."""
        try:
            return self.stagings[staging_id]
        except KeyError:
            raise InvalidRequest(f"this session has no staging {staging_id}") from None

    @contextmanager
    def with_its_end(self, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end`` when the session ends meanwhile: it ends a wait for the client."""
        self._waits.append(end)
        try:
            yield
        finally:
            self._waits.remove(end)

    def close(self) -> None:
        """Mark it as ended, and end the waits for its client."""
        self.is_open = False
        for end in list(self._waits):
            end()
