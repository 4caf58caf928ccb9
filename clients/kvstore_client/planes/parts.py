"""The parts of a chunk that a call names: the cache, and behind it E of each hidden layer. Their layouts, and the check
that a header is the asked part's, which are the same on each plane."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from kvstore.chunk import ChunkHeader, ChunkLayout, layout_of, parse_header, strip_seeds
from kvstore.errors import DataLoss
from kvstore.keys import fingerprint
from kvstore.spec import CacheKind, Exactness, ModelSpec
from kvstore_client.fetch.wanted import Wanted

kept_seeds = lru_cache(maxsize=512)(strip_seeds)
"""Cached, because a chunk fetched once is often fetched again, and its seeds cost more than its hashes."""


def _named(spec: ModelSpec, hidden_layers: Sequence[int], part: int) -> tuple[CacheKind, int | None]:
    """Return the kind of cache of a part, and its layer where it is hidden states."""
    return (spec.kind, None) if part == 0 else (CacheKind.E, hidden_layers[part - 1])


def part_layout(spec: ModelSpec, hidden_layers: Sequence[int], part: int, token_count: int) -> ChunkLayout:
    """Return the layout of a chunk's part with so many tokens. Raises as ``layout_of``; IndexError for a part that is
    not there."""
    kind, layer = _named(spec, hidden_layers, part)
    return layout_of(spec, kind, token_count, layer)


def asked_header(
    data: bytes, layout: ChunkLayout, wanted: Wanted, part: int, digest: bytes, exactness: Exactness
) -> ChunkHeader:
    """Return the header of the chunk with this digest, from its bytes. Raises DataLoss where it is another chunk's, or
    none."""
    kind, layer = _named(wanted.spec, wanted.hidden_layers, part)
    header = parse_header(data, layout)
    if header.encoding != "raw":
        raise DataLoss("memory holds raw chunks only", reason="encoding")
    if header.chain_digest != digest or header.fingerprint != fingerprint(wanted.spec, kind, layer):
        raise DataLoss("another chunk is there than the one asked for", reason="header")
    if header.exactness is not exactness:
        raise DataLoss(f"the chunk that is there is {header.exactness}", reason="exactness")
    return header
