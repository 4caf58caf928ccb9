"""A chunk that leaves between an answer and its reading: neither it nor what follows it counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import MissReason
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.test_failures import assert_right_or_missing, large_cache, large_spec


@pytest.mark.parametrize("arrives", [False, True], ids=["all there", "one arriving"])
def test_chunks_behind_one_that_is_stale_before_the_copy_are_no_part_of_it(
    local_sidecar: Sidecar, arrives: bool
) -> None:
    """As where a session ends between the answer and its reading: a lease no longer keeps the second chunk."""
    with connect(local_sidecar.address) as client:
        tokens, kv = large_cache(13)
        client.store(large_spec(), tokens, kv).wait()
        session = client.connect_now()
        honest = session.cache.Fetch

        def confused(*arguments: Any, **options: Any) -> Any:
            for response in honest(*arguments, **options):
                response.chunks[1].generation += 1
                response.chunks[2].is_arriving = arrives
                yield response
                yield pb.FetchResponse(arrivals=[pb.Arrival(chunk=2, slabs=b"\x0f")])
                return

        session.cache.Fetch = confused
        into = [(np.zeros((4, tokens.size, 64), np.uint16), np.zeros((4, tokens.size, 64), np.uint16)) for _ in "0123"]
        fetched = client.fetch(large_spec(), tokens, into=into)
        assert (fetched.token_count, fetched.reason) == (512, MissReason.STALE)
        assert_right_or_missing(client.fetch(large_spec(), tokens), kv)
        assert not any(plane[:, 512:].any() for pair in into for plane in pair)
