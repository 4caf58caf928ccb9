"""A real Redis server behind a line that can fail, as a stand of ``test_shared_tier``."""

from __future__ import annotations

import atexit
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.config import RedisSettings
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.tiers import SharedTier
from kvstore.tiers.redis.names import HEADER_FIELD, MARK_BYTES, field_name, fields_of
from kvstore.tiers.redis.tier import RedisTier
from tests.contracts.chunks import SMALL
from tests.contracts.shared.real import run_real
from tests.fakes import Switch
from tests.fakes.proxy import Proxy
from tests.fakes.redis_server import KEYS, NO_OTHER, RedisServer, body_fields, other_binary

WRITE_ID_AT = 288
LOOKS = "tests/tiers/redis/test_engine.py has a real engine do that"


@cache
def server(program: Path | None = None) -> RedisServer:
    """One of a kind for all stands of this process."""
    found = RedisServer(program=program)
    atexit.register(found.close)
    return found


class LineSwitches:
    """What a line can do wrong, by the names that fakes have for it."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def turn_on(self, *switches: Switch) -> None:
        """These, and no others."""
        self._proxy.mend()
        for switch in switches:
            if switch is Switch.AWAY:
                self._proxy.cut()
            else:
                assert switch is Switch.STALLED
                self._proxy.is_silent = True

    def turn_off(self) -> None:
        self._proxy.mend()


class RedisStand:
    """Two nodes that reach a server by the same line."""

    encoding = "raw"
    evicts = True
    replaces = True
    keeps_claims = True
    is_timed = False
    """Its clock is the machine's own."""
    cannot: ClassVar[dict[str, str]] = {
        "test_a_full_engine_drops_others_or_says_so": f"a server's own memory counts, too: {LOOKS}",
        "test_what_is_used_elsewhere_is_not_dropped_first": f"a server's own memory counts, too: {LOOKS}",
        "test_a_hint_that_lies_changes_no_read": f"a server does not lie when it is told to: {LOOKS}",
    }

    program: Path | None = None
    """None: that of all tests."""

    def __init__(self, home: Path) -> None:
        self._engine = server(self.program)
        self._engine.client().flushall()
        self._proxy = Proxy(self._engine.path)
        self.switches = LineSwitches(self._proxy)
        self.tier, self.other = self.node(), self.node()

    def node(self) -> SharedTier:
        host, port = self._proxy.address
        return RedisTier(
            RedisSettings(url=f"redis://{host}:{port}", encoding=self.encoding), readers=WorkerThreads(2, "redis-read"),
            writers=WorkerThreads(2, "redis-write"), clock=SystemClock(),
        )  # fmt: skip

    def drop_all(self) -> None:
        self._engine.client().flushall()

    def flip(self, key: bytes, offset: int) -> None:
        client, at = self._engine.client(), KEYS.chunk(key)
        names = [HEADER_FIELD, *body_fields(client, key)]
        for name in names:
            value = bytearray(client.hget(at, name))
            if offset < len(value):
                value[offset] ^= 1
                client.hset(at, name, bytes(value))
                return
            offset -= len(value)
        raise AssertionError("there are no such bytes")

    def put(self, key: bytes, data: bytes) -> None:
        """A chunk of SMALL's shape, as far as there is data; its fields are named by its header's write."""
        client, at = self._engine.client(), KEYS.chunk(key)
        client.delete(at)
        client.hset(at, HEADER_FIELD, data[: SMALL.header_bytes])
        write_id = data[WRITE_ID_AT : WRITE_ID_AT + MARK_BYTES].ljust(MARK_BYTES)
        for number, span in enumerate(fields_of(SMALL)):
            if piece := data[SMALL.header_bytes :][span.start : span.stop]:
                client.hset(at, field_name(write_id, number), piece)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run_real(self, scenario, self._proxy)


class OtherRedisStand(RedisStand):
    """The same over another server of this machine."""

    def __init__(self, home: Path) -> None:
        self.program = other_binary()
        if self.program is None:
            pytest.skip(NO_OTHER)
        super().__init__(home)


class EncodedRedisStand(RedisStand):
    """Its chunks are encoded, also where that saves nothing."""

    encoding = "lz4"
