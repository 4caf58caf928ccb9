"""The tenants of a sidecar, found by their sockets: each has a directory of its own name beside the default one's."""

from __future__ import annotations

from rich.table import Table

from kvstore.errors import KVStoreError
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.door import Door
from kvstore_ops.operators.harmless import REASON_CHARACTERS_MAX, cell


def beside(door: Door) -> dict[str, Door]:
    """Return the other tenants' doors by name, given the default tenant's ``door``; empty for a TCP address, and where
    this user cannot see them."""
    names = None if door.socket is None else door.tenants_beside()
    return {name: door.of_tenant(name) for name in names or ()}


def unseen(door: Door) -> str:
    """Return why the tenants beside the default tenant's ``door`` cannot be told; empty where they can, or none are
    reached that way."""
    if door.socket is None or door.tenants_beside() is not None:
        return ""
    return f"other tenants may be there: this user may not read {door.socket.parent}, the server's user may"


def ask(doors: dict[str, Door]) -> dict[str, admin_pb2.StatsResponse | str]:
    """Return the statistics of each tenant, or the reason why there are none: a socket may serve another user only."""
    found: dict[str, admin_pb2.StatsResponse | str] = {}
    for tenant, door in doors.items():
        try:
            with door.open() as client:
                found[tenant] = client.stats()
        except KVStoreError as error:
            found[tenant] = error.message
    return found


def render(found: dict[str, admin_pb2.StatsResponse | str]) -> Table:
    """Draw a line per tenant."""
    table = Table("tenant", "memory", "chunks", "tiers", "sessions")
    for tenant, stats in found.items():
        if isinstance(stats, str):
            table.add_row(tenant, cell(stats, most=REASON_CHARACTERS_MAX))
            continue
        arena = stats.arena
        table.add_row(
            tenant,
            f"{format_bytes(arena.used_bytes)} of {format_bytes(arena.capacity_bytes)}",
            f"{arena.chunk_count:,}",
            "\n".join(map(_tier, stats.tiers)) or "-",
            str(stats.sessions.session_count),
        )
    return table


def _tier(tier: admin_pb2.TierStats) -> str:
    room = f" of {format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else ""
    return f"{tier.name} {format_bytes(tier.allocated_bytes)}{room}"
