"""A store whose caller names a level: its first chunks are durable while the others are still copied."""

from __future__ import annotations

import os
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from kvstore_client import Client, Durability, connect
from kvstore_client.copying import Copier
from kvstore_client.planes.shared_memory import store as uploads
from kvstore_client.planes.shared_memory.store import StagedUpload
from kvstore_client.planes.store import StagingRun, Unit, units_of
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Internal, InvalidRequest
from kvstore.spec import MissReason, StoreState
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
        for seed, (processors, level) in enumerate(((3, None), (3, Durability.MEMORY), (2, Durability.LOCAL)), 2):
            seen.clear()
            monkeypatch.setattr(os, "cpu_count", lambda count=processors: count)
            stored(client, seed, level).wait(10.0)
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


@pytest.mark.parametrize("staging_bytes", [STAGING_BYTES, 1 << 20], ids=["fill", "commit"])
def test_a_store_of_which_a_call_was_refused_keeps_nothing_more_and_says_why(
    monkeypatch: pytest.MonkeyPatch, staging_bytes: int
) -> None:
    send = StagedUpload._send_ahead
    settings = {**os.environ, "KVSTORE__LIMITS__STAGING_BYTES_MAX": str(staging_bytes)}
    with (
        Sidecar("--capacity", "32 MiB", nvme="64 MiB", environment=settings) as sidecar,
        connect(sidecar.address) as client,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(StagedUpload, "_send_ahead", lambda self, _, batch: send(self, 999, batch))
            if staging_bytes == STAGING_BYTES:
                with pytest.raises(InvalidRequest, match="no reservation 999"):
                    stored(client, 1, Durability.LOCAL)
            else:
                receipt = stored(client, 1, Durability.LOCAL)
                assert receipt.wait(10.0) is Durability.NONE
                assert "no reservation 999" in receipt.reason
        assert client.connect_now().staging.used_bytes == 0
        assert client.stats().arena.reserved_bytes == 0
        assert client.lookup(SPEC, tokens_of(COUNT, 1)).prefix_token_count == 0
        assert stored(client, 1, Durability.LOCAL).wait(10.0) is Durability.LOCAL
        assert same(client.fetch(SPEC, tokens_of(COUNT, 1), verify=True), random_cache(SPEC, COUNT, 1), COUNT)


# ---------------------------------------------------------------- without a sidecar


class Pool:
    """Staging without an end, and the runs that were taken."""

    def __init__(self) -> None:
        self.runs: list[StagingRun] = []

    def take(self, byte_count: int, expected_bytes: int) -> StagingRun:
        self.runs.append(StagingRun(1, len(self.runs), byte_count, None))  # type: ignore[arg-type]  # nothing is copied there
        return self.runs[-1]


def upload_of(chunk_count: int) -> tuple[StagedUpload, Pool, list[Unit]]:
    """An upload that copies nothing and tells nobody."""
    pool = Pool()
    source: Any = SimpleNamespace(spec=SPEC, hidden_layers=(), token_count=chunk_count * SPEC.chunk_tokens)
    session: Any = SimpleNamespace(staging=pool, cache=SimpleNamespace(Store=None), begin=lambda *_: None)
    upload = StagedUpload(session, source, Copier(), 1.0)
    upload._copy_batch = lambda batch: None  # type: ignore[method-assign]  # no bytes
    return upload, pool, units_of(source, [StoreState.WANTED] * chunk_count)


def test_wherever_a_caller_is_interrupted_each_run_is_given_back_once() -> None:
    for line in range(1, 100):
        upload, pool, units = upload_of(3)
        left = line

        def interrupt(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code is not StagedUpload._send_ahead.__code__:
                return None
            left -= event == "line"
            if not left:
                raise KeyboardInterrupt
            return interrupt

        tracing = sys.gettrace()
        sys.settrace(interrupt)
        try:
            upload.put(1, units, at_once=True)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        assert sorted(upload.stop()) == sorted(pool.runs), line
        if left > 0:
            break
    assert line > 3, "it was interrupted nowhere"


@pytest.mark.parametrize("at_once", [False, True])
def test_a_long_store_is_staged_in_a_time_that_grows_as_it_does(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    count, asked, size = 1000, [0], Unit.byte_count
    upload, _, units = upload_of(count)
    monkeypatch.setattr(uploads, "AHEAD_BYTES", 1 << 40)

    def counted(unit: Unit) -> int:
        asked[0] += 1
        return int(size.fget(unit))  # type: ignore[attr-defined]  # to mypy it is an int

    monkeypatch.setattr(Unit, "byte_count", property(counted))
    upload.put(1, units, at_once=at_once)
    assert asked[0] <= 10 * count
