"""What somebody does who can write where copies lie: alters them, and makes every checksum anew."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import xxhash

from kvstore.chunk import Trust, strip_seeds
from kvstore.chunk.layout import ChunkLayout
from kvstore.errors import DataLoss, Unavailable
from kvstore.seams import EnvelopeKey, EnvelopeRing
from kvstore.seams.memory import Bytes
from kvstore.tiers import StoredChunk
from tests.contracts.chunks import SMALL, Chunk, chunk

TRIES = 3
IS_FULL = os.environ.get("KVSTORE_TEST_SCALE") == "full"
COUNT = 10_000 if IS_FULL else 500
BUCKET_COUNT = 10_000 if IS_FULL else 250
"""A bucket is slow."""
KEY, OLD = EnvelopeKey.derived(b"the newest key of all" * 3), EnvelopeKey.derived(b"the one before it" * 3)
STORAGE_KEY, WRITE_ID, SALT, TAG = slice(128, 160), slice(288, 304), slice(328, 344), slice(344, 360)
Attack = Callable[[np.random.Generator, Bytes, Bytes], None]
OpenChunk = Callable[[Chunk, list[Bytes]], Awaitable[StoredChunk | None]]
"""Opens a chunk that is to be read into this memory."""


def trust(kind: str, *keys: EnvelopeKey) -> Trust:
    return Trust(kind, EnvelopeRing(keys or ((KEY,) if kind != "none" else ())))


def body_at(copy: Bytes) -> int:
    return int.from_bytes(copy[12:16].tobytes(), "little")


def strips(copy: Bytes, layout: ChunkLayout = SMALL) -> list[slice]:
    start = body_at(copy)
    return [
        slice(start + at, start + at + size)
        for at, size in zip(layout.strip_offsets.tolist(), layout.strip_lengths.tolist(), strict=True)
    ]


def flip(rng: np.random.Generator, copy: Bytes, _: Bytes) -> None:
    """A bit of a strip."""
    chosen = copy[strips(copy)[rng.integers(SMALL.strip_count)]]
    chosen[rng.integers(chosen.size)] ^= 1 << rng.integers(8)


def swap(rng: np.random.Generator, copy: Bytes, _: Bytes) -> None:
    """Two strips, and their tags where there are some."""
    one, other = (strips(copy)[number] for number in rng.permutation(SMALL.strip_count)[:2].tolist())
    copy[one], copy[other] = copy[other].copy(), copy[one].copy()


def body_of_another(_: np.random.Generator, copy: Bytes, other: Bytes) -> None:
    copy[body_at(copy) :] = other[body_at(other) :]


def another_renamed(_: np.random.Generator, copy: Bytes, other: Bytes) -> None:
    """All that another chunk has, under this one's name."""
    name, write = copy[STORAGE_KEY].copy(), copy[WRITE_ID].copy()
    copy[:] = other
    copy[STORAGE_KEY], copy[WRITE_ID] = name, write


def body_and_tags_of_another(rng: np.random.Generator, copy: Bytes, other: Bytes) -> None:
    body_of_another(rng, copy, other)
    at = 384 + 32 * SMALL.strip_count
    copy[at : body_at(copy)] = other[at : body_at(other)]
    for part in (SALT, TAG):
        if rng.random() < 0.5:
            copy[part] = other[part]


def without_envelope(rng: np.random.Generator, copy: Bytes, other: Bytes) -> None:
    """As an earlier release writes it, and with bytes of the attacker's own."""
    copy[8:12] = (1, 0, 1, 0)
    copy[36:38] = 0
    copy[304:368] = 0
    copy[384 + 32 * SMALL.strip_count : body_at(copy)] = 0
    flip(rng, copy, other)


def head(rng: np.random.Generator, copy: Bytes, other: Bytes) -> None:
    """A bit of the header, and one of a strip."""
    copy[rng.integers(body_at(copy))] ^= 1 << rng.integers(8)
    if 0 < body_at(copy) < copy.size - SMALL.body_bytes + 1:
        flip(rng, copy, other)


ATTACKS: Sequence[Attack] = (
    flip, swap, body_of_another, another_renamed, body_and_tags_of_another, without_envelope, head,
)  # fmt: skip


def checked(copy: Bytes) -> Bytes:
    """With the checksums that it should have."""
    size = body_at(copy)
    if size != copy.size - SMALL.body_bytes:
        return copy
    seeds = strip_seeds(copy[STORAGE_KEY].tobytes(), SMALL, copy[WRITE_ID].tobytes())
    for number, (where, seed) in enumerate(zip(strips(copy), seeds, strict=True)):
        at = 384 + 32 * number + 16
        copy[at : at + 16] = np.frombuffer(xxhash.xxh3_128_digest(copy[where].tobytes(), seed), np.uint8)
    copy[368:384] = 0
    copy[368:384] = np.frombuffer(xxhash.xxh3_128_digest(copy[:size].tobytes()), np.uint8)
    return copy


async def attacked(
    get: Callable[[Chunk], Awaitable[Bytes]],
    put: Callable[[Chunk, Bytes], Awaitable[None]],
    open_chunk: OpenChunk,
    count: int = COUNT,
) -> Counter[str]:
    """How reads of altered copies end: "wrong" bytes, "right" ones, or a miss. ``get`` and ``put`` are the attacker's:
    header and body of the copies of two chunks of ``SMALL``'s shape."""
    rng, outcomes = np.random.default_rng(2026), Counter[str]()
    chunks = chunk(1), chunk(2)
    copies = [await get(each) for each in chunks]
    for number in range(count):
        what, own, other = chunks[number % 2], copies[number % 2], copies[1 - number % 2]
        altered = own.copy()
        ATTACKS[number % len(ATTACKS)](rng, altered, other)
        await put(what, checked(altered))
        outcomes[await outcome_of(what, open_chunk)] += 1
    print(outcomes)
    assert outcomes.total() == count
    for what, own in zip(chunks, copies, strict=True):
        await put(what, own)
        assert await outcome_of(what, open_chunk) == "right", "what nobody altered is read"
    return outcomes


async def outcome_of(what: Chunk, open_chunk: OpenChunk) -> str:
    """Return True when a read gives this chunk's bytes, others, or none. An answer that came too late is asked for
    again."""
    for _ in range(TRIES - 1):
        try:
            return await _outcome_of(what, open_chunk)
        except Unavailable:
            continue
    return await _outcome_of(what, open_chunk)


async def _outcome_of(what: Chunk, open_chunk: OpenChunk) -> str:
    target = [np.full(slab.byte_count, 0x5A, np.uint8) for slab in what.layout.slabs]
    try:
        stored = await open_chunk(what, target)
        if stored is None:
            return "miss"
        try:
            await stored.read(range(len(target)), target)
        finally:
            stored.close()
    except DataLoss:
        return "refused"
    same = all((one == other).all() for one, other in zip(target, what.pieces[1:], strict=True))
    return "right" if same else "wrong"
