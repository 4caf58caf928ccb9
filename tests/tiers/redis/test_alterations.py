"""What is stored in a Redis server is altered at random, by a seed: bits, lengths, fields, values of other chunks and
of other writes. No read ever gives a byte that is not the chunk's."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.chunk import layout_of, making
from kvstore.errors import DataLoss
from kvstore.spec import ENCODING_SETTINGS, CacheKind, LayerSpec
from kvstore.tiers.redis.names import HEADER_FIELD
from tests.contracts.chunks import SMALL, Chunk, chunk
from tests.fakes.redis_server import KEYS, RedisServer
from tests.specs import small_spec
from tests.tiers.redis.tiers import got, put, redis_tier

COUNT = 10_000 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 500
LAYER = LayerSpec(kv_heads=4, k_dim=256, v_dim=256)
CUT = layout_of(small_spec(layers=(LAYER,) * 3, chunk_tokens=500), CacheKind.KV, 500)
"""Three slabs of 2 MB: two fields."""
Fields = dict[bytes, bytes]
Alteration = Callable[[np.random.Generator, Fields, list[Fields]], Fields]


def flip(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    """One bit, of the header as often as of the body."""
    names = sorted(fields)
    name = HEADER_FIELD if rng.random() < 0.5 else names[rng.integers(len(names))]
    value = bytearray(fields[name])
    value[rng.integers(len(value))] ^= 1 << rng.integers(8)
    return {**fields, name: bytes(value)}


def shorten(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    name = sorted(fields)[rng.integers(len(fields))]
    return {**fields, name: fields[name][: rng.integers(len(fields[name]))]}


def lengthen(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    name = sorted(fields)[rng.integers(len(fields))]
    return {**fields, name: fields[name] + rng.bytes(rng.integers(1, 5000))}


def lose(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    name = sorted(fields)[rng.integers(len(fields))]
    return {other: value for other, value in fields.items() if other != name}


def rename(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    """A field under a name that it has not."""
    name = sorted(fields)[rng.integers(len(fields))]
    return {(other + b"0" if other == name else other): value for other, value in fields.items()}


def turn(rng: np.random.Generator, fields: Fields, _: list[Fields]) -> Fields:
    """A part of a field in another place of it."""
    name = sorted(fields)[rng.integers(len(fields))]
    by = int(rng.integers(1, len(fields[name])))
    return {**fields, name: fields[name][by:] + fields[name][:by]}


def swap(rng: np.random.Generator, fields: Fields, others: list[Fields]) -> Fields:
    """All that another chunk, or another write of this one, has."""
    return others[rng.integers(len(others))]


def graft(rng: np.random.Generator, fields: Fields, others: list[Fields]) -> Fields:
    """One field's value of another chunk or write, under this one's name."""
    other = others[rng.integers(len(others))]
    number = rng.integers(min(len(fields), len(other)))
    return {**fields, sorted(fields)[number]: other[sorted(other)[number]]}


ALTERATIONS: list[Alteration] = [flip, flip, shorten, lengthen, lose, rename, turn, swap, graft]


@pytest.mark.parametrize("encoding", ENCODING_SETTINGS)
async def test_no_alteration_gives_a_wrong_byte(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    rng, outcomes = np.random.default_rng(2026), Counter[str]()
    with RedisServer() as server:
        client: Any = server.client()
        async with redis_tier(server.url, encoding=encoding) as tier:
            kinds: list[tuple[Chunk, Fields]] = []
            for what in (chunk(1), chunk(2), chunk(1, write=1), chunk(1, CUT), chunk(2, CUT), chunk(1, CUT, write=1)):
                await put(tier, what)
                kinds.append((what, client.hgetall(KEYS.chunk(what.header.storage_key))))
            for number in range(COUNT):
                small = number % 10 != 0
                same = [each for each in kinds if (each[0].layout is SMALL) == small]
                what, fields = same[number % 2]
                others = [each for other, each in kinds if other is not what]
                alter = ALTERATIONS[rng.integers(len(ALTERATIONS))]
                altered = alter(rng, fields, others)
                if altered == fields:
                    outcomes["no alteration"] += 2
                    continue
                key = KEYS.chunk(what.header.storage_key)
                client.delete(key)
                if altered:
                    client.hset(key, mapping=altered)
                for name in (what.name, what.any_write):
                    try:
                        outcome = "given" if await got(tier, what, name) else "miss"
                    except DataLoss as error:
                        outcome = str(error.fields["reason"])
                    except AssertionError:
                        # Another write of the chunk, whole, is right where any write is wanted.
                        assert name.mark is None, f"alteration {number}, {alter.__name__}"
                        assert altered in others
                        outcome = "another write"
                    outcomes[outcome] += 1
    print(outcomes)
    assert outcomes.total() == 2 * COUNT, "each is read under two names"
    assert outcomes["another write"]
    assert outcomes["given"] < COUNT * 0.1, "only what hit nothing, between two strips, may be given"
    assert {"checksum", "header", "length", "gone", "write id"} <= set(outcomes), outcomes
