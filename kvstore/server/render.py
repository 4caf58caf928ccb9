"""Converts messages to the controller's values and back. It checks what the wire's limits cannot: digest sizes, enum
ranges."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kvstore.catalog import Event, EventBatch
from kvstore.controller import (
    Arrival,
    ChainQuery,
    FetchResult,
    Fill,
    Located,
    LookupResult,
    ReserveRequest,
    Resident,
    Settled,
    StoreResult,
    Tail,
)
from kvstore.errors import InvalidRequest
from kvstore.keys import DIGEST_BYTES, ROOT_DIGEST
from kvstore.seams import Pauses
from kvstore.spec import LEVELS, Durability, EventKind, Exactness, Provenance
from kvstore.tiers.hbm import PoolExtent
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire.bounds import check_parts

POSITION_STOP = 1 << 63
"""First positions are below this: so the positions of the longest chain fit a header's 64 bits."""
RENDER_BATCH = 256
_PROVENANCE = {0: Provenance.IN_CONTEXT, 1: Provenance.IN_CONTEXT, 2: Provenance.STANDALONE}
_EXACTNESS = {0: Exactness.EXACT, 1: Exactness.EXACT, 2: Exactness.DERIVED}


@lru_cache(maxsize=1024)
def _digest_run(count: int) -> struct.Struct:
    """Return a struct that cuts a run of digests in one call, in half the time of slicing."""
    return struct.Struct(f"{DIGEST_BYTES}s" * count)


def wire_number(value: int) -> Any:
    """Return an enum's number as messages take it. Their stubs ask for enums of their own."""
    return int(value)


