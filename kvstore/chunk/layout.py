"""Layouts: the place of each strip of a chunk. A layout follows from the spec alone, and is cached per geometry."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.spec import CacheKind, ModelSpec, item_size
from kvstore.units import PAGE_BYTES

STRIP_ALIGNMENT = 64
BLOCK_TOKENS = 64
"""Tokens per strip of caches that are not cut by heads: MLA and E."""
CHUNK_BYTES_MAX = 1 << 40
STRIP_COUNT_MAX = 1 << 17
"""Strips of a chunk: eight times those of the deepest model with the most kv heads. Layouts are kept, and made on the
event loop, for whatever model and length a client names."""
KEPT_STRIPS_MAX = 1 << 21
"""Strips of all layouts that are kept, 25 bytes each. Without this bound, a client that names a chunk of each length of
a model with very many strips takes 2 GB of a process that all tenants share."""
FIXED_HEADER_BYTES = 384
STRIP_ENTRY_BYTES = 32


def _align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class Slab:
    """One layer of a chunk. ``offset`` counts from the body's start; strips are numbered over the chunk."""

    layer: int
    offset: int
    byte_count: int
    strip_first: int
    strip_count: int
    heads: int
    dims: tuple[int, ...]
    """Elements per token of each part of a strip: (k_dim, v_dim), or (hidden,) for E."""


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """The geometry of one chunk. ``total_bytes`` = header + body. Its pieces (the header, each slab) may lie apart in
    an arena."""

    kind: CacheKind
    token_count: int
    is_full: bool
    """True when it has as many tokens as a chunk of its model can have."""
    item_size: int
    blocked: bool
    header_bytes: int
    body_bytes: int
    slabs: tuple[Slab, ...]
    strip_offsets: NDArray[np.uint64]
    strip_lengths: NDArray[np.uint32]
    strip_layers: NDArray[np.int32]
    strip_heads: NDArray[np.int32]

    @property
    def strip_count(self) -> int:
        return len(self.strip_offsets)

    @cached_property
    def total_bytes(self) -> int:
        return self.header_bytes + self.body_bytes

    @cached_property
    def piece_bytes(self) -> tuple[int, ...]:
        """(header, slab, slab, ...): the sizes of the pieces; each is a multiple of 4 KiB."""
        return (self.header_bytes, *(slab.byte_count for slab in self.slabs))

    @cached_property
    def slab_of_layer(self) -> dict[int, int]:
        """Layer -> index of its slab. Layers that keep nothing are absent."""
        return {slab.layer: index for index, slab in enumerate(self.slabs)}

    def strips_of(self, slabs: range) -> tuple[int, int]:
        """Return the numbers of the first strip of some slabs, and of the strip after their last."""
        last = self.slabs[slabs.stop - 1]
        return self.slabs[slabs.start].strip_first, last.strip_first + last.strip_count

    @cached_property
    def slab_firsts(self) -> NDArray[np.intp]:
        """Number of each slab's first strip."""
        return np.array([slab.strip_first for slab in self.slabs], np.intp)


@dataclass(frozen=True, eq=False)
class StoredStrips:
    """The places of encoded strips: in the layout's order, only shorter. Offsets count from the body's start.

    Shapes: ``offsets`` and ``lengths`` [strips]; ``slab_offsets`` [slabs + 1], whose last is the body's end.
    """

    offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    slab_offsets: NDArray[np.uint64]

    @property
    def body_bytes(self) -> int:
        return int(self.slab_offsets[-1])


def place_strips(layout: ChunkLayout, lengths: NDArray[np.uint32]) -> StoredStrips:
    """Return the only places that strips of these stored lengths can have: strips 64 B-aligned, slabs 4 KiB-aligned,
    no other room between. ``lengths`` [strips], none longer than the layout's, so that no slab is larger than raw.

    Cost: about 20 us, no loop over strips.
    """
    firsts = layout.slab_firsts
    aligned = _align_each(lengths.astype(np.uint64), STRIP_ALIGNMENT)
    slab_bytes = _align_each(np.add.reduceat(aligned, firsts), PAGE_BYTES)
    slab_offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(slab_bytes)])
    before = np.cumsum(aligned) - aligned
    shifts = slab_offsets[:-1] - before[firsts]  # modulo 2**64, as is the sum below
    counts = np.diff(firsts, append=layout.strip_count)
    return StoredStrips(before + np.repeat(shifts, counts), lengths, slab_offsets)


def _align_each(values: NDArray[np.uint64], alignment: int) -> NDArray[np.uint64]:
    mask = np.uint64(alignment - 1)
    return (values + mask) & ~mask


