"""A real S3 server behind a line that can answer wrongly, as a stand of ``test_shared_tier``."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvstore.chunk import Trust
from kvstore.config import S3Settings
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.tiers import SharedTier
from kvstore.tiers.s3 import Lanes, S3Tier
from kvstore.tiers.s3.objects import object_key
from tests.contracts.shared.real import run_real
from tests.fakes.s3_proxy import S3Proxy
from tests.fakes.s3_server import S3Server

STANDS = "stand-"
"""The prefixes of all stands begin so."""


def new_server() -> S3Server:
    """Start a server, or take the one that is named, whose bucket may have what an earlier run of the tests stored."""
    found = S3Server()
    found.drop(STANDS)
    return found


@cache
def server() -> S3Server:
    """One for all stands of this process."""
    found = new_server()
    atexit.register(found.stop)
    return found


def tier_of(settings: S3Settings, trust: Trust | None = None) -> S3Tier:
    """A node's way to a bucket, by threads of this process."""
    lanes = Lanes(*(WorkerThreads(count, f"s3-{name}") for name, count in LANES))
    return S3Tier(settings, lanes, SystemClock(), trust)


NUMBERS = itertools.count(1)
LANES = (("read", 4), ("write", 2), ("ask", 2), ("near", 1))


class S3Stand:
    """Two nodes that reach a bucket by the same line."""

    encoding = "raw"
    evicts = False
    replaces = False
    keeps_claims = False
    """A bucket has no place for them; tests/tiers/shared/test_claims.py has a Redis beside one."""
    is_timed = False
    """Its clock is the machine's own."""
    cannot: ClassVar[dict[str, str]] = {
        "test_a_full_engine_drops_others_or_says_so": "a bucket has no size; tiers/s3/test_limits.py has limits",
        "test_what_is_used_elsewhere_is_not_dropped_first": "a bucket drops nothing",
    }

    def __init__(self, home: Path) -> None:
        self.server = server()
        self.switches = S3Proxy(self.server.url)
        prefix = f"{STANDS}{next(NUMBERS)}"
        self.settings = S3Settings(
            bucket=self.server.bucket, prefix=prefix, endpoint_url=self.switches.url, chunk_bytes_min=0,
            addressing="path", range_bytes=8192, timeout_s=3.0, encoding=self.encoding,
        )  # fmt: skip
        self.tier, self.other = self.node(), self.node()

    def node(self) -> SharedTier:
        return tier_of(self.settings)

    def drop_all(self) -> None:
        self.server.drop(f"{self.settings.prefix}/")

    def flip(self, key: bytes, offset: int) -> None:
        data = bytearray(self.server.get(object_key(self.settings, key)))
        data[offset] ^= 1
        self.put(key, bytes(data))

    def put(self, key: bytes, data: bytes) -> None:
        self.server.put(object_key(self.settings, key), data)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        run_real(self, scenario, self.switches)


class EncodedS3Stand(S3Stand):
    """Its chunks are encoded, also where that saves nothing."""

    encoding = "lz4"
