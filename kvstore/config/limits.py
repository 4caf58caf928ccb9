"""Settings of what one session, and all sessions of a tenant together, may hold."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.config.fields import GIB, MIB, Duration, Size, check_setting


@dataclass(frozen=True, kw_only=True)
class LimitSettings:
    """What a tenant's clients may hold, each session and all together. A call beyond a limit is refused, and the error
    names the limit."""

    session_count_max: int = 64
    """Sessions at once."""
    connection_count_max: int = 128
    """Connections to `kvstore.sock` at once; one more is closed."""
    connection_idle_s_max: Duration = 300.0
    """A connection without a call is closed after this time; clients connect again by themselves."""
    call_count_max: int = 512
    """Calls at once."""
    staging_bytes_max: Size = 512 * MIB
    """Memory that one session may fill and not yet have committed."""
    staging_bytes_total_max: Size = 4 * GIB
    """The same for all sessions together."""
    staging_count_max: int = 128
    """Pieces of such memory of one session."""
    staging_count_total_max: int = 384
    """Pieces of such memory of all sessions together."""
    reservation_count_max: int = 256
    """Stores in flight of one session."""
    reservation_age_s_max: Duration = 60.0
    """A store that takes longer is aborted."""
    leased_bytes_max: Size
    """Memory that one session may be reading at once. Default: `arena.capacity_bytes`."""
    lease_age_s_max: Duration = 60.0
    """Where room is needed, chunks that one reader has held for longer are taken back; its fetch then misses."""
    lease_count_max: int = 4096
    """Fetches of one session that hold chunks at once."""
    ticket_age_s_max: Duration = 30.0
    """A ticket that nobody redeems ends after this time."""
    ticket_count_max: int = 4096
    """Tickets that are open at once."""
    ticket_bytes_max: Size = GIB
    """Memory that open tickets may hold. Default: half of `arena.capacity_bytes`."""
    stream_count_max: int = 64
    """Fetches of one session in progress at once."""
    token_count_max: int = 1 << 20
    """Tokens of one request; a value by key counts one per KiB."""
    model_count_max: int = 256
    """Models that are registered at once; each namespace of values by key counts as one."""
    namespace_count_max: int = 16384
    """Sorts of cache that are stored: models x hidden layers x provenances x exactness; at most 65,536."""
    watcher_count_max: int = 64
    """Watches of events at once."""
    watch_event_count_max: int = 16384
    """Events that wait for one watcher; one that reads too slowly loses those beyond."""
    pin_bytes_max: Size
    """What operators may have pinned at once ([operations.md](operations.md)), as it lies in memory. Default: half of
    `arena.capacity_bytes`."""
    message_bytes_max: Size = 16 * MIB
    """The largest request."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_setting(value >= 0, f"limits.{name}", value, "use 0 or more")
        most = self.namespace_count_max
        check_setting(most <= 65536, "limits.namespace_count_max", most, "use at most 65536")
        for name in ("connection_count_max", "connection_idle_s_max", "call_count_max"):
            check_setting(getattr(self, name) >= 1, f"limits.{name}", getattr(self, name), "use 1 or more")
        check_setting(
            self.message_bytes_max >= 4096, "limits.message_bytes_max", self.message_bytes_max, "use >= 4 KiB"
        )
