"""vLLM's own names of a prompt's blocks, for routers that use them: the same chunks, looked up by vLLM's hashes.

With ``"digests": "vllm"`` the connector names chunks by vLLM's ``sha256_cbor`` block hashes instead of our own digests.
Needs no vLLM: a router computes the hashes here, or has them from vLLM's KV events.

Why an option: our own digests need no flag, and engines with other block sizes, hashes or seeds share by them.

Why the two kinds never meet: such chunks live under a model id that ends with the scheme, so under a fingerprint of
their own. A different block size makes other hashes, thus misses.

vLLM's hash and our digest both cover every token before, the salt, and each image or sound by its content and its
place. vLLM's hash also covers an adapter's name and path, and prompt embeddings. Our digest also covers the length of
an item's placeholder, which follows from model, content and the processor's settings; these and the adapter's files are
in the fingerprint.

Source: vLLM 0.32, vllm/v1/core/kv_cache_utils.py: sha256 over canonical CBOR of (previous hash, tokens, extra keys),
full blocks only. The hash before the first block is that of a seed, $PYTHONHASHSEED or a constant.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.keys import Tokens
from kvstore_client.prompt import PageHashes

ALGORITHM = "sha256_cbor"
DEFAULT_SEED = "vllm-none-hash"
Hashed: TypeAlias = "int | str | bytes | Sequence[Hashed] | None"
"""The parts that a hash is made of."""


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    width = next(each for each in (1, 2, 4, 8) if number < 1 << 8 * each)
    return bytes([major << 5 | 23 + width.bit_length()]) + number.to_bytes(width, "big")


def _cbor(value: Hashed) -> bytes:
    """Encode the parts of a block hash as canonical CBOR (RFC 8949)."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        return _head(3, len(value.encode())) + value.encode()
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _hash(value: Hashed) -> bytes:
    return hashlib.sha256(_cbor(value)).digest()


def seed_of_process() -> str:
    """Return the seed of vLLM's hashes in a process of this environment."""
    return os.environ.get("PYTHONHASHSEED", DEFAULT_SEED)


def block_hashes(
    tokens: Sequence[int], block_tokens: int, *, salt: str | None = None, lora: tuple[str, str] | None = None,
    items: Iterable[tuple[int, int, str]] = (), seed: str = DEFAULT_SEED,
) -> list[bytes]:  # fmt: skip
    """Return vLLM's hashes of a prompt's full blocks. ``lora``: its name and path; ``items``: (first token, token
    count, identifier) of each image or sound; ``seed``: the engines' $PYTHONHASHSEED, when they have one.

    Raises: InvalidRequest.
    """
    if not isinstance(block_tokens, int) or block_tokens < 1:
        raise InvalidRequest(f"block_tokens {block_tokens!r} must be 1 or more: vLLM's --block-size")
    ordered = sorted(items)
    before, found = _hash(seed), []
    stops = range(0, len(tokens) + 1, block_tokens)
    for start, stop in pairwise(stops):
        keys: list[Hashed] = [("lora", *lora)] if lora else []
        keys += [("mm", name, at - start) for at, count, name in ordered if at < stop and start < at + count]
        keys += [("cache_salt", salt)] if salt and not start else []
        before = _hash((before, [int(each) for each in tokens[start:stop]], keys or None))
        found.append(before)
    return found


def given_hashes(
    hashes: Sequence[bytes], block_tokens: int, tokens: Tokens | None = None, seed: str = DEFAULT_SEED
) -> PageHashes:
    """Return the hashes in the form that a client takes in place of tokens."""
    return PageHashes(f"vllm-{ALGORITHM}-{_hash(seed).hex()[:8]}", block_tokens, hashes, tokens)
