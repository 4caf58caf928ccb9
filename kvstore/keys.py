"""Digests that name things: chains of tokens, fingerprints of models, storage keys of tenants.

All are BLAKE3 (32 bytes), separated by domain through a fixed prefix, the same on every host and version; the
tests hold golden vectors.

- *chain digest* of a chunk = H(parent digest, its tokens as u32 little-endian, the extras inside it). The client
  computes it; the memory catalog is indexed by it.
- *content digest* of a segment's first chunk = H(tokens, extras) for a cache that was computed alone, from position 0,
  and H(the preamble's digest, tokens, extras) for one that was computed behind a preamble. The segment's further chunks
  follow it as in any chain, so that each digest stands for all tokens up to its end.
- *fingerprint* = H(spec, kind, layer of E, format version): the namespace a chunk lives in.
- *storage key* = keyed by the tenant's secret, H(fingerprint, provenance, exactness, chain digest): the name of a
  chunk outside this process. No client can compute another tenant's.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest
from kvstore.spec import CacheKind, Exactness, ModelSpec, Provenance

FORMAT_VERSION = 1
DIGEST_BYTES = 32
ROOT_DIGEST = bytes(DIGEST_BYTES)
EXTRA_BYTES_MAX = 1 << 20
SUPERSEDES_MAX = 4096
"""Partial chunks that one store may name as superseded."""
TAILS_BESIDE_MAX = 64
"""Chunks of a store for which its writer is told the lengths of the partial chunks beside: at most 8 KiB each."""

Tokens = NDArray[np.uint32]

_PREFIX = b"kvstore/prefix/1\0"
_CONTENT = b"kvstore/content/1\0"
_BEHIND = b"kvstore/content-behind/1\0"
_TOKENS = b"kvstore/tokens/1\0"
_FINGERPRINT = b"kvstore/fingerprint/1\0"
_STORAGE = b"kvstore/storage/1\0"
_PRESENCE = b"kvstore/presence/1\0"
_NO_EXTRAS = bytes(4)
_PROVENANCES = {Provenance.IN_CONTEXT: b"\0", Provenance.STANDALONE: b"\1"}
_EXACTNESSES = {Exactness.EXACT: b"\0", Exactness.DERIVED: b"\1"}


@dataclass(frozen=True, order=True)
class Extra:
    """An input beside the tokens that changes a cache: an image's hash at its position, a cache salt at position 0."""

    position: int
    data: bytes

    def __post_init__(self) -> None:
        if not isinstance(self.position, int) or not 0 <= self.position < 1 << 64:
            raise InvalidRequest(f"an extra's position must be in 0..2**64-1, not {self.position!r}")
        if not isinstance(self.data, bytes) or len(self.data) > EXTRA_BYTES_MAX:
            raise InvalidRequest(f"an extra's data must be at most {EXTRA_BYTES_MAX} bytes")


def token_array(tokens: Any, vocab_size: int) -> Tokens:
    """Return tokens as a one-dimensional u32 array, which is a copy only when it must be.

    Raises: InvalidRequest when ``tokens`` is not one run of whole numbers in 0..vocab_size-1.
    """
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise InvalidRequest(f"tokens must be one run of numbers: {error}") from error
    if array.ndim != 1:
        raise InvalidRequest(f"tokens must be one run of numbers, not an array of shape {array.shape}")
    if array.size == 0:
        return np.empty(0, np.uint32)
    if array.dtype == object and all(type(token) is int for token in array):  # one of them has more than 64 bits
        raise InvalidRequest(f"a token is out of range: the vocabulary has {vocab_size} entries")
    if array.dtype.kind not in "iu":
        raise InvalidRequest(f"tokens must be whole numbers, not {array.dtype}")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(f"token {wrong} is out of range: the vocabulary has {vocab_size} entries")
    return np.ascontiguousarray(array, dtype="<u4")


def _extras(extras: Iterable[Extra], start: int) -> bytes:
    parts = []
    for extra in extras:
        parts.append(struct.pack("<QI", extra.position - start, len(extra.data)) + extra.data)
    return struct.pack("<I", len(parts)) + b"".join(parts)


def prefix_digest(parent: bytes, tokens: Tokens, extras: Sequence[Extra] = (), start: int = 0) -> bytes:
    """Return the chain digest of one chunk. ``start`` is the position of its first token; extras lie inside it."""
    return _link(parent, tokens.tobytes(), _extras(extras, start) if extras else _NO_EXTRAS)


