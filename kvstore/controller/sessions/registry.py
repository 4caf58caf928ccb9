"""The open sessions of one tenant, and their staging."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.arena import Staging
from kvstore.config import OPERATOR_SESSION_COUNT, LimitSettings
from kvstore.controller.sessions.session import Session
from kvstore.errors import Exhausted, InvalidRequest, Unauthenticated
from kvstore.seams import Memory, Random

SECRET_BYTES = 32


class Sessions:
    """The open sessions, by secret."""

    def __init__(self, limits: LimitSettings, random: Random, memory: Memory, ids: Iterator[int]) -> None:
        self._limits = limits
        self._random = random
        self._memory = memory
        self._ids = ids
        self._by_secret: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_secret)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_secret.values()))

    def open(self, *, is_operator: bool) -> Session:
        """Open a session. Raises Exhausted past limits.session_count_max; an operator's, some later."""
        if len(self) >= self._limits.session_count_max + (OPERATOR_SESSION_COUNT if is_operator else 0):
            raise Exhausted(f"{len(self)} sessions are open: raise limits.session_count_max")
        session = Session(next(self._ids), self._random.bytes(SECRET_BYTES), is_operator=is_operator)
        self._by_secret[session.secret] = session
        return session

    def find(self, secret: bytes) -> Session:
        """Return the session that a call belongs to. Raises Unauthenticated: its client must connect again."""
        session = self._by_secret.get(secret)
        if session is None:
            raise Unauthenticated("no such session: connect again")
        return session

    def forget(self, session: Session) -> None:
        """Close a session: its secret is not accepted any more. Idempotent."""
        session.close()
        self._by_secret.pop(session.secret, None)

    @property
    def staging_bytes(self) -> int:
        return sum(session.staging_bytes for session in self._by_secret.values())

    @property
    def staging_count(self) -> int:
        return sum(len(session.stagings) for session in self._by_secret.values())

    def create_staging(self, session: Session, byte_count: int) -> Staging:
        """Make memory that the session may write. Raises Exhausted past a limit, naming it; InvalidRequest for a size
        that is no positive multiple of 4096 bytes."""
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
        staging_id = next(self._ids)
        mapping = self._memory.writable_by_others(f"kvstore-staging-{staging_id}", byte_count)
        staging = session.stagings[staging_id] = Staging(staging_id, mapping, byte_count)
        return staging
