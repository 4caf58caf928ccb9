"""The remote plane's peers that are whole, and not what was asked for; and writers that stall."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.keys import chain_digests, fingerprint
from kvstore.spec import MissReason
from tests.e2e.remote.peers import Peer, left, status, store_message
from tests.e2e.test_failures import until
from tests.specs import bits, random_cache, small_spec, tokens_of

SPEC = small_spec(model_id="asked for")
SIBLING = small_spec(model_id="sent", weights_digest="cd" * 32)
STALL_S = 1.0


@pytest.fixture(scope="module")
def impatient() -> Iterator[Sidecar]:
    """A sidecar whose remote plane waits a second for what a client sends or takes."""
    environment = {**os.environ, "KVSTORE__REMOTE__STALL_S": str(STALL_S)}
    with Sidecar("--capacity", "16 MiB", environment=environment, plane="remote") as running:
        yield running


@pytest.mark.parametrize("what", ["chain", "model"])
def test_a_server_that_sends_another_chunk_is_a_miss(impatient: Sidecar, what: str) -> None:
    """Every byte of it is right, for who asked for it."""
    tokens, others = tokens_of(40, 1), tokens_of(40, 2)
    with connect(impatient.address) as client:
        kv = random_cache(SPEC, 40, 1)
        for spec, prompt, cache in ((SPEC, tokens, kv), (SPEC, others, random_cache(SPEC, 40, 2)),
                                    (SIBLING, tokens, random_cache(SIBLING, 40, 3))):  # fmt: skip
            assert client.store(spec, prompt, cache).wait(10.0)
        session = client.connect_now()
        honest = session.fetch_bytes

        def confused(request: Any, **options: Any) -> Any:
            if what == "chain":
                request.fetch.query.digests = b"".join(chain_digests(others, SPEC.chunk_tokens))
            else:
                request.fetch.query.fingerprint = fingerprint(SIBLING, SIBLING.kind)
            return honest(request, **options)

        session.fetch_bytes = confused
        fetched = client.fetch(SPEC, tokens)
        assert (fetched.token_count, fetched.reason) == (0, MissReason.CORRUPT)
        session.fetch_bytes = honest
        again = client.fetch(SPEC, tokens)
        assert again.token_count == 40
        assert all((bits(k) == ours[0]).all() for (k, _), ours in zip(again, kv, strict=True))


def test_a_writer_that_stalls_is_let_go(impatient: Sidecar) -> None:
    """One message of a store, and then nothing: its staging and its place among the streams are given back."""
    is_over = threading.Event()
    with Peer(impatient) as peer:
        reservation = peer.reserve(SPEC, 1, 7)
        message = store_message(reservation, np.zeros(8192, np.uint8).tobytes())

        def stalling() -> Iterator[bytes]:
            yield message
            is_over.wait(60.0)

        started = time.monotonic()
        try:
            assert (
                status(lambda: [peer.call("stream_unary", "StoreBytes", stalling(), timeout=40)]) == "DEADLINE_EXCEEDED"
            )
        finally:
            is_over.set()
        assert time.monotonic() - started < 20.0, "its own deadline ended it, not the server"
    until(lambda: left(impatient) == (0,) * 7)
