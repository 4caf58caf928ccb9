"""What becomes of a call of the remote plane that ends in an error."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvstore.remote.boundary import guarded
from kvstore.telemetry import Counters


async def test_a_client_that_went_while_it_was_written_to_is_no_failure_of_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """gRPC fails the write, and cancels the call a moment later."""

    async def sent(_request: Any, _context: Any) -> None:
        raise grpc.aio.InternalError("Failed to send")

    counters = Counters()
    with pytest.raises(asyncio.CancelledError):
        await guarded(sent, "FetchBytes", counters, lambda: None)(b"", None)
    assert not caplog.records
    assert not counters.snapshot().get("requests_failed")
