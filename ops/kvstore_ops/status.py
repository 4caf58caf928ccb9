"""``kvstore status``: the sidecar's statistics as a table."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.harmless import cell
from kvstore_ops.tier_words import tier_words


def render(stats: admin_pb2.StatsResponse) -> Group:
    """Draw the statistics: contents, sessions, tiers, models and counters."""
    arena, sessions = stats.arena, stats.sessions
    whose = "" if stats.tenant == "default" else f", tenant {stats.tenant}"
    title = f"kvstore {stats.version}{whose}, pid {stats.server_pid}, up {age_of(stats.uptime_seconds)}"
    held = Table("memory", "")
    held.add_row("used", f"{format_bytes(arena.used_bytes)} of {format_bytes(arena.capacity_bytes)}")
    held.add_row("pre-faulted", format_bytes(arena.prefaulted_bytes))
    held.add_row("chunks", str(arena.chunk_count))
    held.add_row("leased", format_bytes(arena.leased_bytes))
    held.add_row("sessions", str(sessions.session_count))
    held.add_row("stores in flight", f"{sessions.reservation_count} ({format_bytes(arena.reserved_bytes)})")
    held.add_row("staging", format_bytes(sessions.staging_bytes))
    if stats.tiers:
        held.add_row("to be written to tiers", f"{stats.backlog_chunk_count:,} chunks")
        held.add_row("arriving from tiers", format_bytes(stats.loading_bytes))
    models = Table("model", "chunks", "bytes")
    for model in stats.models:
        models.add_row(cell(model.model_id), str(model.chunk_count), format_bytes(model.byte_count))
    done = Table("since start", "")
    for name, value in sorted(stats.counters.items()):
        if value:
            done.add_row(name, format_bytes(value) if name.endswith("_bytes") else f"{value:,}")
    tables: list[Table | Text] = [Text(title, "italic"), held, *map(_tier, stats.tiers), models, done]
    if stats.rates:
        tables.insert(-2, _rates(stats.rates))
    if stats.engines:
        tables.insert(-2, _engines(stats.engines))
    if stats.tier_problem:
        tables.insert(0, cell(stats.tier_problem, "red"))
    return Group(*tables)


def _rates(rates: Iterable[admin_pb2.TierRate]) -> Table:
    """Draw the learned read rates of tiers, with their confidence."""
    drawn = Table("read from", "per second", "latency", "in one case of ten", "confidence", "on the way")
    for each in rates:
        known = f"{each.confidence:.0%} ({each.sample_count} measured)" if each.sample_count else "assumed"
        drawn.add_row(
            cell(tier_words(each.tier)), format_bytes(int(each.bytes_per_second)),
            f"{each.latency_seconds * 1e3:.3g} ms",
            f"{each.caution:.2g} times as long", known, format_bytes(each.queued_bytes),
        )  # fmt: skip
    return drawn


def _engines(engines: Iterable[admin_pb2.EngineRate]) -> Table:
    """Draw the learned prefill rates of engines, with their confidence."""
    drawn = Table("engine of", "rows a pass", "tokens per second", "load", "confidence")
    for each in engines:
        rate = each.rate
        per_s = 1.0 / rate.token_seconds if rate.token_seconds else 0.0
        drawn.add_row(
            cell(each.model_id), str(each.step_tokens or "all"), f"{per_s:,.0f}", f"{rate.load:.2g}",
            f"{each.confidence:.0%} ({rate.sample_count} measured)",
        )  # fmt: skip
    return drawn


def state_of(tier: admin_pb2.TierStats) -> str:
    """Return a tier's state, and for how long it has been in it."""
    return f"{tier.state} for {age_of(tier.state_seconds)}" if tier.state_seconds >= 1 else str(tier.state)


def age_of(seconds: float) -> str:
    """Return a time in its largest unit of which there are two."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _tier(tier: admin_pb2.TierStats) -> Table:
    """Draw one tier below the arena: the account of its files, or for a shared tier its own statistics."""
    shared = ", shared" if tier.is_shared else ""
    drawn = Table(f"{tier.name} ({state_of(tier)}{shared})", "")
    if tier.reason:
        drawn.add_row("why", cell(tier.reason, "red"))
    if tier.is_shared:
        room = f" of {format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else ""
        if tier.allocated_bytes or room:  # a bucket tells nothing: ``kvstore scan`` counts its chunks
            drawn.add_row("holds", f"{format_bytes(tier.allocated_bytes)}{room}")
        if tier.envelope == "none":
            drawn.add_row("envelope", Text("none: nothing protects copies there", style="yellow"))
        elif tier.envelope:
            drawn.add_row("envelope", tier.envelope)
        drawn.add_row("written from here", format_bytes(tier.written_bytes))
        drawn.add_row("read from here", format_bytes(tier.read_bytes))
        return drawn
    drawn.add_row("files", f"{format_bytes(tier.file_bytes)} of {format_bytes(tier.capacity_bytes)}")
    drawn.add_row("allocated", f"{format_bytes(tier.allocated_bytes)} in {tier.chunk_count:,} chunks")
    drawn.add_row("free", format_bytes(tier.free_bytes))
    drawn.add_row("quarantined", format_bytes(tier.quarantined_bytes))
    return drawn
