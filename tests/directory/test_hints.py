"""Hints which prefixes are hot: read back as they were given, bounded, and never more than hints."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.directory.hints import CHAIN_COUNT_MAX, HINT_BYTES_MAX, pack_hints, unpack_hints
from kvstore.errors import DataLoss
from tests.directory.test_directory import node, server  # noqa: F401 - a fixture
from tests.fakes.redis_server import RedisServer

MODEL = bytes(32)


def digests(first: int, count: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def test_chains_come_back_with_the_runs_in_front_of_them() -> None:
    runs = [(-1, digests(0, 3)), (0, digests(10, 2)), (1, digests(20, 1)), (-1, digests(30, 1))]
    assert unpack_hints(pack_hints(runs)) == [
        digests(0, 3),
        digests(0, 3) + digests(10, 2),
        digests(0, 3) + digests(10, 2) + digests(20, 1),
        digests(30, 1),
    ]


def test_what_has_no_room_is_left_out_with_all_that_follows() -> None:
    packed = pack_hints([(-1, digests(1000 * number, 1000)) for number in range(5)])
    assert len(packed) <= HINT_BYTES_MAX
    assert len(unpack_hints(packed)) == 2


@given(st.binary(max_size=512))
def test_any_bytes_are_hints_or_refused(data: bytes) -> None:
    try:
        chains = unpack_hints(data)
    except DataLoss:
        return
    assert all(len(digest) == 32 for chain in chains for digest in chain)
    assert sum(map(len, chains)) <= CHAIN_COUNT_MAX


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<HH", 1, 1) + bytes(32),  # goes on from itself
        struct.pack("<HH", 0, 0),
        struct.pack("<HH", 0, 2) + bytes(32),
        bytes(3),
        pack_hints([(-1, digests(0, 1))]) * 2000,
        pack_hints([(-1, digests(0, 60)), *((number, digests(0, 60)) for number in range(30))])[:-1],
    ],
)
def test_what_no_node_gives_is_refused(data: bytes) -> None:
    with pytest.raises(DataLoss):
        unpack_hints(data)


async def test_the_node_that_fetches_most_is_heard(server: RedisServer) -> None:  # noqa: F811
    async with node(server, "a") as a, node(server, "b") as b, node(server, "c", owner="other") as c:
        assert await a.hints(MODEL) is None
        await a.give_hints(MODEL, 5.0, b"of a")
        await b.give_hints(MODEL, 2.0, b"of b")
        assert await b.hints(MODEL) == b"of a"
        await a.give_hints(MODEL, 1.0, b"of a, later")
        assert await b.hints(MODEL) == b"of a, later"
        await b.give_hints(MODEL, 2.0, b"of b")
        assert await a.hints(MODEL) == b"of b"
        assert await c.hints(MODEL) is None, "another tenant's"
        assert await a.hints(bytes([1]) * 32) is None, "another model's"


async def test_a_strange_value_is_no_hint(server: RedisServer) -> None:  # noqa: F811
    client = server.client()
    name = f"kvstore:v1:hot:default:{MODEL.hex()}"
    async with node(server, "a") as a:
        client.hset(name, mapping={"node": "x", "heat": "much", "runs": bytes(HINT_BYTES_MAX + 257)})
        assert await a.hints(MODEL) is None, "too long to be read"
        await a.give_hints(MODEL, 1.0, b"of a")
        assert await a.hints(MODEL) == b"of a"
        assert 0 < client.ttl(name) <= 3600
        client.set(name, b"a string")
        with pytest.raises(DataLoss):
            await a.hints(MODEL)
