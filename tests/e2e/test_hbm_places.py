"""Places in the pool at which no chunk can lie: fetches take the bytes from memory."""

from __future__ import annotations

import pytest
from kvstore_client import Client, connect
from kvstore_client.planes.shared_memory import pool as pools
from kvstore_ops.sidecar import Sidecar

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.test_hbm import SPEC, brought, client, same, sidecar, stored

FIXTURES = client, sidecar


@pytest.mark.parametrize("what", ["offset", "byte_count", "odd"])
def test_a_place_where_no_chunk_can_lie_is_none(
    sidecar: Sidecar, client: Client, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """As a confused sidecar may name it."""
    tokens, cache = stored(client, 20 + len(what))
    brought(client, tokens)
    found = pools.DevicePool.found

    def confused(self: pools.DevicePool, chunk: object, place: pb.DevicePlace) -> object:
        wrong = pb.DevicePlace()
        wrong.CopyFrom(place)
        if what == "odd":
            wrong.offset += 1
        elif what == "offset":
            wrong.offset = 1 << 62
        else:
            wrong.byte_count += 4096
        assert found(self, chunk, wrong) is None
        return found(self, chunk, wrong)

    monkeypatch.setattr(pools.DevicePool, "found", confused)
    with connect(sidecar.address) as fresh:
        assert same(fresh.fetch(SPEC, tokens), cache)
