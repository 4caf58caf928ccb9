"""One tenant's sidecar, seen from the remote plane: its sockets, its arena, the models it knows."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.errors import KVStoreError, Unauthenticated, Unavailable, from_status, not_registered
from kvstore.handoff.messages import RegionsAnswer, RegionsQuestion, Welcome
from kvstore.handoff.passing import check_descriptors
from kvstore.remote.inbox import TENANT_MESSAGES, Inbox
from kvstore.remote.session import SidecarSession
from kvstore.seams import LongWork, SystemClock
from kvstore.seams.mapping import Bytes, SharedMap, closing_all
from kvstore.spec import ModelSpec
from kvstore.telemetry import BoundedLines
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.wire import spec_from_message, unpack_fields
from kvstore.wire.limits import REPLY_BYTES_MAX

MODEL_COUNT_MAX = 1024
"""Models whose specs are remembered."""
RELEASE_TIMEOUT_S, RETRY_S = 5.0, 0.5
UNANSWERED = (
    grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
)  # fmt: skip
"""Statuses of calls that gave nothing back, or perhaps nothing."""


class Node:
    """The local plane of one tenant's sidecar. Its regions are mapped once, however many remote sessions there are."""

    def __init__(self, tenant: str, socket_directory: Path) -> None:
        self.tenant = tenant
        self._sockets = socket_directory
        self._maps: list[SharedMap] = []
        self._regions: dict[int, Bytes] = {}
        self._growing = asyncio.Lock()
        self._sessions: dict[bytes, SidecarSession] = {}
        self.inbox = Inbox(TENANT_MESSAGES, "tenant")
        self.long_work = LongWork(SystemClock())
        """The pauses of the tenant's long streams: this process's loop is all tenants'."""
        self.lines = BoundedLines(logging.getLogger("kvstore.remote"), SystemClock())
        """The log lines that the tenant's clients can cause without end."""
        self._models: OrderedDict[bytes, ModelSpec] = OrderedDict()
        self.generations = np.empty(0, np.uint64)
        options = (("grpc.max_receive_message_length", REPLY_BYTES_MAX), ("grpc.use_local_subchannel_pool", 1))
        self.channel = grpc.aio.insecure_channel(f"unix:{socket_directory / 'kvstore.sock'}", options)
        self.cache: Any = cache_pb2_grpc.CacheServiceStub(self.channel)  # type: ignore[no-untyped-call]  # generated
        self._releasing: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ sessions

    async def open_session(self) -> SidecarSession:
        """Open a session of the sidecar for one remote client. Raises the error with which the sidecar refuses it."""
        session, welcome, descriptors = await SidecarSession.open(self._sockets / "data.sock")
        try:
            with closing_all(descriptors):
                check_descriptors(welcome, descriptors)
                if not self.generations.size:
                    self.generations = self._map(descriptors[0], welcome.generations_bytes).view(np.uint64)
                self._add_regions(welcome, descriptors[1:])
        except BaseException:
            session.close()
            raise
        self._sessions[session.secret] = session
        return session

    def session(self, secret: bytes) -> SidecarSession:
        """Return the open session that a call belongs to. Raises Unauthenticated: its client must connect again."""
        session = self._sessions.get(secret)
        if session is None or not session.is_open:
            raise Unauthenticated("no such session: connect again")
        return session

    def give_back(self, session: SidecarSession, lease_id: int) -> None:
        """Release a lease without waiting for the reply. The call is repeated until it is answered, or the session
        ends."""
        task = asyncio.get_running_loop().create_task(self._released(session, lease_id))  # seam: outlives its stream
        self._releasing.add(task)  # the loop alone would not keep it
        task.add_done_callback(self._releasing.discard)

    async def _released(self, session: SidecarSession, lease_id: int) -> None:
        request, pause_s = pb.ReleaseRequest(lease_ids=[lease_id]), RETRY_S
        while session.is_open:
            call = self.cache.Release(request, timeout=RELEASE_TIMEOUT_S, metadata=session.metadata)
            if await call.code() not in UNANSWERED:
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, RELEASE_TIMEOUT_S)  # where it is too busy, many leases may be coming back

    def close_session(self, session: SidecarSession) -> None:
        self._sessions.pop(session.secret, None)
        session.close()

    # ------------------------------------------------------------ memory

    def _map(self, descriptor: int, byte_count: int) -> Bytes:
        mapping = SharedMap(descriptor, byte_count, writable=False)
        self._maps.append(mapping)
        return mapping.bytes

    def _add_regions(self, answer: Welcome | RegionsAnswer, descriptors: list[int]) -> None:
        for (index, byte_count), descriptor in zip(answer.regions, descriptors, strict=True):
            if index not in self._regions:
                self._regions[index] = self._map(descriptor, byte_count)

    async def region(self, session: SidecarSession, index: int) -> Bytes:
        """Return a region's bytes, read-only. It is mapped when it is first asked for. Raises Unavailable where the
        sidecar does not have it."""
        while index not in self._regions:
            async with self._growing:
                have = len(self._regions)
                answer, descriptors = await session.exchange(RegionsQuestion(have), RegionsAnswer)
                with closing_all(descriptors):
                    check_descriptors(answer, descriptors)
                    self._add_regions(answer, descriptors)
                if index not in self._regions and len(self._regions) == have:
                    raise Unavailable(f"the sidecar has no region {index}")
        return self._regions[index]

    # ------------------------------------------------------------ models

    def note_model(self, request: bytes, reply: bytes) -> None:
        """Remember the spec of a model that the sidecar accepted: its layouts tell the places of strips."""
        name = pb.RegisterModelResponse.FromString(reply).fingerprint
        if name not in self._models:
            self._models[name] = spec_from_message(pb.RegisterModelRequest.FromString(request).spec)
        self._models.move_to_end(name)
        if len(self._models) > MODEL_COUNT_MAX:
            self._models.popitem(last=False)

    def spec_of(self, name: bytes) -> ModelSpec:
        """Return the spec of a model. Raises InvalidRequest as ``not_registered`` for one that was not noted, or was
        not asked for the longest: its client registers it again."""
        spec = self._models.get(name)
        if spec is None:
            raise not_registered(name)
        self._models.move_to_end(name)
        return spec


def typed_error(error: grpc.aio.AioRpcError) -> KVStoreError:
    """Return the typed error of a failed call to the sidecar."""
    return from_status(error.code().name, error.details() or "", **unpack_fields(error.trailing_metadata()))
