"""Who is connected. A session owns its leases, reservations and staging; all of it ends with the session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.arena import Staging
from kvstore.config import LimitSettings
from kvstore.errors import Exhausted, InvalidRequest, Unauthenticated
from kvstore.seams import Memory, Random

if TYPE_CHECKING:
    from kvstore.catalog import Watcher
    from kvstore.controller.fetching import Lease
    from kvstore.controller.reservation import Reservation

SECRET_BYTES = 32


@dataclass(eq=False)
class Session:
    """One connected client process. Ids of what it owns mean nothing in another session."""

    session_id: int
    secret: bytes = field(repr=False)
    uid: int
    leases: dict[int, Lease] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    stagings: dict[int, Staging] = field(default_factory=dict)
    leased_bytes: int = 0
    stream_count: int = 0
    claiming: int = 0
    """Reservations that are being claimed."""
    is_open: bool = True
    watchers: set[Watcher] = field(default_factory=set)

    @property
    def staging_bytes(self) -> int:
        return sum(staging.byte_count for staging in self.stagings.values())

    def staging(self, staging_id: int) -> Staging:
        try:
            return self.stagings[staging_id]
        except KeyError:
            raise InvalidRequest(f"this session has no staging {staging_id}") from None


class Sessions:
    """The open sessions, by secret."""

    def __init__(self, limits: LimitSettings, random: Random, memory: Memory) -> None:
        self._limits = limits
        self._random = random
        self._memory = memory
        self._by_secret: dict[bytes, Session] = {}
        self._leaving: list[Session] = []
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self):  # type: ignore[no-untyped-def]  # Iterator[Session]; typed by its uses
        return iter(list(self._by_secret.values()))

    def next_id(self) -> int:
        """Ids are never used twice in a server's life."""
        self._next_id += 1
        return self._next_id

    def open(self, uid: int) -> Session:
        """A new session. Raises Exhausted past limits.session_count_max."""
        if len(self._by_secret) >= self._limits.session_count_max:
            raise Exhausted(f"{len(self)} sessions are open: raise limits.session_count_max")
        session = Session(self.next_id(), self._random.bytes(SECRET_BYTES), uid)
        self._by_secret[session.secret] = session
        return session

    def find(self, secret: bytes) -> Session:
        """The session a call belongs to. Raises Unauthenticated: its client must connect again."""
        session = self._by_secret.get(secret)
        if session is None:
            raise Unauthenticated("no such session: connect again")
        return session

    def forget(self, session: Session) -> None:
        session.is_open = False
        if session.secret in self._by_secret:
            self._leaving.append(session)
        self._by_secret.pop(session.secret, None)

    def unfinished(self) -> list[Session]:
        """Sessions that ended and still own something, though no mover is at work for them any more."""
        self._leaving = [each for each in self._leaving if each.reservations or each.stagings]
        return [each for each in self._leaving if not any(one.busy for one in each.reservations.values())]

    @property
    def staging_bytes(self) -> int:
        return sum(session.staging_bytes for session in self._by_secret.values())

    @property
    def staging_count(self) -> int:
        return sum(len(session.stagings) for session in self._by_secret.values())

    def create_staging(self, session: Session, byte_count: int) -> Staging:
        """Memory the session may write. Raises Exhausted past a limit, naming it."""
        limits = self._limits
        if byte_count <= 0 or byte_count % 4096:
            raise InvalidRequest(f"staging of {byte_count} bytes: ask for a positive multiple of 4096")
        if len(session.stagings) >= limits.staging_count_max:
            raise Exhausted(
                f"this session has {len(session.stagings)} pieces of staging: close some, or raise "
                "limits.staging_count_max"
            )
        if self.staging_count >= limits.staging_count_total_max:
            raise Exhausted(
                f"all sessions together have {self.staging_count} pieces of staging: raise "
                "limits.staging_count_total_max"
            )
        if session.staging_bytes + byte_count > limits.staging_bytes_max:
            raise Exhausted(
                f"staging of this session would pass {limits.staging_bytes_max} bytes: raise limits.staging_bytes_max"
            )
        if self.staging_bytes + byte_count > limits.staging_bytes_total_max:
            raise Exhausted(
                f"staging of all sessions would pass {limits.staging_bytes_total_max} bytes: "
                "raise limits.staging_bytes_total_max"
            )
        staging_id = self.next_id()
        mapping = self._memory.writable_by_others(f"kvstore-staging-{staging_id}", byte_count)
        staging = session.stagings[staging_id] = Staging(staging_id, mapping, byte_count)
        return staging
