"""Samples as lines. Words and digits carry all information; colours only repeat it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from itertools import islice

from rich.text import Text

from kvstore.spec.model import CacheKind
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.harmless import plain
from kvstore_ops.operators.tables import DIGITS, duration, is_stalled
from kvstore_ops.tier_words import tier_words
from kvstore_ops.top.sample import Rates, Sample

NARROW = 60
"""Below this width a tier has a few short lines instead of a row."""
BAR_WIDTH = 12
MODEL_COUNT = 5
TENANT_COUNT = 5
DEPTH_MAX = 4
HOUR_S = 3600
ALARM_LINES_MAX = 4
_ALARM, _TITLE = "red", "bold"


def lines_of(first: Sample | None, last: Sample, width: int, problem: str = "") -> list[Text]:
    """Return all lines, none longer than ``width``. ``problem``: why there is no newer sample; empty: there is none."""
    rates = Rates(first, last)
    found = [
        *_head(last, width),
        *(line for each in _alarms(rates, problem) for line in _wrapped(each, width)),
        *_tiers(rates, width),
        *_flows(rates, width),
        *_hits(rates, width),
        *_queues(last, width),
        *_benefit(rates, width),
        *_hottest(last, width),
        *_models(last, width),
        *_tenants(last, width),
        *_plans(rates, width),
    ]
    return [_cut(each, width) for each in found]


def _cut(line: Text, width: int) -> Text:
    line.no_wrap = True
    if line.cell_len > width:
        line.truncate(width, overflow="crop" if width < NARROW else "ellipsis")
    return line


def _wrapped(line: Text, width: int) -> list[Text]:
    """Return an alarm as lines of whole words: its end says what to do."""
    said = textwrap.wrap(
        line.plain, max(width, 8), subsequent_indent="  ", max_lines=ALARM_LINES_MAX, placeholder=" ..."
    )
    return [Text(each, line.style) for each in said]


def _folded(said: str, width: int, style: str = "") -> Iterator[Text]:
    """Yield a line; on a narrow terminal, one for each of its parts."""
    first, *more = said.split(", ") if width < NARROW else [said]
    yield Text(first, style)
    yield from (Text(f" {each}", style) for each in more)


def _head(last: Sample, width: int) -> Iterator[Text]:
    stats = last.stats
    up = duration(stats.uptime_seconds)
    session_count = stats.sessions.session_count
    sessions = f"{session_count} session{'s' * (session_count != 1)}"
    yield from _folded(
        f"kvstore {plain(stats.version)}, tenant {plain(stats.tenant)}, up {up}, {sessions}", width, _TITLE
    )  # fmt: skip


def _alarms(rates: Rates, problem: str) -> Iterator[Text]:
    """Yield a line for each problem that needs an operator."""
    last = rates.last
    if problem:
        yield Text(f"! no answer: {plain(problem)}", _ALARM)
    for tier in last.tiers.tiers:
        if tier.problem:
            yield Text(f"! {plain(tier_words(tier.stats.name))}: {plain(tier.problem)}", _ALARM)
    for reason in last.tiers.absent:
        yield Text(f"! {plain(reason)}", _ALARM)
    if quarantined := last.count("quarantined_chunks"):
        yield Text(f"! {quarantined:,} chunks failed their checks since the start: kvstore verify", _ALARM)
    if rates.of("leases_revoked") > 0 and rates.first is not None:
        yield Text("! leases are taken back for want of room: raise arena.capacity_bytes", _ALARM)


def _tiers(rates: Rates, width: int) -> Iterator[Text]:
    if width >= NARROW:
        yield Text(
            f"{'tier':<8} {'state':<9} {'full':<18} {'chunks':>10} {'in/s':>9} {'out/s':>9} {'waiting':>8}", _TITLE
        )
    for tier in rates.last.tiers.tiers:
        stats = tier.stats
        name, state = plain(tier_words(stats.name), 8), _state(tier)
        style = "" if state == "up" else _ALARM
        written, read = _moved(rates, stats.name)
        count = "-" if stats.is_shared else f"{stats.chunk_count:,}"
        if width >= NARROW:
            yield Text(
                f"{name:<8} {state:<9} {_fill(stats):<18} {count:>10} {_rate(written):>9} "
                f"{_rate(read):>9} {tier.backlog_chunk_count:>8,}", style,
            )  # fmt: skip
            continue
        yield Text(f"{name} {state}", style or _TITLE)
        yield Text(f" {_fill(stats).strip()}")
        if not stats.is_shared:
            yield Text(f" {count} chunks")


def _state(tier: admin_pb2.TierReport) -> str:
    if tier.is_draining:
        return "draining"
    return "stalled" if is_stalled(tier) else plain(tier.stats.state, 9)


def _fill(stats: admin_pb2.TierStats) -> str:
    """Return a bar and the share that is full; for a tier without a capacity, its bytes."""
    if not stats.capacity_bytes:
        return format_bytes(stats.allocated_bytes) if stats.allocated_bytes else "not told"
    share = min(1.0, stats.allocated_bytes / stats.capacity_bytes)
    full = round(share * BAR_WIDTH)
    return f"{'#' * full}{'.' * (BAR_WIDTH - full)} {share:>4.0%}"


def _moved(rates: Rates, name: str) -> tuple[float, float]:
    """Return the bytes per second that were written to a tier, and that were read from it."""
    if name == "dram":
        return rates.of("store_committed_bytes") + rates.of("promoted_bytes"), rates.of("fetch_bytes")
    return rates.of_tier(name, "written_bytes"), rates.of_tier(name, "verified_bytes")


def _rate(byte_count: float) -> str:
    return "-" if byte_count < 1 else format_bytes(byte_count).replace(" ", "")


def _flows(rates: Rates, width: int) -> Iterator[Text]:
    hits, misses = rates.of("fetch_hit_chunks"), rates.of("fetch_miss_chunks")
    share = f"{hits / (hits + misses):.0%} of chunks hit" if hits + misses else "no fetch"
    stores = rates.of("store_committed_chunks")
    said = [
        f"fetches {rates.of('fetch_calls'):.1f}/s, {share}",
        f"lookups {rates.of('lookup_calls'):.1f}/s",
        f"stores {stores:.1f} chunks/s, refused {rates.of('store_refused_chunks'):.1f}/s",
        f"from slower tiers {rates.of('promoted_chunks'):.1f} chunks/s, evicted {rates.of('evicted_chunks'):.1f}/s",
        f"held: {format_bytes(rates.last.stats.arena.leased_bytes)} leased, "
        f"{format_bytes(rates.last.stats.arena.pinned_bytes)} pinned",
    ]
    yield Text("per second" if width >= NARROW else "", _TITLE)
    for each in said:
        yield from _folded(each, width)


def _hits(rates: Rates, width: int) -> Iterator[Text]:
    """Yield the shares of fetched chunks by tier and by kind."""
    tiers = {each.stats.name: rates.of_tier(each.stats.name, "fetched_chunks") for each in rates.last.tiers.tiers}
    kinds = {each.value: rates.of(f"fetched_{each.value}_chunks") for each in CacheKind}
    if sum(tiers.values()):
        yield from _folded(f"hits: {_shares(tiers)}, of {_shares(kinds)}", width)


def _shares(rates: Mapping[str, float]) -> str:
    whole = sum(rates.values()) or 1.0
    return ", ".join(f"{plain(tier_words(name), 8)} {rate / whole:.0%}" for name, rate in rates.items() if rate)


def _queues(last: Sample, width: int) -> Iterator[Text]:
    """Yield a line for each tier that chunks wait for: how urgent they are."""
    for tier in last.tiers.tiers:
        waiting = tier.waiting
        words = {
            "wanted now": waiting.interactive, "soon": waiting.standard, "at leisure": waiting.batch,
            "moving": waiting.moving,
        }  # fmt: skip
        said = [f"{count:,} {word}" for word, count in words.items() if count]
        if said:
            yield from _folded(f"queue of {plain(tier_words(tier.stats.name), 8)}: {', '.join(said)}", width)


def _benefit(rates: Rates, width: int) -> Iterator[Text]:
    """Yield the tokens that were fetched instead of computed: per second now, this hour, and in the last 24 hours."""
    hours = [hour for model in rates.last.stats.models for hour in model.served_hours]
    said = f"{rates.served_tokens:,.0f} tokens/s not computed"
    for name, hour_count in (("this hour", 1), ("24 h", 24)):
        told = [each.saving for each in hours if each.start_seconds > rates.last.wall_s - hour_count * HOUR_S]
        said += f"; {name} {sum(each.token_count for each in told):,}"
        if seconds := sum(each.saved_seconds for each in told):
            said += f", {duration(seconds)} of prefill"
    parts = [said] if width >= NARROW else said.split("; ")
    yield from map(Text, parts)


def _hottest(last: Sample, width: int) -> Iterator[Text]:
    """Yield a line per prefix, indented below the prefix that it extends."""
    if last.hottest:
        yield Text("hottest prefixes: tokens, heat, tier, last chunk" if width >= NARROW else "hottest", _TITLE)
    depths: list[int] = []
    for prefix in last.hottest:
        depths.append(depths[prefix.above - 1] + 1 if 0 < prefix.above <= len(depths) else 0)
        indent, tier = "  " * min(depths[-1], DEPTH_MAX), plain(tier_words(prefix.tier), 8) or "gone"
        if width < NARROW:
            yield Text(f"{indent}{prefix.token_count:,} {tier} {prefix.digest.hex()[:DIGITS]}")
            continue
        yield Text(
            f"{f'{indent}{prefix.token_count:,}':<18} {prefix.heat:>8.1f}  {tier:<8} "
            f"{prefix.digest.hex()[:DIGITS]}  {plain(prefix.model_id)}"
        )


def _plans(rates: Rates, width: int) -> Iterator[Text]:
    """Yield a line for each of the last partial prefills, below the time that they saved since the start."""
    saved_s = rates.last.count("partial_prefill_saved_milliseconds") / 1e3
    if rates.last.plans:
        title = f"plans: to first token, of that waited, became; saved {saved_s:,.1f} s"
        yield Text(title if width >= NARROW else "plans", _TITLE)
    for each in rates.last.plans:
        took = (
            f"{each.end.ttft_seconds:>8.3f} s {each.end.wait_seconds:>8.3f} s" if each.HasField("end") else f"{'-':>21}"
        )
        yield Text(f"{each.number:>7} {took}  {plain(each.state, 10):<10}  {plain(each.model_id)}")


def _models(last: Sample, width: int) -> Iterator[Text]:
    """Yield a line for each of the largest models."""
    models = sorted(last.stats.models, key=lambda each: -each.byte_count)
    if models:
        yield Text("models, the largest" if width >= NARROW else "models", _TITLE)
    for each in islice(models, MODEL_COUNT):
        if width < NARROW:
            yield from _folded(f"{plain(each.model_id)}, {format_bytes(each.byte_count)}", width)
            continue
        yield Text(f"{format_bytes(each.byte_count):>10} {each.chunk_count:>9,} chunks  {plain(each.model_id)}")


def _tenants(last: Sample, width: int) -> Iterator[Text]:
    """Yield a line for each of the other tenants that hold the most."""
    told = sorted(last.tenants.items(), key=lambda each: -_held(each[1]))
    if told:
        yield Text("other tenants: in memory, on the device, chunks" if width >= NARROW else "other tenants", _TITLE)
    for name, stats in islice(told, TENANT_COUNT):
        if isinstance(stats, str):
            yield Text(f"{plain(name, 12):<12} {plain(stats)}", _ALARM)
            continue
        below = sum(each.allocated_bytes for each in stats.tiers if not each.is_shared)
        if width < NARROW:
            yield from _folded(f"{plain(name, 12)}, {format_bytes(stats.arena.used_bytes + below)}", width)
            continue
        yield Text(
            f"{plain(name, 12):<12} {format_bytes(stats.arena.used_bytes):>10} {format_bytes(below):>10} "
            f"{stats.arena.chunk_count:>10,}"
        )
    if len(told) > TENANT_COUNT:
        yield Text(f"and {len(told) - TENANT_COUNT:,} more")


def _held(stats: admin_pb2.StatsResponse | str) -> int:
    """Return the bytes that a tenant has on the node; of a tenant that is not told, more than of any other."""
    if isinstance(stats, str):
        return 1 << 63
    return stats.arena.used_bytes + sum(each.allocated_bytes for each in stats.tiers if not each.is_shared)
