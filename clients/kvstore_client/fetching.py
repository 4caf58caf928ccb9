"""Fetches: extents in, owned tensors out. A chunk's bytes count only if its generation is unchanged after the copy."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import grpc
import numpy as np

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    layout_of,
    parse_header,
    slab_parts,
    strip_seeds,
    verify_slab,
)
from kvstore.errors import DataLoss, InvalidRequest, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams import Clock, FaultPoints
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, MissReason, ModelSpec, Tier
from kvstore.v1alpha import cache_pb2 as pb
from kvstore_client.arrays import carve, checked, destination, presented
from kvstore_client.copying import Copier, copy, plane_run, raw
from kvstore_client.session import Session

_log = logging.getLogger("kvstore.client")
_fence = threading.Lock()
ALIGNMENT = 64


class FetchedKV(list[Any]):
    """Per requested layer (K, V), each [kv_heads, token_count, head_dim]; owned memory. A miss has 0 tokens.

    ``hidden`` maps each requested hidden layer to [token_count, hidden]. ``reason`` says why the prefix ends where
    it does (NONE: the whole prompt was there).
    """

    token_count: int = 0
    tier: Tier = Tier.NONE
    byte_count: int = 0
    reason: MissReason = MissReason.NONE
    hidden: dict[int, Any]


@dataclass(frozen=True)
class Wanted:
    """What of a prefix to bring: checked against the spec."""

    spec: ModelSpec
    layers: tuple[int, ...]
    head_start: int
    head_stop: int | None
    hidden_layers: tuple[int, ...]
    verify: bool

    @staticmethod
    def of(
        spec: ModelSpec, layers: Sequence[int] | None, heads: range | tuple[int, int] | None,
        hidden_layers: Sequence[int], verify: bool,
    ) -> Wanted:  # fmt: skip
        """Raises InvalidRequest for layers or heads the spec does not have."""
        chosen = spec.slab_layers if layers is None else tuple(layers)
        for layer in chosen:
            if layer not in spec.slab_layers:
                raise InvalidRequest(f"layer {layer} keeps no cache in this model of {spec.layer_count} layers")
        start, stop = (0, None) if heads is None else (heads[0], heads[-1] + (1 if isinstance(heads, range) else 0))
        most = min((spec.layers[layer].kv_heads for layer in chosen), default=1)
        if heads is not None and (spec.mla or not 0 <= start < (stop or 0) <= most):
            raise InvalidRequest(f"heads {start}..{stop} of a model with {most} kv heads")
        return Wanted(spec, chosen, start, stop, tuple(hidden_layers), verify)

    def heads_of(self, layer: int) -> int:
        kv_heads = self.spec.layers[layer].kv_heads
        return (kv_heads if self.head_stop is None else self.head_stop) - self.head_start


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

    def slab(self, index: int) -> Bytes:
        """The bytes of one slab."""
        start = self.layout.header_bytes + self.layout.slabs[index].offset
        for extent in self.extents:
            if start < extent.size:
                return extent[start : start + self.layout.slabs[index].byte_count]
            start -= extent.size
        raise DataLoss("the chunk's extents end before its slabs", reason="extents")

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


class Prefix:
    """A leased prefix in mapped memory. ``close`` gives the lease back."""

    def __init__(self, session: Session, wanted: Wanted, response: pb.FetchResponse, digests: list[bytes]) -> None:
        self.session = session
        self.wanted = wanted
        self.tier = Tier(response.tier)
        self.reason = MissReason(response.reason)
        self.tails = response.tails
        self._lease_id = response.lease_id
        self._generations = session.generations
        try:
            self.chunks = [self._chunk(each, digests) for each in response.chunks]
        except BaseException:
            self.close()
            raise
        self.token_count = self._leading(lambda _: True)

    def _chunk(self, entry: pb.ResidentChunk, digests: list[bytes]) -> Chunk:
        spec = self.wanted.spec
        layer = None if entry.part == 0 else self.wanted.hidden_layers[entry.part - 1]
        kind = spec.kind if layer is None else CacheKind.E
        layout = layout_of(spec, kind, entry.token_count, layer)
        extents = [
            self.session.region(each.region)[each.offset : each.offset + each.byte_count] for each in entry.extents
        ]
        header = parse_header(extents[0][: layout.header_bytes].tobytes(), layout)
        if header.chain_digest != digests[entry.index] or header.fingerprint != fingerprint(spec, kind, layer):
            raise DataLoss("the extents hold another chunk than the one asked for", reason="header")
        start = entry.index * spec.chunk_tokens
        home = None
        if len(entry.extents) == 1:
            extent = entry.extents[0]
            home = (self.session.region(extent.region), extent.region, extent.offset)
        return Chunk(entry.part, start, layout, extents, entry.generation_slot, entry.generation, header, home)

    def runs(self, part: int) -> list[ChunkRun]:
        """The chunks of one part, grouped for copying."""
        return runs_of([chunk for chunk in self.chunks if chunk.part == part])

    def unchanged(self, chunk: Chunk) -> bool:
        """Whether everything read from the chunk so far was the chunk's."""
        if len(self._generations) == 0:
            return False
        with _fence:  # orders the copies' loads before the generation's, on machines that reorder loads
            pass
        return bool(self._generations[chunk.slot] == chunk.generation)

    def _leading(self, good: Callable[[Chunk], bool]) -> int:
        """Tokens before the first chunk that is not good."""
        ends = [chunk.token_start for chunk in self.chunks if not (self.unchanged(chunk) and good(chunk))]
        whole = max((chunk.token_start + chunk.layout.token_count for chunk in self.chunks), default=0)
        return min([whole, *ends])

    def settle(self, bad: set[int]) -> int:
        """Tokens whose copies are good: generations unchanged, and no bad checksum (``bad``: ids of chunks)."""
        return self._leading(lambda chunk: id(chunk) not in bad)

    def close(self) -> None:
        """Give the lease back. Idempotent."""
        lease_id, self._lease_id = self._lease_id, 0
        self.session.release(lease_id)


