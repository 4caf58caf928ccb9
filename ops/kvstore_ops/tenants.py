"""The tenants of a sidecar, found by their sockets: each has a directory of its own name beside the default one's."""

from __future__ import annotations

from pathlib import Path

from kvstore_client import connect
from kvstore_client.remote.place import default_socket
from rich.table import Table

from kvstore.errors import KVStoreError
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2

SOCKET = "kvstore.sock"
DEFAULT = "default"


def address_of(socket: str | None, tenant: str = "") -> str:
    """Where a tenant is served by the sidecar whose default socket is ``socket`` (None: the user's)."""
    path = default_socket() if socket is None else Path(socket)
    return f"unix://{path if tenant in ('', DEFAULT) else path.parent / tenant / path.name}"


def names_beside(socket: str | None) -> list[str]:
    """The tenants beside the default one."""
    path = default_socket() if socket is None else Path(socket)
    return sorted(each.parent.name for each in path.parent.glob(f"*/{SOCKET}"))


def ask(socket: str | None, tenants: list[str]) -> dict[str, admin_pb2.StatsResponse | str]:
    """The statistics of each, or why there are none: it may be another user's."""
    found: dict[str, admin_pb2.StatsResponse | str] = {}
    for tenant in tenants:
        try:
            with connect(address_of(socket, tenant)) as client:
                found[tenant] = client.stats()
        except KVStoreError as error:
            found[tenant] = error.message
    return found


def render(found: dict[str, admin_pb2.StatsResponse | str]) -> Table:
    """A line per tenant."""
    table = Table("tenant", "arena", "chunks", "tiers", "sessions")
    for tenant, stats in found.items():
        if isinstance(stats, str):
            table.add_row(tenant, stats)
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
