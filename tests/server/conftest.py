"""A fixture of the tests that long calls let others run in between."""

from __future__ import annotations

import pytest

from kvstore.seams import Pauses


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """An entry for each pause that could be made."""
    found: list[None] = []

    async def between(_: Pauses) -> None:
        found.append(None)

    monkeypatch.setattr(Pauses, "between", between)
    return found