def open_prefix(
    session: Session, wanted: Wanted, name: bytes, digests: list[bytes], exactness: int, timeout_s: float
) -> Prefix:
    """Ask for the resident prefix of a chain. Raises the typed error of a failed call."""
    query = pb.ChainQuery(
        fingerprint=name,
        digests=b"".join(digests),
        hidden_layers=wanted.hidden_layers,
        exactness=exactness,  # type: ignore[arg-type]
    )
    try:
        stream = session.cache.Fetch(pb.FetchRequest(query=query), timeout=timeout_s, metadata=session.metadata)
        response = next(iter(stream))
    except grpc.RpcError as error:
        raise session.translated(error) from error
    except (StopIteration, ValueError) as error:
        raise Unavailable("the sidecar is gone") from error
    return Prefix(session, wanted, response, digests)


class Target:
    """Where a prefix goes: one run of owned memory, or the caller's tensors."""

    def __init__(self, wanted: Wanted, token_count: int, into: Sequence[tuple[Any, Any]] | None) -> None:
        spec = wanted.spec
        self._wanted = wanted
        self._is_callers = into is not None
        shapes = [
            (wanted.heads_of(layer), token_count, dim)
            for layer in wanted.layers
            for dim in (spec.layers[layer].k_dim, spec.layers[layer].v_dim)
        ]
        if into is None:
            self.planes = _owned(shapes, spec.item_size)
        else:
            self.planes = _given(into, shapes, spec.cache_dtype)
        hidden_size = spec.hidden_size
        rows = _owned([(1, token_count, hidden_size)] * len(wanted.hidden_layers), _hidden_size_of(spec))
        self.hidden = dict(zip(wanted.hidden_layers, rows, strict=True))
        self._raw = [raw(plane) for plane in self.planes]
        self._raw_hidden = {layer: raw(plane) for layer, plane in self.hidden.items()}

    def shown(self, plane: Any, dtype: str) -> Any:
        """A plane as the caller knows it: its own tensor, or a view of ours."""
        return plane if self._is_callers else presented(plane, dtype)

    def copy_layer(self, position: int, runs: Sequence[ChunkRun], bad: set[int], faults: FaultPoints) -> None:
        """Copy one requested layer of each chunk. With verify, a chunk whose strips fail joins ``bad``."""
        layer = self._wanted.layers[position]
        planes = self._raw[2 * position : 2 * position + 2]
        for run in runs:
            faults.reach("fetch.copy.middle")
            self._copy_run(run, run.chunks[0].layout.slab_of_layer[layer], planes, bad)

    def copy_hidden(self, layer: int, runs: Sequence[ChunkRun], bad: set[int]) -> None:
        for run in runs:
            self._copy_run(run, 0, [self._raw_hidden[layer]], bad)

    def _copy_run(self, run: ChunkRun, index: int, planes: list[Any], bad: set[int]) -> None:
        wanted, first = self._wanted, run.chunks[0]
        layout = first.layout
        start, stop = (0, None) if layout.blocked else (wanted.head_start, wanted.head_stop)
        if wanted.verify:
            for chunk in run.chunks:
                count = None if stop is None else stop - start
                slab = chunk.slab(index)
                if not verify_slab(slab, layout, index, chunk.seeds, chunk.header.checksums, start, count):
                    bad.add(id(chunk))
        for part in slab_parts(layout, index, run.memory(index), len(run.chunks), run.stride):
            target = plane_run(planes[part.which], first.token_start, layout.token_count, len(run.chunks), part)
            copy(target, raw(part.array[:, start:stop]))


