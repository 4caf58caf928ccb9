"""What vLLM's offloading keeps in the sidecar, without vLLM."""

from __future__ import annotations

import logging

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
