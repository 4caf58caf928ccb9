"""Tickets: one process finds a prefix, and others fetch it. The chunks stay until every reader has fetched them or the
ticket has expired. A fetch by a ticket gives all chunks of the ticket or raises a typed error."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.catalog import Use
from kvstore.controller.parts import Parts
from kvstore.controller.values import ChainQuery
from kvstore.errors import Exhausted, InvalidRequest

TICKET_BYTES = 16
READER_COUNT_MAX = 1024


@dataclass(eq=False, slots=True)
class Ticket:
    """``rows`` of the held prefix, part by part; ``readers_left`` fetches may still be made with it."""

    ticket_id: bytes
    query: ChainQuery
    use: Use
    rows: tuple[int, ...]
    readers_left: int
    expires_s: float


class Tickets:
    """The open tickets of one tenant. Any session of the tenant may redeem one: the id is its only right."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._limits = parts.limits
        self._clock = parts.clock
        self._open: dict[bytes, Ticket] = {}
        self._holds: Counter[int] = Counter()
        """Held row -> the number of tickets that hold it."""
        self.held_bytes = 0
        """Of all held rows, each counted once."""

    def __len__(self) -> int:
        return len(self._open)

    def issue(self, query: ChainQuery, rows: tuple[int, ...], readers: int) -> Ticket:
        """Hold a prefix for ``readers`` fetches. It expires limits.ticket_age_s_max after its issue or its last fetch.
        What other tickets hold already takes no more memory.

        Raises: InvalidRequest for a number of readers out of range; Exhausted past limits.ticket_count_max or
        limits.ticket_bytes_max.
        """
        if not 1 <= readers <= READER_COUNT_MAX:
            raise InvalidRequest(f"readers {readers} must be in 1..{READER_COUNT_MAX}")
        if len(self._open) >= self._limits.ticket_count_max:
            raise Exhausted(f"{len(self._open)} tickets are open: raise limits.ticket_count_max")
        byte_count = self.byte_count({row for row in rows if row not in self._holds})  # a chain may name a chunk twice
        if self.held_bytes + byte_count > self._limits.ticket_bytes_max:
            raise Exhausted(
                f"tickets would hold {self.held_bytes + byte_count} bytes: redeem or release some, or raise "
                f"limits.ticket_bytes_max ({self._limits.ticket_bytes_max})"
            )
        expires_s = self._clock.monotonic() + self._limits.ticket_age_s_max
        use = self._parts.catalog.use(query.fingerprint)  # shared tiers may have all of it: no row keeps the model then
        ticket = Ticket(self._parts.random.bytes(TICKET_BYTES), query, use, rows, readers, expires_s)
        self._open[ticket.ticket_id] = ticket
        self.held_bytes += byte_count
        self._holds.update(rows)
        for row in rows:
            self._parts.catalog.table.hold(row)
        self._parts.counters.add("tickets_issued")
        return ticket

    def find(self, ticket_id: bytes) -> Ticket | None:
        """Return an open ticket; None for one that has ended, or never was."""
        return self._open.get(ticket_id)

    def query(self, ticket_id: bytes) -> ChainQuery:
        """Return the query of the ticket. Raises InvalidRequest for a ticket that expired, was used up or released, or
        never was."""
        ticket = self.find(ticket_id)
        if ticket is None:
            raise InvalidRequest(
                "this ticket expired (limits.ticket_age_s_max), was redeemed by all its readers, or was released: "
                "look the prefix up again"
            )
        return ticket.query

    def redeemed(self, ticket_id: bytes) -> None:
        """Note that one reader holds the chunks by a lease of its own, or has copied them. The last reader ends the
        ticket. After any other the ticket's time starts anew: a reader that came proves that the others will come."""
        ticket = self._open[ticket_id]
        self._parts.counters.add("tickets_redeemed")
        ticket.readers_left -= 1
        ticket.expires_s = self._clock.monotonic() + self._limits.ticket_age_s_max
        if not ticket.readers_left:
            self.release(ticket_id)

    def release(self, ticket_id: bytes) -> None:
        """End a ticket. An unknown ticket is no error: it ended before."""
        ticket = self._open.pop(ticket_id, None)
        if ticket is None:
            return
        self._holds.subtract(ticket.rows)
        last = {row for row in ticket.rows if not self._holds[row]}
        self.held_bytes -= self.byte_count(last)
        for row in last:
            self._holds.pop(row)  # a third of the time of Counter's ``del``
        ticket.use.end()
        for row in ticket.rows:
            self._parts.catalog.unhold(row)

    def byte_count(self, rows: Iterable[int]) -> int:
        """Return the bytes of these rows' chunks."""
        table, numbered = self._parts.catalog.table, self._parts.catalog.spaces.numbered
        alike = Counter((table.spaces[row], table.token_counts[row]) for row in rows)
        return sum(numbered[space].chunk_bytes(tokens) * count for (space, tokens), count in alike.items())

    def expire(self) -> None:
        """End the tickets that have expired."""
        now_s = self._clock.monotonic()
        for ticket in [each for each in self._open.values() if each.expires_s <= now_s]:
            self._parts.counters.add("tickets_expired")
            self.release(ticket.ticket_id)
