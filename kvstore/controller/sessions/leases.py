"""Leases: a session copies chunks out of memory, and they stay there meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvstore.catalog import Catalog
from kvstore.config import LimitSettings
from kvstore.controller.sessions.session import Session
from kvstore.errors import Exhausted
from kvstore.seams import Clock
from kvstore.telemetry import Counters


@dataclass(eq=False, slots=True)
class Lease:
    """The chunks of these rows stay where they are until the lease is released or revoked."""

    lease_id: int
    session: Session
    rows: tuple[int, ...]
    byte_count: int
    born_s: float


@dataclass(eq=False, slots=True)
class _Held:
    """The leases of one session."""

    leases: dict[int, Lease] = field(default_factory=dict)
    byte_count: int = 0


class Leases:
    """The leases of one tenant's sessions."""

    def __init__(
        self, catalog: Catalog, limits: LimitSettings, clock: Clock, counters: Counters, ids: Iterator[int]
    ) -> None:
        self._catalog = catalog
        self._limits = limits
        self._clock = clock
        self._counters = counters
        self._ids = ids
        self._held: dict[Session, _Held] = {}
        self.byte_count = 0

    def __len__(self) -> int:
        return sum(len(held.leases) for held in self._held.values())

    def of(self, session: Session) -> list[int]:
        """Return the ids of a session's leases."""
        held = self._held.get(session)
        return list(held.leases) if held else []

    def holding(self, row: int) -> int:
        """Count the leases that hold a row."""
        return sum(row in lease.rows for held in self._held.values() for lease in held.leases.values())

    def grant(self, session: Session, rows: tuple[int, ...], byte_count: int) -> Lease:
        """Hold these rows by a new lease. Raises Exhausted past limits.leased_bytes_max or lease_count_max."""
        held = self._held.get(session) or _Held()
        if self._refusal(held, byte_count):
            self.revoke_stale([session])  # a caller that gave up before its reply came knows no lease to give back
            held = self._held.get(session) or _Held()
        if refusal := self._refusal(held, byte_count):
            raise Exhausted(refusal)
        lease = Lease(next(self._ids), session, rows, byte_count, self._clock.monotonic())
        self._held[session] = held
        held.leases[lease.lease_id] = lease
        held.byte_count += byte_count
        self.byte_count += byte_count
        for row in rows:
            self._catalog.table.hold(row)
        return lease

    def extend(self, lease: Lease, row: int) -> None:
        """Hold one more row by a lease. The lease already counts the row's bytes. Does nothing for an ended lease."""
        held = self._held.get(lease.session)
        if held is not None and lease.lease_id in held.leases:
            lease.rows += (row,)
            self._catalog.table.hold(row)

    def release(self, session: Session, lease_ids: Iterable[int]) -> None:
        """Give leases back. Ids that are not this session's are ignored: they were released or revoked before."""
        held = self._held.get(session)
        if held is None:
            return
        for lease_id in lease_ids:
            lease = held.leases.pop(lease_id, None)
            if lease is not None:
                held.byte_count -= lease.byte_count
                self.byte_count -= lease.byte_count
                for row in lease.rows:
                    self._catalog.unhold(row)
        if not held.leases:
            self._held.pop(session, None)

    def revoke_stale(self, sessions: Iterable[Session] | None = None) -> bool:
        """Revoke leases older than limits.lease_age_s_max, of all sessions by default. Their readers notice by the
        chunk's generation. Return True when there were any."""
        born_before = self._clock.monotonic() - self._limits.lease_age_s_max
        held = [self._held[each] for each in (self._held if sessions is None else sessions) if each in self._held]
        stale = [lease for each in held for lease in each.leases.values() if lease.born_s <= born_before]
        for lease in stale:
            self.release(lease.session, [lease.lease_id])
            self._counters.add("leases_revoked")
        return bool(stale)

    def _refusal(self, held: _Held, byte_count: int) -> str:
        """Return the reason why a session may not lease ``byte_count`` bytes more; empty: it may."""
        if held.byte_count + byte_count > self._limits.leased_bytes_max:
            return (
                f"this session would lease {held.byte_count + byte_count} bytes: release some, or raise "
                f"limits.leased_bytes_max ({self._limits.leased_bytes_max})"
            )
        if len(held.leases) >= self._limits.lease_count_max:
            return f"this session holds {len(held.leases)} leases: raise limits.lease_count_max"
        return ""
