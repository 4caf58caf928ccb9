"""An engine, and two nodes beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiers.shared.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
