"""What a client's machine refuses it, memory and mappings, costs it that call: nothing of it is lost for the next."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kvstore_client import Durability, connect
from kvstore_client.planes.shared_memory.staging import StagingPool
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, Unavailable
from kvstore.seams import mapping
from kvstore.seams.mapping import HUGE_BYTES, SharedMap
from tests.descriptors import open_files
from tests.specs import random_cache, small_spec, tokens_of

COUNT = 64


class Grant:
    """A session that grants segments; the machine has pages for a part of them."""

    def __init__(self, backed_bytes_max: int) -> None:
        self.backed_bytes_max = backed_bytes_max

    def create_staging(self, byte_count: int) -> tuple[int, SharedMap]:
        descriptor = os.memfd_create("test")
        os.ftruncate(descriptor, byte_count)
        memory = SharedMap(descriptor, byte_count, writable=True)
        os.close(descriptor)

        def back(offset: int, size: int) -> None:
            if offset + size > self.backed_bytes_max:
                raise Exhausted("no memory")

        memory.back = back  # type: ignore[method-assign]
        return 1, memory


def test_a_run_that_finds_no_memory_is_there_when_memory_is() -> None:
    grant: Any = Grant(HUGE_BYTES)
    pool = StagingPool(grant)
    first = pool.take(HUGE_BYTES, 2 * HUGE_BYTES)
    for _ in range(3):
        with pytest.raises(Exhausted):
            pool.take(HUGE_BYTES, HUGE_BYTES)
    grant.backed_bytes_max = 2 * HUGE_BYTES
    second = pool.take(HUGE_BYTES, HUGE_BYTES)
    assert first is not None
    assert second is not None
    assert (first.offset, second.offset) == (0, HUGE_BYTES)


def test_a_store_that_finds_no_memory_gives_its_staging_back(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cache, take, taken, given = small_spec(), random_cache(small_spec(), COUNT), StagingPool.take, [], []

    def refuse(pool: StagingPool, byte_count: int, expected_bytes: int) -> Any:
        if len(taken) == 3:
            raise Exhausted("no memory")
        taken.append(take(pool, byte_count, expected_bytes))
        return taken[-1]

    with connect(local_sidecar.address) as client:
        give_back = StagingPool.give_back
        with monkeypatch.context() as patch:
            patch.setattr(StagingPool, "take", refuse)
            patch.setattr(StagingPool, "give_back", lambda pool, run: (given.append(run), give_back(pool, run)))
            assert client.store(spec, tokens_of(COUNT), cache).wait() is Durability.NONE
        assert len(taken) == 3
        assert [(run.staging_id, run.offset) for run in given] == [(run.staging_id, run.offset) for run in taken]
        assert client.store(spec, tokens_of(COUNT), cache).wait() is not Durability.NONE


@pytest.mark.parametrize("refused", [1, 2])
def test_a_client_that_may_not_map_fails_with_a_reason_and_keeps_no_descriptor(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    spec, calls, there = small_spec(), [], mapping._map
    with connect(local_sidecar.address) as client:  # so that there is a region to hand over
        client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait()

    def refuse(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == refused:
            raise OSError(12, "Cannot allocate memory")
        return there(*arguments)

    def memory() -> list[str]:
        return [name for name in open_files() if "kvstore-" in name]

    before = memory()
    monkeypatch.setattr(mapping, "_map", refuse)
    with pytest.raises(Unavailable, match="ulimit"):
        connect(local_sidecar.address)
    assert memory() == before


def test_staging_that_cannot_be_mapped_is_no_part_of_the_budget(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, there = small_spec(), mapping._map

    def refuse(descriptor: int, byte_count: int, protection: int) -> int:
        raise OSError(12, "Cannot allocate memory")

    with connect(local_sidecar.address) as client:
        client.lookup(spec, tokens_of(COUNT))
        monkeypatch.setattr(mapping, "_map", refuse)
        for _ in range(12):  # 64 MiB each, of 512
            receipt = client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT))
            assert receipt.wait() is Durability.NONE
        monkeypatch.setattr(mapping, "_map", there)
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE


def test_an_interrupt_while_staging_is_asked_for_leaves_no_answer_for_the_next(
    local_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook, and the next store asks for more."""
    spec = small_spec()

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with connect(local_sidecar.address) as client:
        client.lookup(spec, tokens_of(COUNT))
        session: Any = client._context.connection.session()
        with monkeypatch.context() as patch:
            patch.setattr(session._arrived, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.create_staging(4096)
        session = client._context.connection.session()
        _, memory = session.create_staging(1 << 20)
        memory.back(0, 1 << 20)  # raises where less came
        assert client.store(spec, tokens_of(COUNT), random_cache(spec, COUNT)).wait() is not Durability.NONE