def _hidden_size_of(spec: ModelSpec) -> int:
    from kvstore.spec import item_size

    return item_size(spec.hidden_dtype)


def _owned(shapes: list[tuple[int, int, int]], size: int) -> list[Any]:
    sizes = [-(-int(np.prod(shape)) * size // ALIGNMENT) * ALIGNMENT for shape in shapes]
    memory = destination(sum(sizes))
    planes, offset = [], 0
    for shape, byte_count in zip(shapes, sizes, strict=True):
        planes.append(carve(memory, offset, shape, size))
        offset += byte_count
    return planes


def _given(into: Sequence[tuple[Any, Any]], shapes: list[tuple[int, int, int]], dtype: str) -> list[Any]:
    planes = [plane for pair in into for plane in pair]
    if len(planes) != len(shapes):
        raise InvalidRequest(f"into has {len(into)} layers, expected {len(shapes) // 2}")
    for number, (plane, shape) in enumerate(zip(planes, shapes, strict=True)):
        name = f"into[{number // 2}][{number % 2}]"
        room = getattr(plane, "shape", (0, 0, 0))
        if len(room) != 3 or room[1] < shape[1]:
            raise InvalidRequest(f"{name} has shape {tuple(room)}, needs room for {shape}")
        checked(plane, (shape[0], room[1], shape[2]), dtype, name)
    return planes


def copy_all(prefix: Prefix, target: Target, copier: Copier, faults: FaultPoints, timeout_s: float) -> int:
    """Copy every requested layer. Returns the tokens that are good; what lies beyond them is garbage."""
    bad: set[int] = set()
    cache = prefix.runs(0)

    def run(positions: Sequence[int]) -> None:
        for position in positions:
            target.copy_layer(position, cache, bad, faults)

    copier.split(run, range(len(prefix.wanted.layers)), timeout_s)
    for part, layer in enumerate(prefix.wanted.hidden_layers, start=1):
        target.copy_hidden(layer, prefix.runs(part), bad)
    if bad:
        _log.error("a chunk failed its checksum: treated as a miss", extra={"chunk_count": len(bad)})
    return prefix.settle(bad)


class LayerStream:
    """Yields (layer, (K, V)) in order while later layers are still being copied.

    ``token_count`` is known before the first layer; 0 is a miss, and nothing is yielded. Raises DataLoss when a
    chunk was lost under the copy: discard what came, recompute. ``landed_s``: when the last layer was there.
    """

    def __init__(
        self,
        prefix: Prefix | None,
        target: Target | None,
        copier: Copier,
        faults: FaultPoints,
        clock: Clock,
        reason: MissReason,
        timeout_s: float,
    ) -> None:
        self._prefix = prefix
        self._target = target
        self._copier = copier
        self._faults = faults
        self._clock = clock
        self._timeout_s = timeout_s
        self.reason = reason
        self.landed_s = 0.0
        self.token_count = prefix.token_count if prefix else 0
        hit = prefix if self.token_count else None
        self.tier = hit.tier if hit else Tier.NONE
        self.byte_count = sum(chunk.layout.payload_bytes for chunk in hit.chunks) if hit else 0

    def __iter__(self) -> Iterator[tuple[int, tuple[Any, Any]]]:
        prefix, target = self._prefix, self._target
        if prefix is None or target is None or not self.token_count:
            self.close()
            return
        layers = prefix.wanted.layers
        dtype = prefix.wanted.spec.cache_dtype
        bad: set[int] = set()
        # The memory is there already, so nothing is gained by holding copies back; two threads bound them.
        runs = prefix.runs(0)
        jobs = [self._copier.submit(self._copy, target, runs, position, bad) for position in range(len(layers))]
        try:
            for position, layer in enumerate(layers):
                jobs[position].result(self._timeout_s)
                if bad or prefix.settle(bad) < self.token_count:
                    raise DataLoss(f"a chunk was lost while layer {layer} was copied", layer=layer)
                k, v = target.planes[2 * position : 2 * position + 2]
                yield layer, (target.shown(k, dtype), target.shown(v, dtype))
        finally:
            running = [job for job in jobs if not job.cancel()]
            wait(running, self._timeout_s)
            self.close()

    def _copy(self, target: Target, runs: list[ChunkRun], position: int, bad: set[int]) -> None:
        target.copy_layer(position, runs, bad, self._faults)
        self.landed_s = self._clock.monotonic()

    def close(self) -> None:
        """Give the lease back; done by itself at the end of the iteration."""
        if self._prefix is not None:
            self._prefix.close()
