"""How the remote plane cuts a fetch into messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import LayerSpec
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import split_message
from tests.e2e.remote.peers import Peer
from tests.e2e.test_failures import large_cache, large_spec
from tests.specs import bits, random_cache, small_spec, tokens_of

MESSAGE_BYTES = 2 << 20


@pytest.fixture(scope="module")
def remote() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "64 MiB", plane="remote") as running:
        yield running


def test_a_slab_that_fits_a_message_is_not_cut(remote: Sidecar) -> None:
    tokens, kv = large_cache(1, 4)
    with connect(remote.address) as client:
        client.store(large_spec(), tokens, kv).wait(10.0)
    with Peer(remote) as peer:
        messages = [split_message(rpb.FetchBytesResponse, each) for each in peer.fetch(large_spec(), tokens)]
    strips = [run.strip_count for fields, _ in messages for run in fields.runs if run.strip_count]
    assert strips == [4] * 16  # four chunks of four layers of four heads
    assert max(data.size for _, data in messages) == MESSAGE_BYTES


@pytest.mark.parametrize(("heads", "dim"), [(3, 256), (5, 384), (2, 1024)])
def test_slabs_and_strips_larger_than_a_message(remote: Sidecar, heads: int, dim: int) -> None:
    """Slabs of 3 MiB, 7.5 MiB and 8 MiB, the last of strips of 4 MiB."""
    layer = LayerSpec(kv_heads=heads, k_dim=dim, v_dim=dim)
    spec = small_spec(model_id=f"wide-{dim}", layers=(layer,) * 2, chunk_tokens=1024)
    tokens, kv = tokens_of(1500, dim), random_cache(spec, 1500, dim)
    with connect(remote.address) as client:
        client.store(spec, tokens, kv).wait(10.0)
        for head in (range(heads), range(1, heads)):
            fetched = client.fetch(spec, tokens, heads=head)
            assert fetched.token_count == 1500
            for (k, v), (stored_k, stored_v) in zip(fetched, kv, strict=True):
                assert (bits(k) == stored_k[head.start :]).all()
                assert (bits(v) == stored_v[head.start :]).all()


def test_of_a_cache_that_is_not_wanted_one_layer_comes_with_its_e(remote: Sidecar) -> None:
    spec, (tokens, kv) = large_spec(), large_cache(9, 2)
    hidden = np.random.default_rng(9).integers(0, 65535, (tokens.size, spec.hidden_size), dtype=np.uint16)
    came = []
    with connect(remote.address) as client:
        client.store(spec, tokens, kv, hidden={1: hidden}).wait(10.0)
        session = client.connect_now()
        honest = session.fetch_bytes

        def counted(request: Any, **options: Any) -> Any:
            came.append(list(request.fetch.layers))
            return honest(request, **options)

        session.fetch_bytes = counted
        found = client.fetch(spec, tokens, layers=(), hidden_layers=(1,))
    assert found.token_count == tokens.size
    assert (bits(found.hidden[1]) == bits(hidden)).all()
    assert came == [[0]]
