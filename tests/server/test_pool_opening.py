"""The pool on a device is opened in time, or the service runs without it."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.seams import SystemMemory
from kvstore.seams.devices import HostDevice
from kvstore.server import tenant
from kvstore.tiers.hbm import HbmTier, Pool
from tests.server.raw import eventually
from tests.simulated import InlineWorkers


def test_a_driver_that_does_not_answer_costs_the_pool_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, opened, said = threading.Event(), [], list[str]()

    def build(*_: Any) -> HbmTier:
        answers.wait(10)
        memory = SystemMemory()
        opened.append(HbmTier(Pool(HostDevice(memory), memory, 1 << 20), InlineWorkers()))
        return opened[0]

    monkeypatch.setattr(tenant, "HBM_OPENING_S_MAX", 0.05)
    one = tenant.Tenant.__new__(tenant.Tenant)
    one._tiers = SimpleNamespace(hbm=SimpleNamespace(name="hbm", setting="tiers.hbm.device", build=build))
    one.settings = SimpleNamespace(tiers=SimpleNamespace(hbm=SimpleNamespace(capacity_bytes=1 << 20)))
    one._parts = SimpleNamespace(movement=SimpleNamespace(absent=said))
    one._world = one._owner = None
    asyncio.run(one._attach_hbm())
    assert "did not answer" in said[0]
    assert "tiers.hbm.device" in said[0]
    answers.set()
    eventually(lambda: opened and opened[0].pool.region.descriptor < 0)
