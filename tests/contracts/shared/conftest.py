"""Each test of the contract runs for every kind of engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.chunk import making
from tests.contracts.shared.stands import STANDS, Stand


@pytest.fixture(params=STANDS)
def make(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Stand]:
    monkeypatch.setattr(making, "SAVES_MIN", -1.0)
    made = STANDS[request.param]
    if reason := made.cannot.get(request.node.originalname):
        pytest.skip(reason)
    return lambda **options: made(tmp_path / "shared", **options)


@pytest.fixture
def stand(make: Callable[..., Stand]) -> Stand:
    return make()
