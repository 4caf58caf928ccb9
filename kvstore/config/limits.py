"""Settings that limit the resources of one session, and of all sessions of a tenant together."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.fields import NATIVE_NUMBER_MAX, Duration, Size, check_setting
from kvstore.units import GIB, MIB

IDLE_S_MAX = 24 * 86400.0
"""gRPC counts the milliseconds in 31 bits."""
CALL_COUNT_MAX = NATIVE_NUMBER_MAX // 4
"""gRPC counts the calls of both kinds, and some that are refused, in 31 bits."""
OPERATOR_SESSION_COUNT = 4
"""Sessions beyond limits.session_count_max, for operators alone: the reload that raises that limit takes one itself."""


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """Limits on the resources of a tenant's clients, for each session and for all together. A call beyond a limit is
    refused, and the error names the limit."""

    session_count_max: int = 64
    """Open sessions. Beyond these, 4 are kept for operators' commands on this host."""
    connection_count_max: int = 128
    """Open connections to `kvstore.sock`; a further one is closed."""
    connection_idle_s_max: Duration = 300.0
    """A connection without a call is closed after this time; clients connect again by themselves."""
    call_count_max: int = 512
    """Calls in progress. Streams that last as long as their callers (watches, partial prefills, health watches) have as
    many places of their own."""
    staging_bytes_max: Size = 512 * MIB
    """Staging memory of one session, which it fills for its stores. A client gives back what it has not used for half a
    minute."""
    staging_bytes_total_max: Size = 4 * GIB
    """Staging memory of all sessions together."""
    staging_count_max: int = 128
    """Pieces of staging memory of one session."""
    staging_count_total_max: int = 384
    """Pieces of staging memory of all sessions together."""
    reservation_count_max: int = 256
    """Stores in flight of one session."""
    reservation_age_s_max: Duration = 60.0
    """A store that takes longer is aborted."""
    leased_bytes_max: Size
    """Memory that one session may be reading at once. Default: `arena.capacity_bytes`."""
    lease_age_s_max: Duration = 60.0
    """When room is needed, or a value takes the place of another one, a lease that is older than this is revoked; its
    reader's fetch then misses."""
    lease_count_max: int = 4096
    """Fetches of one session that hold chunks at the same time."""
    ticket_age_s_max: Duration = 30.0
    """A ticket that no fetch redeems ends after this time."""
    ticket_count_max: int = 4096
    """Open tickets."""
    ticket_bytes_max: Size = GIB
    """Memory that open tickets may hold, what several of them hold once. Default: half of `arena.capacity_bytes`."""
    stream_count_max: int = 64
    """Fetches of one session in progress at once."""
    token_count_max: int = 1 << 20
    """Tokens of one request; a value by key counts one per KiB."""
    model_count_max: int = 256
    """Models that are registered at once; each namespace of values by key counts as one. A new one takes the place of
    the least recently used one that has no chunks, and is refused where all have some."""
    namespace_count_max: int = 16384
    """Namespaces of stored caches: models x hidden layers x provenances x exactness; at most 65,536. Empty ones make
    room for new ones."""
    watcher_count_max: int = 64
    """Open watches of events."""
    watch_event_count_max: int = 16384
    """Events that wait for one watcher; a watcher that reads too slowly loses further events."""
    pin_bytes_max: Size
    """Bytes of chunks that operators may have pinned ([operations.md](operations.md)), counted as in memory. Default:
    half of `arena.capacity_bytes`."""
    message_bytes_max: Size = 16 * MIB
    """The largest request."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_setting(value >= 0, f"limits.{name}", value, "use 0 or more")
        most = self.namespace_count_max
        check_setting(most <= 65536, "limits.namespace_count_max", most, "use at most 65536")
        for name in (
            "connection_count_max", "connection_idle_s_max", "call_count_max", "session_count_max", "token_count_max",
            "model_count_max", "namespace_count_max",
        ):  # fmt: skip
            check_setting(getattr(self, name) >= 1, f"limits.{name}", getattr(self, name), "use 1 or more")
        calls = self.call_count_max
        check_setting(calls <= CALL_COUNT_MAX, "limits.call_count_max", calls, f"use at most {CALL_COUNT_MAX}")
        idle_s = self.connection_idle_s_max
        check_setting(idle_s <= IDLE_S_MAX, "limits.connection_idle_s_max", idle_s, "use 24 d or less")
        fits = 4096 <= self.message_bytes_max <= GIB
        check_setting(fits, "limits.message_bytes_max", self.message_bytes_max, "use 4 KiB to 1 GiB")
