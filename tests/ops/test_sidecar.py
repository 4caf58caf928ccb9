"""A sidecar of one's own: one that does not get ready is said, and is not left behind."""

from __future__ import annotations

import pytest
from kvstore_ops import sidecar as own
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable


def test_one_that_cannot_start_is_quoted() -> None:
    sidecar = Sidecar("--capacity", "much")
    with pytest.raises(Unavailable, match=r"arena\.capacity_bytes"):
        sidecar.start()
    assert sidecar.process is None


def test_one_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "START_TIMEOUT_S", 0.0)
    sidecar = Sidecar("--capacity", "16 MiB")
    with pytest.raises(Unavailable, match="did not start"):
        sidecar.start()
    assert sidecar.process is None
