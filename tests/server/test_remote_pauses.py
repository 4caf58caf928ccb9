"""The remote plane's loop is all tenants': what a call has many of is done with pauses, in which others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest
import xxhash
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of
from kvstore.keys import chain_digests, fingerprint
from kvstore.remote.receiving import Receiving
from kvstore.remote.sending import Sending
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire import spec_to_message
from kvstore.wire.data import data_message
from tests.server.test_remote_receiving import Service, Stream, session_of
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()
CHUNKS = 200
TOKENS = tokens_of(CHUNKS * SPEC.chunk_tokens)


@pytest.fixture
async def service(own_sidecar: Sidecar) -> AsyncIterator[Service]:
    async with session_of(own_sidecar) as found:
        yield found


async def test_a_fetch_pauses_between_its_chunks(own_sidecar: Sidecar, service: Service, taken: list[None]) -> None:
    """Before the first message, and between those that follow."""
    with connect(own_sidecar.address) as client:
        client.store(SPEC, TOKENS, random_cache(SPEC, TOKENS.size)).wait(10.0)
    request = pb.RegisterModelRequest(spec=spec_to_message(SPEC))
    reply = pb.RegisterModelResponse(fingerprint=fingerprint(SPEC, SPEC.kind))
    service.node.note_model(request.SerializeToString(), reply.SerializeToString())
    query = pb.ChainQuery(fingerprint=reply.fingerprint, digests=b"".join(chain_digests(TOKENS, SPEC.chunk_tokens)))
    asked = rpb.FetchBytesRequest(fetch=pb.FetchRequest(query=query))
    sending = Sending(service.node, service.session, asked, 2 << 20, service.session.metadata)
    messages = sending.messages(10.0)
    head = rpb.FetchBytesResponse.FromString(await anext(messages)).head
    assert len(head.chunks) == CHUNKS
    assert len(taken) >= CHUNKS
    del taken[:]
    async for _ in messages:
        pass
    assert len(taken) >= CHUNKS * len(SPEC.slab_layers)
    sending.close()


async def test_a_message_of_many_runs_pauses_between_them(service: Service, taken: list[None]) -> None:
    layout = layout_of(SPEC, SPEC.kind, SPEC.chunk_tokens)
    reservation_id = await service.reserve(1)
    runs = [
        rpb.StripRun(strip_first=strip, strip_count=1, byte_count=-(-int(size) // 64) * 64)
        for strip, size in enumerate(layout.strip_lengths)
    ]
    data = np.zeros(sum(run.byte_count for run in runs), np.uint8)
    fields = rpb.StoreBytesRequest(reservation_id=reservation_id, runs=runs, checksum=xxhash.xxh3_128_digest(data.data))
    message = data_message(fields, [data])
    async with asyncio.timeout(30.0):
        assert await Receiving(service.node, service.session, 10.0).run(Stream(message)) == data.size
    assert len(taken) >= len(runs)
