"""A resident prefix as the sidecar shows it: which chunks, where they lie, whether they are still what they were."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import grpc

from kvstore.chunk import ChunkHeader, ChunkLayout, layout_of, parse_header, strip_seeds, verify_slab
from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams.fence import fence
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.calls import noted
from kvstore_client.prompt import EXACTNESSES
from kvstore_client.remote.fetching import RemotePrefix, open_remote
from kvstore_client.remote.session import RemoteSession
from kvstore_client.session import Session
from kvstore_client.wanted import Wanted

_log = logging.getLogger("kvstore.client")


@dataclass(frozen=True, eq=False)
class Chunk:
    """One resident part of a chunk: views of its pieces, and what its generation must stay."""

    part: int
    token_start: int
    layout: ChunkLayout
    extents: list[Bytes]
    slot: int
    generation: int
    header: ChunkHeader
    home: tuple[Bytes, int, int] | None
    """(region bytes, region index, offset) when the chunk lies in one extent."""
    is_provisional: bool = False
    """Its store is still in flight: its checksums are not known yet."""

    def slab(self, index: int) -> Bytes:
        """The bytes of one slab."""
        start = self.layout.header_bytes + self.layout.slabs[index].offset
        for extent in self.extents:
            if start < extent.size:
                return extent[start : start + self.layout.slabs[index].byte_count]
            start -= extent.size
        raise DataLoss("the chunk's extents end before its slabs", reason="extents")

    def is_intact(self, index: int, head_start: int, head_stop: int | None) -> bool:
        """Whether the strips of a slab (those of a run of heads, where it has heads) are what the header says. Those of
        a store in flight are checked when it is committed."""
        if self.is_provisional:
            return True
        first, stop = (0, None) if self.layout.blocked else (head_start, head_stop)
        count = None if stop is None else stop - first
        return verify_slab(self.slab(index), self.layout, index, self.seeds, self.header.checksums, first, count)

    @property
    def seeds(self) -> list[int]:
        return _kept_seeds(self.header.storage_key, self.layout, self.header.write_id)


_kept_seeds = lru_cache(maxsize=512)(strip_seeds)
"""A chunk that is fetched once is fetched again: its seeds cost more than its hashes do."""


class ChunkRun(NamedTuple):
    """Chunks of one layout, in token order, whose bytes lie at one distance: copied in one call per part."""

    chunks: list[Chunk]
    stride: int

    def memory(self, slab_index: int) -> Bytes:
        """Memory that begins with the first chunk's slab and reaches the last's."""
        first = self.chunks[0]
        if len(self.chunks) == 1 or first.home is None:
            return first.slab(slab_index)
        region, _, offset = first.home
        return region[offset + first.layout.header_bytes + first.layout.slabs[slab_index].offset :]


def _bits(number: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def runs_of(chunks: Sequence[Chunk]) -> list[ChunkRun]:
    """Group neighbours that lie at a constant distance in one region."""
    runs: list[ChunkRun] = []
    for chunk in chunks:
        if runs and (stride := _stride(runs[-1], chunk)):
            runs[-1] = ChunkRun([*runs[-1].chunks, chunk], stride)
        else:
            runs.append(ChunkRun([chunk], 0))
    return runs


def _stride(run: ChunkRun, chunk: Chunk) -> int:
    """The distance at which ``chunk`` continues ``run``, or 0."""
    last = run.chunks[-1]
    if last.home is None or chunk.home is None or last.home[1] != chunk.home[1] or last.layout is not chunk.layout:
        return 0
    distance = chunk.home[2] - last.home[2]
    follows = chunk.token_start == last.token_start + last.layout.token_count
    return distance if follows and distance > 0 and run.stride in (0, distance) else 0


def _hold(extents: Sequence[Bytes], layout: ChunkLayout) -> bool:
    """Whether extents are as long as a chunk, and end between its pieces: no slab is cut in two."""
    ends = list(accumulate(extent.size for extent in extents))
    return ends[-1:] == [layout.total_bytes] and (len(ends) == 1 or set(ends) <= set(accumulate(layout.piece_bytes)))


class Prefix:
    """A leased prefix in mapped memory; some of its chunks may still be on their way there. ``close`` gives the lease
    back."""

    def __init__(
        self, session: Session, wanted: Wanted, response: pb.FetchResponse, digests: list[bytes], stream: Any,
        exactness: Exactness,
    ) -> None:  # fmt: skip
        self.session = session
        self.exactness = exactness
        self._stream = stream
        self._is_closed = False
        self._arriving: dict[int, pb.ResidentChunk] = {}
        self._lease_id = response.lease_id
        self.wanted = wanted
        self.tier = Tier(response.tier)
        self.reason = MissReason(response.reason)
        self.tails, self.tail_lengths = response.tails, response.tail_lengths
        self._digests = digests
        self._generations = session.generations
        self._entries = list(response.chunks)
        self._stop = max((self._span(entry)[1] for entry in self._entries), default=0)
        self._arriving = {number: entry for number, entry in enumerate(self._entries) if entry.is_arriving}
        self._landed: dict[int, tuple[Chunk, int]] = {}
        self._provisional: set[int] = set()
        self._missing: Counter[tuple[int, int]] | None = None
        """(part, slab) -> how many chunks of the prefix it has not landed of; None: to be counted anew."""
        self.chunks: list[Chunk] = []
        try:
            for entry in self._entries:
                if not entry.is_arriving and (chunk := self._read(entry)) is not None:
                    self.chunks.append(chunk)
        except BaseException:
            self.close()
            raise
        self.token_count = self.settle(set())
        self.chunks = [chunk for chunk in self.chunks if chunk.token_start < self.token_count]

    def _span(self, entry: pb.ResidentChunk) -> tuple[int, int]:
        """The tokens of a chunk."""
        start = entry.index * self.wanted.spec.chunk_tokens
        return start, start + entry.token_count

    def _read(self, entry: pb.ResidentChunk) -> Chunk | None:
        """Read a chunk's header. The prefix ends before one that is not what it should be."""
        try:
            return self._chunk(entry, self._digests)
        except DataLoss:
            pass  # the header of a store in flight may be written just now
        try:
            return self._chunk(entry, self._digests)
        except DataLoss as error:
            fence()
            if not self._is_current(entry.generation_slot, entry.generation):
                self._cut(entry, MissReason.STALE)
                return None
            self._cut(entry, MissReason.CORRUPT)
            _log.error("kvstore: %s: treated as a miss", error.message)
            return None

    def _cut(self, entry: pb.ResidentChunk, reason: MissReason) -> None:
        start = self._span(entry)[0]
        if start < self._stop:
            self._stop, self.reason = start, reason
            self._missing = None

    # ------------------------------------------------------------ arrivals

    @property
    def is_arriving(self) -> bool:
        """Whether chunks of it are still on their way to memory."""
        return bool(self._arriving)

    @property
    def is_provisional(self) -> bool:
        """Whether stores that some of it comes from have not been committed yet."""
        return bool(self._provisional)

    def advance(self) -> bool:
        """Wait for news of what is on its way. False when no more will come: what did not arrive is lost then."""
        try:
            response = next(self._stream, None)
        except (grpc.RpcError, ValueError) as error:
            error.__traceback__ = None  # as in ``translated``
            response = None
        try:
            for each in response.arrivals if response is not None else ():
                entry = self._arriving.get(each.chunk)
                if entry is not None:
                    self._note(each.chunk, entry, each)
        except KVStoreError:  # the session ended just now, and with it the memory that the chunk arrived in
            response = None
        if response is None:
            for entry in self._arriving.values():
                self._cut(entry, MissReason.UNAVAILABLE)
            self._arriving, self._provisional = {}, set()
        return bool(self._arriving)

    def _note(self, number: int, entry: pb.ResidentChunk, arrival: pb.Arrival) -> None:
        known = self._landed.get(number)
        landed = int.from_bytes(arrival.slabs, "little")
        chunk = known[0] if known else self._read(entry) if landed else None
        if arrival.is_provisional:
            self._provisional.add(number)
            chunk = replace(chunk, is_provisional=True) if chunk is not None and known is None else chunk
        elif number in self._provisional:
            self._provisional.discard(number)
            self._committed(entry, lost=bool(arrival.lost))
        if chunk is not None:
            self._landed[number] = chunk, landed
            if known is None:
                self.chunks.append(chunk)
            if self._missing is not None and self._span(entry)[0] < self._stop:
                fresh = landed & ~(known[1] if known else 0)
                self._missing.subtract((entry.part, slab) for slab in _bits(fresh))
        if arrival.lost:
            self._cut(entry, MissReason(arrival.lost))
        whole = chunk is not None and landed == (1 << len(chunk.layout.slabs)) - 1
        if arrival.lost or (whole and not arrival.is_provisional):
            del self._arriving[number]

    def _committed(self, entry: pb.ResidentChunk, *, lost: bool) -> None:
        """Its store has ended. With ``verify`` its strips are checked now that their checksums are known."""
        if lost or (chunk := self._read(entry)) is None or not self.wanted.verify:
            return
        layers = self.wanted.layers if chunk.part == 0 else (None,)
        slabs = [0 if layer is None else chunk.layout.slab_of_layer[layer] for layer in layers]
        if not all(chunk.is_intact(slab, self.wanted.head_start, self.wanted.head_stop) for slab in slabs):
            self._cut(entry, MissReason.CORRUPT)

    def arrived(self, part: int, slab: int) -> list[Chunk] | None:
        """The chunks of one part that were on their way, once that slab of all of them is there; else None."""
        if self._missing is None:
            self._missing = self._counted()
        if self._missing[part, slab] > 0:
            return None
        return [self._landed[number][0] for number, entry in self._awaited() if entry.part == part]

    def _awaited(self) -> Iterator[tuple[int, pb.ResidentChunk]]:
        """Those of the prefix, as far as it still reaches, that were not there at once."""
        for number, entry in enumerate(self._entries):
            if entry.is_arriving and self._span(entry)[0] < self._stop:
                yield number, entry

    def _counted(self) -> Counter[tuple[int, int]]:
        missing: Counter[tuple[int, int]] = Counter()
        for number, entry in self._awaited():
            landed = self._landed[number][1] if number in self._landed else 0
            slab_count = len(self._layout(entry).slabs)
            missing.update((entry.part, slab) for slab in _bits(~landed & (1 << slab_count) - 1))
        return missing

    def _named(self, entry: pb.ResidentChunk) -> tuple[CacheKind, int | None]:
        """What kind of cache a part is, and of which layer where it is hidden states."""
        layer = None if entry.part == 0 else self.wanted.hidden_layers[entry.part - 1]
        return self.wanted.spec.kind if layer is None else CacheKind.E, layer

    def _layout(self, entry: pb.ResidentChunk) -> ChunkLayout:
        kind, layer = self._named(entry)
        return layout_of(self.wanted.spec, kind, entry.token_count, layer)

    def _chunk(self, entry: pb.ResidentChunk, digests: list[bytes]) -> Chunk:
        spec, layout = self.wanted.spec, self._layout(entry)
        kind, layer = self._named(entry)
        extents = [
            self.session.region(each.region)[each.offset : each.offset + each.byte_count] for each in entry.extents
        ]
        if not _hold(extents, layout):
            raise DataLoss("the extents do not hold a chunk of this model", reason="extents")
        header = parse_header(extents[0][: layout.header_bytes].tobytes(), layout)
        if header.encoding != "raw":
            raise DataLoss("memory holds raw chunks only", reason="encoding")
        if header.chain_digest != digests[entry.index] or header.fingerprint != fingerprint(spec, kind, layer):
            raise DataLoss("the extents hold another chunk than the one asked for", reason="header")
        if header.exactness is not self.exactness:
            raise DataLoss(f"the extents hold a chunk that is {header.exactness}", reason="exactness")
        start = entry.index * spec.chunk_tokens
        home = None
        if len(entry.extents) == 1:
            extent = entry.extents[0]
            home = (self.session.region(extent.region), extent.region, extent.offset)
        return Chunk(entry.part, start, layout, extents, entry.generation_slot, entry.generation, header, home)

    def runs(self, part: int) -> list[ChunkRun]:
        """The chunks of one part, grouped for copying."""
        return runs_of([chunk for chunk in self.chunks if chunk.part == part])

    def _is_current(self, slot: int, generation: int) -> bool:
        """Whether everything that was read from a chunk before the last ``fence`` was the chunk's. A slot that there is
        not is nobody's."""
        return slot < len(self._generations) and bool(self._generations[slot] == generation)

    def settle(self, bad: set[int]) -> int:
        """Leading tokens whose copies are good: generations unchanged, no bad checksum (``bad``: ids of chunks).
        When that is not all of them, ``reason`` tells why."""
        good = self._stop
        fence()  # the copies' loads come before the generations'
        for chunk in self.chunks:
            current = self._is_current(chunk.slot, chunk.generation)
            if chunk.token_start < good and not (current and id(chunk) not in bad):
                good = chunk.token_start
                self.reason = MissReason.CORRUPT if current else MissReason.STALE
        return good

    def cancel(self) -> None:
        """Wait no longer for what is on its way: ``advance`` returns False soon. From any thread."""
        self._stream.cancel()

    def abandon(self) -> None:
        """As ``cancel``, from a destructor."""
        self.session.returns.soon(self._stream.cancel)

    def close(self) -> None:
        """Give the lease back, and wait for nothing that is on its way. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._arriving:
            self.session.returns.soon(self._stream.cancel)
        self.session.returns.lease(self._lease_id)

    __del__ = close  # a stream that nobody iterates, a fetch that failed half way


AnySession = Session | RemoteSession
AnyPrefix = Prefix | RemotePrefix


def open_prefix(
    session: AnySession, wanted: Wanted, name: bytes, digests: list[bytes], exactness: int, timeout_s: float,
    ticket: bytes = b"", provenance: int = 0,
) -> AnyPrefix:  # fmt: skip
    """Ask for the resident prefix of a chain, or redeem a ticket for all of it. Raises the typed error of a failed
    call."""
    query = pb.ChainQuery(
        fingerprint=name,
        digests=b"".join(digests),
        hidden_layers=wanted.hidden_layers,
        exactness=exactness,  # type: ignore[arg-type]
        provenance=provenance,  # type: ignore[arg-type]
    )
    layers = () if wanted.layers == wanted.spec.slab_layers else wanted.layers
    request = pb.FetchRequest(query=query, layers=layers, ticket=ticket)
    if isinstance(session, RemoteSession):
        return open_remote(session, wanted, request, digests, timeout_s, EXACTNESSES[exactness])
    try:
        stream = noted(session.cache.Fetch(request, timeout=timeout_s, metadata=session.metadata))
        response = next(stream)
    except grpc.RpcError as error:
        raise session.translated(error) from error
    except (StopIteration, ValueError) as error:
        raise Unavailable("the sidecar is gone") from error
    return Prefix(session, wanted, response, digests, stream, EXACTNESSES[exactness])
