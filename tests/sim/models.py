"""Models, chains and bytes. What a chunk holds is a function of its namespace and digest: a wrong byte shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from blake3 import blake3
from kvstore_client.opaque.value import Key, namespace_spec

from kvstore import keys
from kvstore.chunk import ChunkLayout, layout_of
from kvstore.controller import ChainQuery
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, LayerSpec, ModelSpec
from tests.specs import small_spec

NARROW = small_spec(model_id="narrow")
"""12 KiB chunks; their E takes 8 KiB."""
WIDE = small_spec(
    model_id="wide", layers=(LayerSpec(kv_heads=2, k_dim=32, v_dim=32),) * 3, hidden_size=32, chunk_tokens=32
)
"""28 KiB chunks; tails of 8 tokens take 16."""
SPECS = (NARROW, WIDE)
VALUES = replace(namespace_spec("values"), chunk_tokens=8)
"""12 KiB chunks, one of which is a value that others take the place of."""
OWN_SPECS = (*SPECS, VALUES)
STRANGERS = tuple(small_spec(model_id=f"stranger {number}") for number in range(4))
"""Models of which nothing is stored."""
KEYS = tuple(f"key {number}" for number in range(4))
Name = tuple[bytes, bytes]
"""(namespace, chain digest) of a chunk."""


@dataclass(frozen=True)
class Chain:
    """A prompt: one full chunk per step of ``path``, then ``tail`` tokens more; with the E of ``hidden`` layers."""

    spec: ModelSpec = field(repr=False)
    path: tuple[int, ...]
    tail: int = 0
    hidden: tuple[int, ...] = ()

    def __str__(self) -> str:
        more = f"+{self.tail}" if self.tail else ""
        return f"{self.spec.model_id}{list(self.path)}{more}{' with E' if self.hidden else ''}"

    @property
    def digests(self) -> list[bytes]:
        return _digests(self.spec, self.path, self.tail)[0]

    @property
    def token_digests(self) -> list[bytes]:
        return _digests(self.spec, self.path, self.tail)[1]

    @property
    def layers(self) -> tuple[int | None, ...]:
        """Its parts: the attention cache, and E by layer."""
        return (None, *self.hidden)

    def query(self) -> ChainQuery:
        return ChainQuery(keys.fingerprint(self.spec, self.spec.kind), self.digests, hidden_layers=self.hidden)

    def layout(self, index: int, layer: int | None) -> ChunkLayout:
        tokens = self.spec.chunk_tokens if index < len(self.path) else self.tail
        return layout_of(self.spec, self.spec.kind if layer is None else CacheKind.E, tokens, layer)

    def name(self, index: int, layer: int | None) -> Name:
        return space_name(self.spec, layer), self.digests[index]

    def whole(self, count: int) -> dict[Name, ChunkLayout]:
        """The names and layouts of the whole chunks among its first ``count``: what goes beyond the node."""
        numbers = range(min(count, len(self.path)))
        return {self.name(index, layer): self.layout(index, layer) for index in numbers for layer in self.layers}

    def names(self, count: int) -> list[Name]:
        """Those of its first ``count`` chunks, each part of them."""
        return [self.name(index, layer) for index in range(count) for layer in self.layers]


@lru_cache(maxsize=4096)
def _digests(spec: ModelSpec, path: tuple[int, ...], tail: int) -> tuple[list[bytes], list[bytes]]:
    size = spec.chunk_tokens
    values = np.repeat(np.array((*path, *((0,) if tail else ()))), size)[: len(path) * size + tail]
    tokens = keys.token_array(values, spec.vocab_size)
    return keys.chain_digests(tokens, size), [
        keys.token_digest(tokens[at : at + size]) for at in range(0, tokens.size, size)
    ]


def space_name(spec: ModelSpec, layer: int | None) -> bytes:
    return keys.fingerprint(spec, spec.kind if layer is None else CacheKind.E, layer)


def value_query(key: str) -> ChainQuery:
    return ChainQuery(keys.fingerprint(VALUES, VALUES.kind), [Key.of(key).whole])


def value_name(key: str) -> Name:
    return space_name(VALUES, None), Key.of(key).whole


VALUE_NAMES = frozenset(map(value_name, KEYS))
VALUE_LAYOUT = layout_of(VALUES, VALUES.kind, VALUES.chunk_tokens)


def value_body(name: Name, version: int) -> Bytes:
    """What a version of a value holds, which begins with its number."""
    said = blake3(b"".join(name) + version.to_bytes(8)).digest(64)
    whole = np.resize(np.frombuffer(said, np.uint8), VALUE_LAYOUT.body_bytes).copy()
    whole[:8] = np.frombuffer(version.to_bytes(8), np.uint8)
    return whole


def version_of(name: Name, found: Sequence[Bytes]) -> int | None:
    """Which version of a value these slabs are; None: they are none."""
    whole = np.concatenate(found)
    version = int.from_bytes(whole[:8].tobytes())
    return version if (whole == value_body(name, version)).all() else None


@lru_cache(maxsize=8192)
def body(name: Name, layout: ChunkLayout) -> tuple[Bytes, ...]:
    """What the slabs of a chunk hold. Gaps between strips are zeros."""
    whole = np.zeros(layout.body_bytes, np.uint8)
    said = np.frombuffer(blake3(b"".join(name)).digest(64), np.uint8)
    for number, (offset, length) in enumerate(
        zip(layout.strip_offsets.tolist(), layout.strip_lengths.tolist(), strict=True)
    ):
        whole[offset : offset + length] = np.resize(np.roll(said, number) + number, length)
    return tuple(whole[slab.offset : slab.offset + slab.byte_count] for slab in layout.slabs)
