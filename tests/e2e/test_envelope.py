"""Sidecars whose copies in Redis are in envelopes: what one sealed the other opens, keys change while both run, and
what somebody else put there is a miss."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from tests.e2e.test_nvme import same
from tests.fakes.redis_server import RedisServer
from tests.security.tenancy import secret_of, write_private
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
COUNT = 2 * STEP
SPEC = small_spec(chunk_tokens=STEP)
FIRST, SECOND = "the first key " * 4, "the second key " * 4


@contextmanager
def node(url: str, keys: Path, envelope: str = "") -> Iterator[tuple[Sidecar, Client]]:
    own = {
        "TENANTS__DEFAULT__SECRET_FILE": write_private(keys.with_suffix(".secret"), secret_of("a")),
        "TENANTS__DEFAULT__ENVELOPE_KEY_FILE": str(keys), "TENANTS__DEFAULT__CAPACITY_BYTES": "1 MiB",
        "TIERS__REDIS__URL": url, "TIERS__REDIS__LOOKUP_S_MAX": "1 s", "TIERS__REDIS__ENVELOPE": envelope,
        "POLICY__CANARY_INTERVAL_S": "0",
    }  # fmt: skip
    environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
    with Sidecar("--capacity", "1 MiB", "--metrics-port", "0", environment=environment) as sidecar:
        with connect(sidecar.address) as client:
            yield sidecar, client


def store(client: Client, seed: int) -> tuple[np.ndarray, Any]:
    tokens, arrays = tokens_of(COUNT, seed), random_cache(SPEC, COUNT, seed)
    client.store(SPEC, tokens, arrays).wait(10.0)
    eventually(lambda: client.stats().backlog_chunk_count == 0, 10)
    return tokens, arrays


def has(client: Client, tokens: np.ndarray, arrays: Any) -> bool:
    fetched = client.fetch(SPEC, tokens)
    return fetched.token_count == COUNT and same(fetched, arrays, COUNT)


@pytest.mark.parametrize("envelope", ["", "aead"])
def test_what_one_sealed_another_opens_and_keys_change(tmp_path: Path, envelope: str) -> None:
    keys = tmp_path / "keys"
    write_private(keys, FIRST)
    with RedisServer() as server, ExitStack() as stack:
        one, client = stack.enter_context(node(server.url, keys, envelope))
        kept = store(client, 1)
        write_private(keys, f"{SECOND}\n{FIRST}")
        os.kill(one.pid, signal.SIGHUP)
        log = one.directory / "log"
        eventually(lambda: "envelope keys were read" in log.read_text(), 10)
        later = store(client, 2)
        _, other = stack.enter_context(node(server.url, keys, envelope))
        assert client.stats().tiers[-1].envelope == (envelope or "mac")
        assert has(other, *kept)
        assert has(other, *later)
        redis: Any = server.client()
        for key in redis.keys("*:c:*"):
            fields = redis.hgetall(key)
            assert fields[b"h"][10] == 2, "it is in an envelope"
        assert "not protected" not in log.read_text()
        assert not any(text in log.read_text() for text in (FIRST.strip(), SECOND.strip()))
