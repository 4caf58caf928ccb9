"""Each test of the contract runs for every local tier, wrapper and fake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contracts.local.stands import STANDS, Stand


@pytest.fixture(params=STANDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Stand]:
    return lambda **options: STANDS[request.param](tmp_path / "nvme", **options)


@pytest.fixture
def stand(make: Callable[..., Stand]) -> Stand:
    return make()
