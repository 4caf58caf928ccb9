"""Replies to operators, as tables for people and as plain values for machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from kvstore.keys import DIGEST_BYTES
from kvstore.spec import Durability, Encoding, Exactness, MissReason, Provenance
from kvstore.units import format_bytes
from kvstore.v1alpha import admin_pb2
from kvstore_ops.operators.harmless import cell
from kvstore_ops.status import state_of
from kvstore_ops.tier_words import tier_words

DIGITS = 16
"""Hexadecimal digits of a digest in a table: enough for ``kvstore show``."""
SHOWN_COUNT = 8
"""Most digests of a chain in a table; JSON has all of them."""
_BORDER = 3
"""Columns of the terminal that a column of a table takes beside its text."""
_FOLDED = 12
"""The least width of a column of names that are folded."""
_STALLED_S = 2.0
"""As the page for browsers has it."""
_PROVENANCES = {1: Provenance.IN_CONTEXT, 2: Provenance.STANDALONE}
_EXACTNESSES = {1: Exactness.EXACT, 2: Exactness.DERIVED}


def digests_of(data: bytes) -> list[str]:
    """Split joined digests, and return them in hexadecimal digits."""
    return [data[at : at + DIGEST_BYTES].hex() for at in range(0, len(data), DIGEST_BYTES)]


def chunk_age(stored_seconds: int, now_s: float) -> str:
    """Return the age of a chunk in words. A chunk without a time was stored before the service started."""
    if not stored_seconds:
        return "before start"
    return duration(max(0.0, now_s - stored_seconds))


def duration(seconds: float) -> str:
    """Return the duration in words: "42 s", "13 min", "5.2 h" or "3.1 d"."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}" if unit == "min" else f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# ------------------------------------------------------------------ tiers


def tiers_as_dict(found: admin_pb2.TiersResponse) -> dict[str, Any]:
    """Return every tier's report as plain values."""
    return {"tenant": found.tenant, "tiers": list(map(_tier_as_dict, found.tiers)), "absent": list(found.absent)}


def _tier_as_dict(tier: admin_pb2.TierReport) -> dict[str, Any]:
    stats = tier.stats
    return {
        "name": stats.name, "state": stats.state, "is_shared": stats.is_shared, "chunk_count": stats.chunk_count,
        "allocated_bytes": stats.allocated_bytes, "capacity_bytes": stats.capacity_bytes,
        "free_bytes": stats.free_bytes, "quarantined_bytes": stats.quarantined_bytes,
        "read_bytes": stats.read_bytes, "written_bytes": stats.written_bytes,
        "durability": Durability(tier.durability).name.lower(), "backlog_chunk_count": tier.backlog_chunk_count,
        "problem": tier.problem, "is_draining": tier.is_draining,
        "stalled_seconds": tier.stalled_seconds, "write_policy": tier.write_policy,
        "envelope": stats.envelope, "state_seconds": stats.state_seconds, "reason": stats.reason,
        "encodings": list(map(_encoding_as_dict, tier.encodings)),
    }  # fmt: skip


def _encoding_as_dict(each: admin_pb2.EncodingReport) -> dict[str, Any]:
    return {
        "fingerprint": each.fingerprint.hex(), "encoding": each.encoding, "sample_count": each.sample_count,
        "ratio": each.ratio, "encode_bytes_per_second": each.encode_bytes_per_second,
        "decode_bytes_per_second": each.decode_bytes_per_second, "line_bytes_per_second": each.line_bytes_per_second,
    }  # fmt: skip


