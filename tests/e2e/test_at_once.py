"""A store whose caller names a level: its first chunks are durable while the others are still copied."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kvstore_client import Client, Durability, connect
from kvstore_client.planes.shared_memory import store as uploads
from kvstore_client.planes.shared_memory.store import StagedUpload
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal
from kvstore.spec import MissReason
from kvstore.units import PAGE_BYTES
from tests.e2e.test_nvme import same
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
COUNT = 100
"""Six chunks of 16 tokens, and a part of one."""
STAGING_BYTES = 5 * PAGE_BYTES
"""Room for two chunks."""


@pytest.fixture(autouse=True)
def _every_chunk_is_sent_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "AHEAD_BYTES", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)


def before_each_copy(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Call ``act`` with the number of the batch that is to be copied."""
    copy, counted = StagedUpload._copy_batch, iter(range(1000))

    def copied(self: StagedUpload, batch: Any) -> None:
        act(next(counted))
        copy(self, batch)

    monkeypatch.setattr(StagedUpload, "_copy_batch", copied)


def stored(client: Client, seed: int, durability: Durability | None) -> Any:
    return client.store(SPEC, tokens_of(COUNT, seed), random_cache(SPEC, COUNT, seed), durability=durability)


def test_the_device_has_the_first_chunk_while_the_client_still_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar, connect(sidecar.address) as client:
        seen: list[int] = []

        def look(number: int) -> None:
            if number == 1:
                eventually(lambda: client.stats().tiers[0].chunk_count >= 1)
            seen.append(number)

        before_each_copy(monkeypatch, look)
        receipt = stored(client, 1, Durability.LOCAL)
        assert receipt.wait(10.0) is Durability.LOCAL
        assert receipt.stored_token_count == COUNT
        assert len(seen) > 2
        fetched = client.fetch(SPEC, tokens_of(COUNT, 1), verify=True)
        assert same(fetched, random_cache(SPEC, COUNT, 1), COUNT)
        for processors, level in ((3, None), (3, Durability.MEMORY), (2, Durability.LOCAL)):
            seen.clear()
            monkeypatch.setattr(os, "cpu_count", lambda count=processors: count)
            stored(client, 2 + processors + bool(level), level).wait(10.0)
            assert len(seen) == 1, "the caller has the processors to himself"


def test_staging_that_runs_short_is_used_again_and_every_byte_is_right() -> None:
    settings = {**os.environ, "KVSTORE__LIMITS__STAGING_BYTES_MAX": str(STAGING_BYTES)}
    with (
        Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment=settings) as sidecar,
        connect(sidecar.address) as client,
    ):
        for seed in range(8):
            receipt = stored(client, seed, Durability.LOCAL)
            assert receipt.wait(10.0) is Durability.LOCAL, receipt.reason
            assert receipt.stored_token_count == COUNT
        for seed in range(8):
            fetched = client.fetch(SPEC, tokens_of(COUNT, seed), verify=True)
            assert (fetched.token_count, fetched.reason) == (COUNT, MissReason.NONE)
            assert same(fetched, random_cache(SPEC, COUNT, seed), COUNT)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_store_whose_later_copies_fail_keeps_what_was_sent_and_nothing_else(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def fail(number: int) -> None:
        if number == failing:
            raise Internal("a copy failed")

    with connect(local_sidecar.address) as client:
        with monkeypatch.context() as patch:
            before_each_copy(patch, fail)
            with pytest.raises(Internal):
                stored(client, 1, Durability.LOCAL)
        assert client.connect_now().staging.used_bytes == 0
        assert client.lookup(SPEC, tokens_of(COUNT, 1)).prefix_token_count <= failing * SPEC.chunk_tokens
        receipt = stored(client, 1, Durability.LOCAL)
        assert receipt.stored_token_count == COUNT, receipt.reason
        fetched = client.fetch(SPEC, tokens_of(COUNT, 1), verify=True)
        assert same(fetched, random_cache(SPEC, COUNT, 1), COUNT)