def parse_digests(data: bytes, what: str) -> list[bytes]:
    """Return the digests of a run. Raises InvalidRequest for bytes that are no run of digests; ``what`` names the
    field."""
    if len(data) % DIGEST_BYTES:
        raise InvalidRequest(f"{what}: {len(data)} bytes are no run of {DIGEST_BYTES}-byte digests")
    return list(_digest_run(len(data) // DIGEST_BYTES).unpack(data))


def parse_query(message: pb.ChainQuery, layers: Iterable[int] = ()) -> ChainQuery:
    """Return the message as a query. Raises InvalidRequest for anything malformed."""
    exactness = _EXACTNESS.get(message.exactness)
    if exactness is None:
        raise InvalidRequest(f"exactness {message.exactness} is unknown to this version")
    provenance = _PROVENANCE.get(message.provenance)
    if provenance is None:
        raise InvalidRequest(f"provenance {message.provenance} is unknown to this version")
    digests, hidden_only = message.digests, message.hidden_only
    hidden_layers = tuple(message.hidden_layers) if message.hidden_layers else ()
    check_parts(len(digests) // DIGEST_BYTES, len(hidden_layers) + (not hidden_only))
    return ChainQuery(
        message.fingerprint,
        parse_digests(digests, "digests"),
        hidden_layers,
        exactness,
        hidden_only,
        tuple(layers),
        provenance,
    )


def parse_reserve(message: pb.Reserve) -> ReserveRequest:
    """Return the message as a request. Raises InvalidRequest for an impossible chain, or for a first position from
    ``POSITION_STOP`` on."""
    query = parse_query(message.query)
    if ROOT_DIGEST in query.digests or len(set(query.digests)) != len(query.digests):
        raise InvalidRequest("digests: a chain names each chunk once, and not its root")
    if message.first_position >= POSITION_STOP:
        raise InvalidRequest(f"first_position {message.first_position} must be below 2**63")
    return ReserveRequest(
        query,
        parse_digests(message.token_digests, "token_digests"),
        message.tail_token_count,
        message.first_position,
        message.shards or 1,
        parse_digests(message.replaces, "replaces"),
        parse_level(message.durability),
    )


def parse_level(number: int) -> Durability:
    """Return the durability level. Raises InvalidRequest for a level that only a later release knows."""
    try:
        return Durability(number)
    except ValueError:
        raise InvalidRequest(f"durability {number} is unknown to this version") from None


def _levels(missing: Mapping[Durability, str]) -> list[pb.LevelState]:
    return [
        pb.LevelState(durability=wire_number(level), is_reached=level not in missing, reason=missing.get(level, ""))
        for level in LEVELS
    ]


def parse_fills(messages: Iterable[pb.Fill]) -> Iterator[Fill]:
    """Convert fills one at a time, as they are taken: there may be many."""
    for each in messages:
        yield Fill(each.chunk, each.strip_first, each.strip_count, each.staging_id, each.staging_offset)


def _tails(tails: tuple[Tail, ...]) -> list[pb.PartialTail]:
    return [pb.PartialTail(token_count=tail.token_count, digest=tail.digest) for tail in tails]


def _lengths(bits: int) -> bytes:
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def render_lookup(
    result: LookupResult, segments: Sequence[LookupResult] = (), places: Sequence[Resident] = ()
) -> pb.LookupResponse:
    """Render a lookup. Rare fields are set only where they have a value: setting an empty field costs time, too."""
    response = pb.LookupResponse(hit_count=result.hit_count, runs=_runs(result))
    if result.tails:
        response.tails.extend(_tails(result.tails))
    if result.tail_lengths:
        response.tail_lengths = _lengths(result.tail_lengths)
    if result.ticket:
        response.ticket, response.ticket_seconds = result.ticket, result.ticket_s
    if segments:
        response.segments.extend(pb.SegmentFound(hit_count=each.hit_count, runs=_runs(each)) for each in segments)
    if result.tail_found:
        response.tail_found = result.tail_found
    if places:
        response.places.extend(map(_resident, places))
    return response


async def render_located(found: Located, pauses: Pauses) -> pb.LocateResponse:
    """Render the prefixes of each chain. There may be many, so others are answered in between."""
    response = pb.LocateResponse(node=found.node, reason=found.reason)
    response.unknown_tiers.extend(map(wire_number, found.unknown))
    for rows in found.chains:
        prefixes = response.chains.add().prefixes
        for row in rows:
            prefixes.add(node=row.node, tier=int(row.tier), chunk_count=row.chunk_count)
        await pauses.between()
    return response


def _runs(result: LookupResult) -> list[pb.ChunkRun]:
    return [
        pb.ChunkRun(
            count=run.chunk_count,
            state=wire_number(run.state),
            tier=wire_number(run.tier),
            encoding=wire_number(run.encoding),
            reason=wire_number(run.reason),
        )
        for run in result.runs
    ]


async def render_fetch(result: FetchResult, pauses: Pauses) -> pb.FetchResponse:
    """Render a fetch. There may be many chunks, so others are answered in between."""
    response = pb.FetchResponse(
        lease_id=result.lease_id,
        hit_count=result.hit_count,
        tier=wire_number(result.tier),
        reason=wire_number(result.reason),
        tails=_tails(result.tails),
        tail_lengths=_lengths(result.tail_lengths),
    )
    for number, chunk in enumerate(result.chunks, start=1):
        response.chunks.append(_resident(chunk))
        if number % RENDER_BATCH == 0:
            await pauses.between()
    return response


def _resident(chunk: Resident) -> pb.ResidentChunk:
    placement, device = chunk.placement, chunk.on_device
    return pb.ResidentChunk(
        index=chunk.chain_index,
        part=chunk.part,
        token_count=chunk.token_count,
        extents=[
            pb.Extent(region=extent.region, offset=extent.offset, byte_count=extent.byte_count)
            for extent in placement.extents
        ],
        generation_slot=placement.slot,
        generation=placement.generation,
        is_arriving=chunk.loading is not None,
        device=None if device is None else _device_place(device),
    )


def _device_place(extent: PoolExtent) -> pb.DevicePlace:
    return pb.DevicePlace(
        offset=extent.offset, byte_count=extent.byte_count, generation_slot=extent.slot, generation=extent.generation
    )


def render_arrivals(arrivals: Iterable[Arrival]) -> pb.FetchResponse:
    return pb.FetchResponse(
        arrivals=[
            pb.Arrival(
                chunk=each.position,
                slabs=each.landed.to_bytes(-(-each.slab_count // 8), "little"),
                lost=wire_number(each.lost),
                is_provisional=each.is_provisional,
            )
            for each in arrivals
        ]
    )


def render_settled(settled: Settled) -> pb.StoreResponse:
    return pb.StoreResponse(
        durability=wire_number(settled.durability),
        committed_count=settled.chunk_count,
        refusal=settled.reason,
        is_settled=settled.is_settled,
        levels=_levels(settled.missing),
    )


def render_store(result: StoreResult) -> pb.StoreResponse:
    return pb.StoreResponse(
        reservation_id=result.reservation_id,
        states=map(wire_number, result.states),
        durability=wire_number(result.durability),
        committed_count=result.committed_count,
        refusal=result.refusal,
        ticket=result.ticket,
        tails=[pb.TailsBeside(chunk=chunk, lengths=_lengths(bits)) for chunk, bits in result.tail_lengths],
    )


def render_news(news: EventBatch) -> pb.WatchResponse:
    """Render events, and after them the gap if events were lost."""
    events = [_event(each) for each in news.events]
    if news.lost_count:
        gap = pb.ChunkEvent(sequence=news.sequence, kind=wire_number(EventKind.GAP), lost_count=news.lost_count)
        events.append(gap)
    return pb.WatchResponse(events=events)


def _event(event: Event) -> pb.ChunkEvent:
    space = event.space
    return pb.ChunkEvent(
        sequence=event.sequence,
        kind=wire_number(event.kind),
        fingerprint=space.fingerprint,
        model_id=space.model_spec.model_id if space.model_spec is not None else "",
        digest=event.digest,
        parent=event.parent,
        token_count=event.token_count,
        tier=wire_number(event.tier),
        reason=wire_number(event.reason),
    )
