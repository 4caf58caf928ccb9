"""A stand's bucket on a server that outlives the tests."""

from __future__ import annotations

import pytest

from tests.contracts.shared.s3_stand import new_server
from tests.fakes.s3_server import ENDPOINT, S3Server

pytestmark = pytest.mark.s3


def test_stands_find_nothing_of_an_earlier_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = S3Server()
    monkeypatch.setenv(ENDPOINT, kept.url)
    try:
        kept.put("stand-1/of an earlier run", b"1")
        kept.put("another's", b"1")
        new_server()
        assert kept.keys("stand-") == []
        assert kept.keys("another") == ["another's"]
    finally:
        kept.drop("another's")
        kept.stop()
