"""The remote plane's stores at a sidecar that does not answer: the staging that a failed fill named comes back."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest
import xxhash
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of
from kvstore.errors import DeadlineExceeded
from kvstore.keys import chain_digests, token_digest
from kvstore.remote import receiving
from kvstore.remote.node import Node
from kvstore.remote.receiving import SEGMENT_BYTES, Receiving
from kvstore.remote.session import SidecarSession
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.v1alpha import admin_pb2, admin_pb2_grpc
from kvstore.wire import spec_to_message
from kvstore.wire.data import data_message
from tests.specs import small_spec, tokens_of

SPEC = small_spec()
STALL_S = 60.0
PATIENCE_S = 30.0


class Stream:
    """A client's stream of messages."""

    def __init__(self, *messages: bytes) -> None:
        self._messages = list(messages)

    async def read(self) -> Any:
        return self._messages.pop(0) if self._messages else grpc.aio.EOF


class Service:
    """A remote session of one sidecar."""

    def __init__(self, node: Node, session: SidecarSession) -> None:
        self.node, self.session = node, session

    async def store(self, **step: Any) -> Any:
        return await self.node.cache.Store(pb.StoreRequest(**step), timeout=10.0, metadata=self.session.metadata)

    async def reserve(self, seed: int) -> int:
        request = pb.RegisterModelRequest(spec=spec_to_message(SPEC))
        named = await self.node.cache.RegisterModel(request, timeout=10.0, metadata=self.session.metadata)
        tokens = tokens_of(SPEC.chunk_tokens, seed)
        query = pb.ChainQuery(fingerprint=named.fingerprint, digests=b"".join(chain_digests(tokens, SPEC.chunk_tokens)))
        reserved = await self.store(reserve=pb.Reserve(query=query, token_digests=token_digest(tokens)))
        return int(reserved.reservation_id)

    async def staging_bytes(self) -> int:
        stub: Any = admin_pb2_grpc.AdminServiceStub(self.node.channel)  # type: ignore[no-untyped-call]  # generated
        status = await stub.Stats(admin_pb2.StatsRequest(), timeout=10.0, metadata=self.session.metadata)
        return int(status.sessions.staging_bytes)

    def receiving(self, reservation_id: int) -> asyncio.Future[int]:
        """Begin to receive all strips of the reservation's chunk, in one message."""
        layout = layout_of(SPEC, SPEC.kind, SPEC.chunk_tokens)
        size = -(-int(layout.strip_offsets[-1] + layout.strip_lengths[-1]) // 64) * 64
        data = memoryview(bytes(size))
        fields = rpb.StoreBytesRequest(
            reservation_id=reservation_id, checksum=xxhash.xxh3_128_digest(data),
            runs=[rpb.StripRun(chunk=0, strip_first=0, strip_count=layout.strip_count, byte_count=size)],
        )  # fmt: skip
        message = data_message(fields, [np.frombuffer(data, np.uint8)])
        return asyncio.ensure_future(Receiving(self.node, self.session, STALL_S).run(Stream(message)))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.01)


@asynccontextmanager
async def session_of(sidecar: Sidecar) -> AsyncIterator[Service]:
    """Open a session as the remote plane has it for a client."""
    node = Node("default", sidecar.directory / "run")
    session = await node.open_session()
    yield Service(node, session)
    node.close_session(session)
    await node.channel.close()


@pytest.fixture
async def service(own_sidecar: Sidecar) -> AsyncIterator[Service]:
    async with session_of(own_sidecar) as found:
        yield found


@pytest.mark.parametrize("has_gone", [False, True], ids=["it fails", "its client goes"])
async def test_a_fill_that_the_sidecar_did_not_answer_gives_its_staging_back(
    own_sidecar: Sidecar, service: Service, monkeypatch: pytest.MonkeyPatch, has_gone: bool
) -> None:
    """The reservation is dropped with it, as its client drops it: the sidecar may read the staging until then."""
    monkeypatch.setattr(receiving, "FILL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(receiving, "ABORT_TIMEOUT_S", 0.3)
    assert await service.receiving(await service.reserve(0))  # it has staging made
    idle = service.session._idle
    for seed in range(1, 3):
        reservation_id = await service.reserve(seed)
        os.kill(own_sidecar.pid, signal.SIGSTOP)
        try:
            filling = service.receiving(reservation_id)
            await until(lambda: not idle)
            if has_gone:
                filling.cancel()
            with pytest.raises(asyncio.CancelledError if has_gone else DeadlineExceeded):
                await filling
            await asyncio.sleep(0.5)
            assert not idle, "the sidecar may read it still"
        finally:
            os.kill(own_sidecar.pid, signal.SIGCONT)
        await until(lambda: bool(idle))
        assert await service.staging_bytes() == SEGMENT_BYTES
        await service.store(abort=pb.Abort(reservation_id=reservation_id))  # it is gone: that is no error
    assert await service.receiving(await service.reserve(9))
    assert len(idle) == 1
