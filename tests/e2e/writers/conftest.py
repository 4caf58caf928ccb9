"""A client of which nothing is left behind."""

from __future__ import annotations

import time
from typing import Any

import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from tests.e2e.writers.prompts import left
from tests.server.raw import TIMEOUT_S


@pytest.fixture
def client(sidecar: Sidecar) -> Any:
    with connect(sidecar.address) as connected:
        yield connected
        until = time.monotonic() + TIMEOUT_S
        while left(connected) and time.monotonic() < until:  # an abort runs beside its caller
            time.sleep(0.01)
        assert left(connected) == 0