def _link(parent: bytes, tokens: bytes, extras: bytes) -> bytes:
    return blake3(_PREFIX + parent + (len(tokens) // 4).to_bytes(4, "little") + tokens + extras).digest()


def chain_digests(tokens: Tokens, chunk_tokens: int, extras: Sequence[Extra] = ()) -> list[bytes]:
    """Return one digest per chunk: the full chunks, then the partial tail if there is one."""
    return _chained(ROOT_DIGEST, tokens, 0, chunk_tokens, sorted(extras))


def _chained(parent: bytes, tokens: Tokens, first: int, chunk_tokens: int, ordered: Sequence[Extra]) -> list[bytes]:
    """Return the digests of the chunks from token ``first`` on."""
    digests: list[bytes] = []
    data, size, inside = tokens.tobytes(), 4 * chunk_tokens, _NO_EXTRAS
    positions = [each.position for each in ordered]
    for at in range(4 * first, len(data), size):
        if ordered:
            start, stop = at // 4, min(at + size, len(data)) // 4
            inside = _extras(ordered[bisect_left(positions, start) : bisect_left(positions, stop)], start)
        parent = _link(parent, data[at : at + size], inside)
        digests.append(parent)
    return digests


def tail_digest(tokens: Tokens, start: int, stop: int, parent: bytes, extras: Sequence[Extra] = ()) -> bytes:
    """Return the chain digest of the partial chunk ``tokens[start:stop]`` after ``parent``."""
    inside = sorted(extra for extra in extras if start <= extra.position < stop)
    return prefix_digest(parent, tokens[start:stop], inside, start)


def token_digest(tokens: Tokens) -> bytes:
    """Return the digest of a run of tokens, without context. It confirms that a found chunk holds these tokens."""
    return blake3(_TOKENS + tokens.tobytes()).digest()


def content_digest(tokens: Tokens, extras: Sequence[Extra] = (), behind: bytes = b"") -> bytes:
    """Return the key of a segment's first chunk. ``behind``: the token digest of the preamble that the segment was
    computed behind; empty: it was computed alone, from position 0."""
    assert len(behind) in (0, DIGEST_BYTES)
    domain = _BEHIND + behind if behind else _CONTENT
    data = domain + struct.pack("<I", tokens.size) + tokens.tobytes()
    return blake3(data + _extras(sorted(extras), 0)).digest()


def segment_digests(
    tokens: Tokens, chunk_tokens: int, extras: Sequence[Extra] = (), behind: bytes = b""
) -> list[bytes]:
    """Return one digest per chunk of a segment, its partial tail included. ``extras``: positions count from its first
    token. ``behind``: as in ``content_digest``."""
    if not tokens.size:
        return []
    ordered = sorted(extras)
    first = content_digest(tokens[:chunk_tokens], [extra for extra in ordered if extra.position < chunk_tokens], behind)
    return [first, *_chained(first, tokens, chunk_tokens, chunk_tokens, ordered)]


@lru_cache(maxsize=4096)
def fingerprint(spec: ModelSpec, kind: CacheKind, layer: int | None = None) -> bytes:
    """Return the namespace of one kind of cache of one model. E has a namespace per layer that it enters."""
    assert (kind is CacheKind.E) == (layer is not None)
    head = struct.pack("<Iq", FORMAT_VERSION, -1 if layer is None else layer) + kind.value.encode() + b"\0"
    return blake3(_FINGERPRINT + head + spec.canonical).digest()


def storage_key(
    secret: bytes, namespace: bytes, provenance: Provenance, exactness: Exactness, chain_digest: bytes
) -> bytes:
    """Return a chunk's name outside this process, keyed by the tenant's 32-byte secret."""
    return storage_keys(secret, namespace, provenance, exactness, (chain_digest,))[0]


def storage_keys(
    secret: bytes, namespace: bytes, provenance: Provenance, exactness: Exactness, chain_digests: Iterable[bytes]
) -> list[bytes]:
    """Return the ``storage_key`` of each chunk. Cost: 1 us a chunk, as what all of them begin with is hashed once."""
    front = blake3(_STORAGE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness], key=secret)
    keys = []
    for each in chain_digests:
        state = front.copy()
        state.update(each)
        keys.append(state.digest())
    return keys


@lru_cache(maxsize=4096)
def presence_salt(namespace: bytes, provenance: Provenance, exactness: Exactness) -> int:
    """Return a 64-bit salt that keeps the chunks of one namespace apart from those of others in the presence table."""
    data = _PRESENCE + namespace + _PROVENANCES[provenance] + _EXACTNESSES[exactness]
    return int.from_bytes(blake3(data).digest(8), "little")
