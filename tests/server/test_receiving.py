"""The runs of a message with data: whole strips, and together the bytes that came, no more and no fewer."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidRequest
from kvstore.remote.receiving import _check_runs
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT


@pytest.mark.parametrize(
    ("runs", "byte_count"),
    [
        ([], 0),
        ([(1, ALIGNMENT)], 2 * ALIGNMENT),
        ([(1, 2 * ALIGNMENT)], ALIGNMENT),
        ([(0, ALIGNMENT)], ALIGNMENT),
        ([(2, ALIGNMENT)], ALIGNMENT),
        ([(1, 2 * ALIGNMENT), (2, ALIGNMENT)], 3 * ALIGNMENT),
        ([(1, 0), (1, 2 * ALIGNMENT)], 2 * ALIGNMENT),
    ],
)
def test_runs_that_are_not_a_messages_bytes_are_refused(runs: list[tuple[int, int]], byte_count: int) -> None:
    """A run that is too short would be filled from what lies behind it."""
    _check_runs([rpb.StripRun(strip_count=1, byte_count=ALIGNMENT)], ALIGNMENT)
    with pytest.raises(InvalidRequest, match="runs"):
        _check_runs([rpb.StripRun(strip_count=strips, byte_count=size) for strips, size in runs], byte_count)
