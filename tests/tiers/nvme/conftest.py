"""A service over a device."""

from __future__ import annotations

import pytest

from tests.tiers.service import DeviceService


@pytest.fixture
def service() -> DeviceService:
    return DeviceService(arena_chunks=32)
