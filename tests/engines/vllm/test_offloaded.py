"""What vLLM's offloading keeps in the sidecar, without vLLM."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_client.engines.vllm.offloaded import Offloaded
from kvstore_ops.sidecar import Sidecar

KEYS = [bytes([number]) * 36 for number in range(4)]


def test_rows_come_back_and_a_sidecar_that_is_gone_has_none(own_sidecar: Sidecar) -> None:
    rows = np.random.default_rng(0).integers(0, 255, (4, 5000), dtype=np.uint8)
    with connect(own_sidecar.address) as client:
        values = Offloaded(client, "vllm-offload/a")
        assert values.has(KEYS) == [False] * 4
        assert values.store(KEYS[:3], list(rows[:3])) == [True] * 3
        assert values.has(KEYS) == [True, True, True, False]
        target = np.zeros_like(rows)
        assert values.load(KEYS[1:], list(target[1:])) == [True, True, False]
        assert np.array_equal(target[1:3], rows[1:3])
        assert Offloaded(client, "vllm-offload/b").has(KEYS[:1]) == [False]
        own_sidecar.stop(kill=True)
        assert values.has(KEYS) == values.store(KEYS, list(rows)) == values.load(KEYS, list(target)) == [False] * 4


def test_hashes_that_collide_name_nothing(sidecar: Sidecar, caplog: pytest.LogCaptureFixture) -> None:
    row = np.ones(100, np.uint8)
    with connect(sidecar.address) as client, caplog.at_level(logging.ERROR):
        values = Offloaded(client, "vllm-offload/a")
        for _ in range(2):
            assert values.store([bytes(20)], [row]) == values.load([bytes(20)], [row]) == [False]
        assert caplog.text.count("--prefix-caching-hash-algo sha256") == 1


def test_more_keys_than_one_request_may_have(sidecar: Sidecar) -> None:
    """Nor stores at a time: vLLM's jobs have as many as they like. One is missing, where a request ends."""
    keys = [number.to_bytes(36) for number in range(600)]
    rows = [np.full(64, number % 251, np.uint8) for number in range(600)]
    with connect(sidecar.address) as client:
        values = Offloaded(client, "vllm-offload/many")
        assert all(values.store(keys[:256] + keys[257:], rows[:256] + rows[257:]))
        target = [np.full(64, 255, np.uint8) for _ in keys]
        found = values.load(keys, target)
        assert found == values.has(keys) == [number != 256 for number in range(600)]
        assert all(np.array_equal(got, row) for got, row, is_there in zip(target, rows, found, strict=True) if is_there)


def test_after_a_load_that_came_too_late_nothing_is_written(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are slow. vLLM takes the rows for free once the load has failed, and puts other blocks there."""
    keys = [bytes([number]) * 36 for number in range(8)]
    rows = np.ones((len(keys), 5000), np.uint8)
    begun = []

    def slow(target: Any, source: Any) -> None:
        begun.append(target)
        time.sleep(1.5)
        target[...] = source

    with connect(sidecar.address, timeout_s=2.0) as client:
        values = Offloaded(client, "vllm-offload/late")
        assert values.store(keys, list(rows)) == [True] * len(keys)
        target = np.zeros_like(rows)
        with monkeypatch.context() as patched:
            patched.setattr("kvstore_client.opaque.reader.np", SimpleNamespace(copyto=slow))
            assert values.load(keys, list(target)) == [False] * len(keys)
            assert 0 < len(begun) < len(keys)  # those that had begun are waited for, and no others
            target[:] = 7
            time.sleep(2.0)
        assert (target == 7).all()