@lru_cache(maxsize=512)
def layout_of(spec: ModelSpec, kind: CacheKind, token_count: int, layer: int | None = None) -> ChunkLayout:
    """Return the layout of a chunk of ``token_count`` tokens (fewer than ``spec.chunk_tokens`` for a partial tail).

    Raises: InvalidRequest for a token count or an E layer the spec does not have.
    """
    made = _layout(spec, kind, token_count, layer)
    _kept.strip_count += made.strip_count
    if _kept.strip_count > KEPT_STRIPS_MAX:
        layout_of.cache_clear()
        _kept.strip_count = made.strip_count
    return made


class _Kept:
    """The number of strips of the layouts that ``layout_of`` keeps, at most."""

    strip_count = 0


_kept = _Kept()


def _layout(spec: ModelSpec, kind: CacheKind, token_count: int, layer: int | None) -> ChunkLayout:
    if not 0 < token_count <= spec.chunk_tokens:
        raise InvalidRequest(f"a chunk of this model has 1..{spec.chunk_tokens} tokens, not {token_count}")
    is_full = token_count == spec.chunk_tokens
    if kind is CacheKind.E:
        if layer is None or not 0 <= layer < spec.layer_count:
            raise InvalidRequest(f"hidden states of layer {layer}: the model has layers 0..{spec.layer_count - 1}")
        return _build(kind, token_count, is_full, item_size(spec.hidden_dtype), [(layer, 1, (spec.hidden_size,))])
    if kind is CacheKind.OPAQUE is spec.kind:
        return _build(kind, token_count, is_full, item_size(spec.hidden_dtype), [(0, 1, (spec.hidden_size,))])
    if kind is not spec.kind:
        raise InvalidRequest(f"this model's cache is of kind {spec.kind}, not {kind}")
    return _build(
        kind, token_count, is_full, spec.item_size, [(index, *spec.kept(index)) for index in spec.slab_layers]
    )


@lru_cache(maxsize=64)
def _strips(token_count: int, head_count: int, row_bytes: int, blocked: bool) -> tuple[NDArray[np.uint64], ...]:
    """Return the offsets of one slab's strips within the slab, and their lengths."""
    lengths = np.full(head_count, token_count * row_bytes)
    if blocked:
        lengths = np.minimum(BLOCK_TOKENS, token_count - np.arange(0, token_count, BLOCK_TOKENS)) * row_bytes
    aligned = _align_each(lengths.astype(np.uint64), STRIP_ALIGNMENT)
    return np.cumsum(aligned) - aligned, lengths.astype(np.uint64)


def _build(
    kind: CacheKind, token_count: int, is_full: bool, size: int, rows: Sequence[tuple[int, int, tuple[int, ...]]]
) -> ChunkLayout:
    blocked = kind is not CacheKind.KV
    slabs, offsets, lengths = [], [], []
    offset = strip_first = 0
    for layer, head_count, dims in rows:
        places, strips = _strips(token_count, head_count, sum(dims) * size, blocked)
        slab_bytes = _align(int(places[-1] + strips[-1]), PAGE_BYTES)
        slabs.append(Slab(layer, offset, slab_bytes, strip_first, len(strips), head_count, dims))
        offsets.append(places + np.uint64(offset))
        lengths.append(strips)
        offset += slab_bytes
        strip_first += len(strips)
        if strip_first > STRIP_COUNT_MAX:
            raise InvalidRequest(
                f"a chunk of this model has more than {STRIP_COUNT_MAX} strips: one for each kv head of each layer, or "
                f"for each {BLOCK_TOKENS} tokens of each layer of MLA and of E; lower chunk_tokens, or have fewer heads"
            )
        if offset > CHUNK_BYTES_MAX or strips[0] >= 1 << 32:
            raise InvalidRequest(f"a chunk of {token_count} tokens of this model is too large; lower chunk_tokens")
    counts = [slab.strip_count for slab in slabs]
    header_bytes = _align(FIXED_HEADER_BYTES + STRIP_ENTRY_BYTES * strip_first, PAGE_BYTES)
    return ChunkLayout(
        kind=kind,
        token_count=token_count,
        is_full=is_full,
        item_size=size,
        blocked=blocked,
        header_bytes=header_bytes,
        body_bytes=offset,
        slabs=tuple(slabs),
        strip_offsets=np.concatenate(offsets),
        strip_lengths=np.concatenate(lengths).astype(np.uint32),
        strip_layers=np.repeat(np.array([slab.layer for slab in slabs], np.int32), counts),
        strip_heads=np.concatenate([np.arange(count, dtype=np.int32) for count in counts]),
    )
