"""Many values of several chunks at once: pages of engines whose pages are large."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import pytest
from kvstore_client import Durability, connect
from kvstore_client.opaque.reader import BATCH, Reader
from kvstore_client.opaque.value import Key
from kvstore_ops.operators.calls import Operator
from kvstore_ops.sidecar import Sidecar

from kvstore.v1alpha import admin_pb2
from tests.e2e.test_bytes import MOST, noise


def test_many_in_parts_of_which_one_lost_a_part() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__LEASED_BYTES_MAX": "6 MiB"}  # one large chunk at a time, and not two
    with Sidecar("--capacity", "48 MiB", environment=environment) as sidecar, connect(sidecar.address) as client:
        keys = [f"page-{number}" for number in range(6)]
        sizes = [MOST + 50_000] * 4 + [1000, MOST + 200_000]
        assert (
            client.put_each("n", keys[:5], [noise(size, number) for number, size in enumerate(sizes[:5])]) == [True] * 5
        )
        assert client.exists("n", keys) == [True] * 5 + [False]
        sizes[3] -= 1  # of another size than its reader thinks
        targets = [np.zeros(size, np.uint8) for size in sizes]
        assert client.get_each("n", keys, targets) == [True, True, True, False, True, False]
        for number in (0, 1, 2, 4):
            assert (targets[number] == noise(sizes[number], number)).all()
        assert client.put_bytes("n", keys[5], noise(sizes[5], 5)).wait(10) is Durability.MEMORY
        part = admin_pb2.Selection(byte_count_min=150_000, byte_count_max=300_000)  # the last part of the last one
        done = [*Operator(client).change(admin_pb2.ChangeRequest(selection=part, evict=admin_pb2.Evict()))]
        assert done[-1].done_count == 1
        assert client.get_each("n", keys[4:], targets[4:]) == [True, False]
        assert client.count_leading("n", keys) == 5


@pytest.mark.parametrize("plane", ["local", "remote"])
@pytest.mark.parametrize("size", [MOST + 50_000, MOST])
def test_more_than_memory_has_room_for_come_from_the_device(plane: str, size: int) -> None:
    with Sidecar("--capacity", "24 MiB", nvme="256 MiB", plane=plane) as sidecar, connect(sidecar.address) as client:
        keys = [f"page-{number}" for number in range(10)]
        for number, key in enumerate(keys):
            receipt = client.put_bytes("n", key, noise(size, number), durability=Durability.LOCAL)
            assert receipt.wait(30) is Durability.LOCAL, receipt.reason
        targets = [np.zeros(size, np.uint8) for _ in keys]
        assert client.get_each("n", [*keys, "none"], [*targets, np.zeros(size, np.uint8)]) == [True] * 10 + [False]
        assert all((each == noise(size, number)).all() for number, each in enumerate(targets))


def test_a_value_larger_than_a_session_may_lease_is_read_in_runs(plane: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is replaced: all of one put."""
    environment = {**os.environ, "KVSTORE__LIMITS__LEASED_BYTES_MAX": "10 MiB"}  # two large chunks at a time
    with Sidecar("--capacity", "96 MiB", plane=plane, environment=environment) as sidecar:
        with connect(sidecar.address) as client, connect(sidecar.address) as other:
            old, new, opened = noise(4 * MOST, 1), noise(4 * MOST, 2), Reader._open
            assert client.put_bytes("n", "key", old).wait(20) is Durability.MEMORY
            found, place = client.get_bytes("n", "key", verify=True), bytearray(old.size)
            assert found is not None
            assert (found == old).all()
            assert client.get_bytes("n", "key", into=place) is not None
            assert (np.frombuffer(place, np.uint8) == old).all()
            steps: list[int] = []

            def replaced(reader: Reader, digests: list[bytes]) -> Any:
                steps.append(len(digests))
                if len(steps) == replaced_at:
                    assert other.put_bytes("n", "key", new).wait(20) is Durability.MEMORY
                return opened(reader, digests)

            monkeypatch.setattr(Reader, "_open", replaced)
            for replaced_at in range(1, 6):
                steps.clear()
                assert client.put_bytes("n", "key", old).wait(20) is Durability.MEMORY
                found = client.get_bytes("n", "key")
                assert found is not None
                assert len(steps) >= replaced_at
                assert any((found == each).all() for each in (old, new)), replaced_at


@pytest.mark.parametrize("byte_count", [1, 5 << 20])
def test_values_for_a_sidecar_that_stands_still_wait_for_one_call(own_sidecar: Sidecar, byte_count: int) -> None:
    """Large ones are asked for first."""
    value = bytes(byte_count)
    with connect(own_sidecar.address, timeout_s=1.0) as client:
        assert client.put_each("n", ["first"], [value]) == [True]
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            assert client.put_each("n", list("abcdefgh"), [value] * 8) == [False] * 8
            took_s = time.monotonic() - began_s
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        assert took_s < 1.8, "one call's timeout"


def test_a_prompt_of_which_nothing_is_there_is_not_digested_to_its_end(
    own_sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asks for all pages of a prompt at once, and a page may be one token."""
    keys, there = [f"page-{number}" for number in range(5000)], BATCH + 44  # they end within the second question
    digested, of = list[str | bytes](), Key.of
    with connect(own_sidecar.address) as client:
        assert client.put_each("n", keys[:there], [b"x"] * there) == [True] * there
        monkeypatch.setattr(Key, "of", lambda key: digested.append(key) or of(key))
        assert client.count_leading("n", keys) == there
        assert len(digested) <= there + BATCH
        digested.clear()
        assert client.count_leading("n", keys[there:]) == 0
        assert len(digested) <= BATCH


def test_so_many_large_chunks_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, opened = list[int](), Reader._open

    def noting(reader: Reader, digests: list[bytes]) -> Any:
        asked.append(len(digests))
        return opened(reader, digests)

    monkeypatch.setattr("kvstore_client.opaque.reader.LARGE_BATCH", 2)
    monkeypatch.setattr(Reader, "_open", noting)
    with Sidecar("--capacity", "48 MiB") as sidecar, connect(sidecar.address) as client:
        keys, size = [f"page-{number}" for number in range(5)], MOST + 50_000
        assert all(client.put_each("n", keys, [noise(size, number) for number in range(5)]))
        asked.clear()
        targets = [np.zeros(size, np.uint8) for _ in keys]
        assert all(client.get_each("n", keys, targets))
        assert asked == [2, 2, 1] * 2
        assert all((each == noise(size, number)).all() for number, each in enumerate(targets))


def test_what_was_replaced_goes_before_what_is_still_of_use() -> None:
    """The chunks behind a value's first have names of their own: nothing but eviction removes them."""
    with Sidecar("--capacity", "48 MiB") as sidecar, connect(sidecar.address) as client:
        assert client.put_bytes("n", "old", noise(3 * MOST)).wait(20) is Durability.MEMORY
        for number in range(5):
            assert client.put_bytes("n", "changes", noise(3 * MOST, number)).wait(20) is Durability.MEMORY
        for key, seed in (("old", 0), ("changes", 4)):
            found = client.get_bytes("n", key)
            assert found is not None
            assert (found == noise(3 * MOST, seed)).all()
