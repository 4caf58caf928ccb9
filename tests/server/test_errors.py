"""Every error has one status, and every status comes back as an error."""

from __future__ import annotations

import grpc
import pytest
from kvstore_client.planes.session import translated

from kvstore.errors import ERRORS, KVStoreError, from_status
from kvstore.wire import METADATA_ERROR, pack_fields


def test_the_mapping_is_total() -> None:
    statuses = [error.status for error in ERRORS]
    assert len(set(statuses)) == len(ERRORS) == len(KVStoreError.__subclasses__())
    for error in ERRORS:
        assert hasattr(grpc.StatusCode, error.status)
        assert type(from_status(error.status, "why", tier="dram")) is error
    for code in grpc.StatusCode:
        assert isinstance(from_status(code.name, "why"), KVStoreError)


class Failure(grpc.RpcError):  # type: ignore[misc]  # grpc has no types
    """A failed call. ``metadata``: what came with its status; a call that no sidecar answered has none."""

    def __init__(self, code: grpc.StatusCode, said: str, metadata: tuple[tuple[str, str], ...] | None) -> None:
        super().__init__(said)
        self.code, self.details, self.trailing_metadata = (lambda: code), (lambda: said), (lambda: metadata)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "the sidecar is gone (Socket closed)"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "the sidecar did not answer in time (Socket closed)"),
        (grpc.StatusCode.CANCELLED, "Socket closed"),
    ],
)
def test_words_of_grpc_alone_are_told_as_what_they_mean(code: grpc.StatusCode, words: str) -> None:
    for metadata in (None, ()):
        assert translated(Failure(code, "Socket closed", metadata)).message == words
    answered = translated(Failure(code, "the tier is full", ((METADATA_ERROR, pack_fields({"tier": "nvme"})),)))
    assert (answered.message, answered.fields) == ("the tier is full", {"tier": "nvme"})
