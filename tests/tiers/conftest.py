"""A Redis server that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.redis_server import RedisServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def server(shared_server: RedisServer) -> Iterator[RedisServer]:
    """Empty, without a limit or passwords."""
    client = shared_server.client()
    client.flushall()
    yield shared_server
    client.config_set("maxmemory", 0)
    client.config_set("maxmemory-policy", "noeviction")