@dataclass(frozen=True)
class FittedTable:
    """A line per row; on a terminal that is too narrow for that, a table per row, which its first cell names. Columns
    that are given as words do not wrap, apart from the first."""

    columns: tuple[Column | str, ...]
    title: str
    rows: list[tuple[Text | str, ...]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [
            Column(each, no_wrap=number > 0) if isinstance(each, str) else each.copy()
            for number, each in enumerate(self.columns)
        ]
        names = [str(each.header) for each in columns]
        cells = zip(names, *map(_plain, self.rows), strict=True)
        if sum(map(_room_of, columns, cells)) + _BORDER * len(columns) + 1 <= options.max_width:
            table = Table(*columns, title=self.title or None)
            for row in self.rows:
                table.add_row(*row)
            yield table
            return
        if self.title:
            yield Text(self.title, "italic")
        for row in self.rows:
            table = Table(names[0], Column(row[0], overflow="fold"))
            for what, value in zip(names[1:], row[1:], strict=True):
                table.add_row(what, value)
            yield table


def _room_of(column: Column, cells: Sequence[str]) -> int:
    """Return the least width at which the column's cells can be read."""
    if column.overflow == "fold":
        return min(_FOLDED, max(map(cell_len, cells)))
    return max(cell_len(word) for each in cells for word in ([each] if column.no_wrap else each.split()))


def _plain(row: Iterable[Text | str]) -> Iterator[str]:
    return map(str, row)


def _encodings(tiers: Iterable[admin_pb2.TierReport]) -> Iterator[FittedTable]:
    """Draw what tiers chose for each model, if any do."""
    rows: list[tuple[Text | str, ...]] = []
    for tier in tiers:
        for each in tier.encodings:
            rates = (each.encode_bytes_per_second, each.decode_bytes_per_second, each.line_bytes_per_second)
            rows.append((
                cell(tier_words(tier.stats.name)), each.fingerprint.hex()[:DIGITS], each.encoding,
                f"{each.ratio:.2f}" if each.ratio else "", *(format_bytes(rate) if rate else "" for rate in rates),
            ))  # fmt: skip
    if rows:
        columns = ("tier", "model", "chosen", "as lz4", "encode/s", "decode/s", "line/s")
        yield FittedTable(columns, "encodings chosen", rows)


def is_stalled(tier: admin_pb2.TierReport) -> bool:
    """True when the tier has left its calls without an answer for so long that an operator should know. Any call takes
    some milliseconds."""
    return tier.stalled_seconds > _STALLED_S


def render_tiers(found: admin_pb2.TiersResponse) -> Group:
    """Draw a line per tier, and the problems below."""
    columns = ("tier", "state", "survives", "chunks", "holds", "of", "waiting")
    table = FittedTable(columns, f"tenant {found.tenant}", [])
    problems = [(each.stats.name, each.problem) for each in found.tiers if each.problem]
    for tier in found.tiers:
        stats = tier.stats
        state = f"stalled {tier.stalled_seconds:.0f} s" if is_stalled(tier) else stats.state
        state = "draining" if tier.is_draining else state
        state = state_of(stats) if state == stats.state else state
        is_well = stats.state == "up" and not (is_stalled(tier) or tier.is_draining)
        name = f"{stats.name} (shared, {tier.write_policy})" if stats.is_shared else tier_words(stats.name)
        is_told = bool(stats.allocated_bytes or not stats.is_shared)
        table.rows.append((
            cell(name), cell(state, "" if is_well else "red"), Durability(tier.durability).name,
            "not told" if stats.is_shared else f"{stats.chunk_count:,}",
            format_bytes(stats.allocated_bytes) if is_told else "",
            format_bytes(stats.capacity_bytes) if stats.capacity_bytes else "", f"{tier.backlog_chunk_count:,}",
        ))  # fmt: skip
    lines: list[RenderableType] = [table, *_encodings(found.tiers)]
    lines += [cell(f"{tier_words(name)}: {problem}", "red") for name, problem in problems]
    told = {problem for _, problem in problems}
    lines += [cell(each, "red") for each in found.absent if each not in told]
    return Group(*lines)


# ------------------------------------------------------------------ lists


def chunk_as_dict(chunk: admin_pb2.ChunkEntry) -> dict[str, Any]:
    """Return one chunk as plain values: digests in hex, names in lower case."""
    return {
        "digest": chunk.digest.hex(), "parent": chunk.parent.hex(), "model_id": chunk.model_id,
        "fingerprint": chunk.fingerprint.hex(), "e_layer": chunk.e_layer,
        "provenance": _PROVENANCES[chunk.provenance].value, "exactness": _EXACTNESSES[chunk.exactness].value,
        "token_count": chunk.token_count, "byte_count": chunk.byte_count, "use_count": chunk.use_count,
        "child_count": chunk.child_count, "is_held": chunk.is_held, "is_pinned": chunk.is_pinned,
        "stored_seconds": chunk.stored_seconds,
        "copies": [
            {
                "tier": copy.tier, "encoding": Encoding(copy.encoding).name.lower(), "is_proven": copy.is_proven,
                "is_shared": copy.is_shared,
            }
            for copy in chunk.copies
        ],
    }  # fmt: skip


def total_as_dict(total: admin_pb2.ModelTotal) -> dict[str, Any]:
    """Return the totals of one model as plain values."""
    tiers = {each.tier: {"chunk_count": each.chunk_count, "byte_count": each.byte_count} for each in total.tiers}
    return {
        "model_id": total.model_id, "fingerprint": total.fingerprint.hex(), "chunk_count": total.chunk_count,
        "byte_count": total.byte_count, "tiers": tiers, "profiles": list(total.profiles),
    }  # fmt: skip


def render_chunks(
    chunks: Sequence[admin_pb2.ChunkEntry], totals: Iterable[admin_pb2.ModelTotal], now_s: float
) -> Group:
    """Draw a line per chunk, and the totals of all selected chunks."""
    columns = (
        Column("chunk", no_wrap=True), Column("model", overflow="fold"), _number("tokens"), _number("bytes"),
        Column("tiers"), Column("age", justify="right"), "held",
    )  # fmt: skip
    table = FittedTable(columns, "", [])
    for chunk in chunks:
        held = "pinned" if chunk.is_pinned else "held" if chunk.is_held else ""
        tiers = " ".join(f"{tier_words(copy.tier)}{'' if copy.is_proven else '?'}" for copy in chunk.copies)
        table.rows.append((
            chunk.digest.hex()[:DIGITS], model_cell(chunk), str(chunk.token_count), format_bytes(chunk.byte_count),
            cell(tiers), chunk_age(chunk.stored_seconds, now_s), held,
        ))  # fmt: skip
    count, byte_count = 0, 0
    for each in totals:
        count, byte_count = count + each.chunk_count, byte_count + each.byte_count
    more = f"{len(chunks):,} of " if len(chunks) < count else ""
    said = Text(f"{more}{count:,} chunk{'s' * (count != 1)}, {format_bytes(byte_count)} as in memory")
    return Group(table, said) if chunks else Group(said)


def model_cell(chunk: admin_pb2.ChunkEntry) -> Text:
    """Return the model's id, or digits of its fingerprint when no engine has registered it, and marks: the layer of E,
    derived, segment."""
    name = chunk.model_id or f"({chunk.fingerprint.hex()[:DIGITS]})"
    found = cell(name)
    if chunk.e_layer >= 0:
        found.append(f" E of layer {chunk.e_layer}")
    if chunk.exactness == 2:
        found.append(" derived")
    if chunk.provenance == 2:
        found.append(" segment")
    return found


def render_models(totals: Sequence[admin_pb2.ModelTotal]) -> FittedTable:
    """Draw a line per model, with its chunks in each tier, and its profiles where any has one."""
    has_profiles = any(total.profiles for total in totals)
    names = list(dict.fromkeys(tier.tier for total in totals for tier in total.tiers))
    columns: tuple[Column | str, ...] = (
        Column("model", overflow="fold"), "fingerprint", *map(_number, ("chunks", "bytes", *map(tier_words, names))),
        *[Column("profiles", overflow="fold")] * has_profiles,
    )  # fmt: skip
    table = FittedTable(columns, "", [])
    for total in totals:
        of = {tier.tier: f"{tier.chunk_count:,}" for tier in total.tiers}
        name = cell(total.model_id) if total.model_id else Text("(not registered)", style="yellow")
        table.rows.append((
            name, total.fingerprint.hex()[:DIGITS], f"{total.chunk_count:,}", format_bytes(total.byte_count),
            *(of.get(each, "0") for each in names), *[cell(", ".join(total.profiles))] * has_profiles,
        ))  # fmt: skip
    return table


def _number(header: str) -> Column:
    return Column(header, justify="right", no_wrap=True)


# ------------------------------------------------------------------ one chunk


def shown_as_dict(found: admin_pb2.ShowChunkResponse) -> dict[str, Any]:
    """Return every part as plain values, and the reason when there is none."""
    return {"parts": list(map(_detail_as_dict, found.parts)), "reason": MissReason(found.reason).name.lower()}


def _detail_as_dict(detail: admin_pb2.ChunkDetail) -> dict[str, Any]:
    header = detail.header
    facts = {
        "kind": header.kind, "write_id": header.write_id.hex(), "storage_key": header.storage_key.hex(),
        "first_position": header.first_position, "token_digest": header.token_digest.hex(),
        "rope_digest": header.rope_digest.hex(), "strip_count": header.strip_count, "tier": header.tier,
    }  # fmt: skip
    return {
        **chunk_as_dict(detail.chunk), "header": facts if detail.HasField("header") else None,
        "header_problem": detail.header_problem, "ancestors": digests_of(detail.ancestors),
        "ancestor_count": detail.ancestor_count, "children": digests_of(detail.children),
        "lease_count": detail.lease_count, "hold_count": detail.hold_count,
        "levels": [Durability(each).name.lower() for each in detail.levels],
    }  # fmt: skip


def render_shown(found: admin_pb2.ShowChunkResponse, now_s: float) -> Group:
    """Draw a table per part."""
    return Group(*(_detail(each, now_s) for each in found.parts))


def _detail(detail: admin_pb2.ChunkDetail, now_s: float) -> Table:
    chunk, header = detail.chunk, detail.header
    table = Table("", Column("", overflow="fold"), title=f"chunk {chunk.digest.hex()}", show_header=False)
    table.add_row("model", model_cell(chunk))
    table.add_row("namespace", chunk.fingerprint.hex())
    table.add_row("size", f"{chunk.token_count} tokens, {format_bytes(chunk.byte_count)} in memory")
    for copy in chunk.copies:
        how = "the tier says so" if copy.is_shared else "a crash left it: it is read before anything relies on it"
        encoding = "" if copy.is_shared else f"{Encoding(copy.encoding).name.lower()}, "
        table.add_row(cell(tier_words(copy.tier)), f"{encoding}{'proven' if copy.is_proven else how}")
    table.add_row("has reached", ", ".join(Durability(each).name for each in detail.levels) or "nothing certain")
    table.add_row("stored", f"{chunk_age(chunk.stored_seconds, now_s)}{' ago' if chunk.stored_seconds else ''}")
    table.add_row("uses", str(chunk.use_count) if chunk.use_count else "not counted without a shared tier")
    table.add_row("held", f"{detail.hold_count} times, {detail.lease_count} of them leases")
    table.add_row("chain above", _chain(detail.ancestor_count, digests_of(detail.ancestors)))
    table.add_row("children", _chain(chunk.child_count, digests_of(detail.children)))
    if detail.HasField("header"):
        table.add_row("first position", f"{header.first_position:,}")
        table.add_row("kind", f"{header.kind}, {header.strip_count} strips")
        table.add_row("write id", header.write_id.hex())
        table.add_row("storage key", header.storage_key.hex())
    else:
        table.add_row("header", cell(detail.header_problem, "red"))
    return table


def _chain(count: int, digests: Sequence[str]) -> str:
    shown = " ".join(each[:DIGITS] for each in digests[:SHOWN_COUNT])
    more = " ..." if count > SHOWN_COUNT else ""
    return f"{count:,}: {shown}{more}" if count else "none"


# ------------------------------------------------------------------ changes


def outcomes_as_dict(found: admin_pb2.ChangeResponse, *, dry_run: bool) -> dict[str, Any]:
    """Return the outcome of a change, or of its dry run, as plain values."""
    outcomes = {each.what: {"chunk_count": each.chunk_count, "byte_count": each.byte_count} for each in found.outcomes}
    return {"dry_run": dry_run, "total_count": found.total_count, "outcomes": outcomes, "problem": found.problem}


def outcomes_together(found: Sequence[admin_pb2.ChangeResponse]) -> admin_pb2.ChangeResponse:
    """Return the outcomes of several changes as those of one."""
    whole, counts = admin_pb2.ChangeResponse(is_last=True), dict[str, admin_pb2.Outcome]()
    for each in found:
        whole.done_count += each.done_count
        whole.total_count += each.total_count
        whole.problem = whole.problem or each.problem
        for outcome in each.outcomes:
            kept = counts.setdefault(outcome.what, admin_pb2.Outcome(what=outcome.what))
            kept.chunk_count += outcome.chunk_count
            kept.byte_count += outcome.byte_count
    whole.outcomes.extend(counts.values())
    return whole


def render_outcomes(
    found: admin_pb2.ChangeResponse, *, dry_run: bool, nothing: str = "nothing: no chunk is meant"
) -> Group:
    """Draw a line per kind of outcome. ``nothing``: the line where there is none."""
    table = Table("would be" if dry_run else "became", Column("chunks", justify="right"), "as in memory")
    for each in found.outcomes:
        known = format_bytes(each.byte_count) if each.byte_count else ""
        table.add_row(cell(tier_words(each.what)), f"{each.chunk_count:,}", known)
    if not found.outcomes:
        table.add_row(nothing, "0", "")
    return Group(table, cell(_problem(found.problem), "red")) if found.problem else Group(table)


def _problem(text: str) -> str:
    """Return a problem with the tier's name in words. What follows the name is an error's: its paths stay."""
    tier, colon, reason = text.partition(": ")
    return tier_words(tier) + colon + reason


# ------------------------------------------------------------------ settings


def settings_as_dict(changes: Sequence[admin_pb2.SettingChange], *, dry_run: bool) -> dict[str, Any]:
    """Return every setting that differs as plain values, and whether it needs a restart."""
    found = [
        {
            "name": each.name, "before": each.before if each.HasField("before") else None,
            "after": each.after if each.HasField("after") else None, "needs_restart": not each.is_live,
        }
        for each in changes
    ]  # fmt: skip
    return {"dry_run": dry_run, "changes": found}


def render_settings(changes: Sequence[admin_pb2.SettingChange], *, dry_run: bool) -> RenderableType:
    """Draw a line per setting."""
    if not changes:
        return Text("nothing differs from what is in effect")
    table = Table("setting", Column("in effect", overflow="fold"), Column("now", overflow="fold"), "")
    for each in changes:
        done = "would change" if dry_run else "changed"
        table.add_row(
            cell(each.name), cell(each.before if each.HasField("before") else "-"),
            cell(each.after if each.HasField("after") else "-"), done if each.is_live else "needs a restart",
        )  # fmt: skip
    return table
