"""Every error has one status, and every status comes back as an error."""

from __future__ import annotations

import grpc

from kvstore.errors import ERRORS, KVStoreError, from_status


def test_the_mapping_is_total() -> None:
    statuses = [error.status for error in ERRORS]
    assert len(set(statuses)) == len(ERRORS) == len(KVStoreError.__subclasses__())
    for error in ERRORS:
        assert hasattr(grpc.StatusCode, error.status)
        assert type(from_status(error.status, "why", tier="dram")) is error
    for code in grpc.StatusCode:
        assert isinstance(from_status(code.name, "why"), KVStoreError)
