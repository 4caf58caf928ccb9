"""StoreBytes: strips from messages into staging. The sidecar fills its chunks from there, as for any local client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, NamedTuple

import grpc
import numpy as np
import xxhash

from kvstore.errors import DataLoss, DeadlineExceeded, InvalidRequest
from kvstore.remote.node import RETRY_S, UNANSWERED, Node, typed_error
from kvstore.remote.session import SidecarSession, StagingSegment
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire.data import ALIGNMENT, split_message

SEGMENT_BYTES = 4 << 20
FILL_TIMEOUT_S = 20.0
ABORT_TIMEOUT_S = 5.0
_NOT_READING = (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED)
"""Statuses of fills after which the sidecar does not read staging any more."""
_giving: set[asyncio.Future[None]] = set()
"""Segments on their way back: the loop alone would not keep these tasks."""
_log = logging.getLogger("kvstore.remote")


class _Filling(NamedTuple):
    """A fill that reads a segment for a reservation."""

    call: Any
    segment: StagingSegment
    reservation_id: int


class Receiving:
    """One stream. While the sidecar copies a message's bytes out of staging, the next message is received: so at most
    two segments of staging are in use. A message is in this process's memory only while it has room in the inboxes."""

    def __init__(self, node: Node, session: SidecarSession, stall_s: float) -> None:
        self._node = node
        self._session = session
        self._stall_s = stall_s
        self._filling: _Filling | None = None

    async def run(self, context: Any) -> int:
        """Receive the stream, and return the number of bytes filled. Raises InvalidRequest for a message that
        contradicts itself; DataLoss for bytes that fail their checksum; DeadlineExceeded for a writer that stalls; and
        the sidecar's refusals."""
        byte_count = 0
        try:
            while (staged := await self._staged(context)) is not None:
                byte_count += await self._fill(*staged)
            await self._filled()
        finally:
            await self._settle()
        return byte_count

    async def _staged(self, context: Any) -> tuple[rpb.StoreBytesRequest, StagingSegment, int] | None:
        """Return the next message's fields, its bytes in staging, and their number. None at the end."""
        async with self._session.inbox.room(self._stall_s), self._node.inbox.room(self._stall_s):
            message = await self._next(context)
            return None if message is None else await self._take(message)

    async def _next(self, context: Any) -> bytes | None:
        try:
            async with asyncio.timeout(self._stall_s):
                message = await context.read()
        except TimeoutError:
            raise DeadlineExceeded(
                f"the writer sent nothing for {self._stall_s} s (remote.stall_s): the store is given up"
            ) from None
        return None if message is grpc.aio.EOF else message

    async def _take(self, message: bytes) -> tuple[rpb.StoreBytesRequest, StagingSegment, int]:
        fields, data = split_message(rpb.StoreBytesRequest, message)
        _check_runs(fields.runs, int(data.size))
        if xxhash.xxh3_128_digest(data.data) != fields.checksum:
            raise DataLoss("the bytes of a message are not the ones that were sent: store again")
        segment = await self._session.take_segment(-(-data.size // SEGMENT_BYTES) * SEGMENT_BYTES)
        np.copyto(segment.bytes[: data.size], data)
        return fields, segment, int(data.size)

    async def _fill(self, fields: rpb.StoreBytesRequest, segment: StagingSegment, byte_count: int) -> int:
        """Have the sidecar fill from staging, once it is done with the previous message. Return the bytes."""
        try:
            await self._filled()
            request = await self._request(fields, segment)
        except BaseException:
            self._session.give_back(segment)
            raise
        call = self._node.cache.Store(request, timeout=FILL_TIMEOUT_S, metadata=self._session.metadata)
        self._filling = _Filling(call, segment, fields.reservation_id)
        return byte_count

    async def _request(self, fields: rpb.StoreBytesRequest, segment: StagingSegment) -> pb.StoreRequest:
        """Return the request to fill a message's runs from staging. There may be many, so others are served in
        between."""
        request = pb.StoreRequest(fill=pb.FillStrips(reservation_id=fields.reservation_id))
        place, pauses = 0, self._node.long_work.begin()
        for run in fields.runs:
            request.fill.fills.add(
                chunk=run.chunk, strip_first=run.strip_first, strip_count=run.strip_count,
                staging_id=segment.staging_id, staging_offset=place,
            )  # fmt: skip
            place += run.byte_count
            await pauses.between()
        return request

    async def _filled(self) -> None:
        """Wait for the previous fill. Raises its error."""
        if self._filling is not None:
            call = self._filling.call
            await call.code()  # cancelled here, the call itself goes on: the sidecar reads the segment to the end
            try:
                await call
            except grpc.aio.AioRpcError as error:
                raise typed_error(error) from error
            await self._settle()

    async def _settle(self) -> None:
        """Give the segment back once the sidecar does not read it any more."""
        filling, self._filling = self._filling, None
        if filling is not None:
            giving = _kept(_given_back(self._node, self._session, filling))
            await asyncio.shield(giving)  # it goes on when this stream is cancelled again


def _kept(giving: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    task = asyncio.get_running_loop().create_task(giving)  # seam: a task of a stream that may end before it
    _giving.add(task)
    task.add_done_callback(_giving.discard)
    return task


async def _given_back(node: Node, session: SidecarSession, filling: _Filling) -> None:
    """Give the segment of a fill back. After a fill without an answer that takes another call, which nobody waits
    for."""
    if await filling.call.code() in _NOT_READING:
        session.give_back(filling.segment)
    else:
        _kept(_dropped(node, session, filling))


async def _dropped(node: Node, session: SidecarSession, filling: _Filling) -> None:
    """Drop the reservation of a failed fill, as its client does, and give the segment back: until the sidecar has
    answered that, it may read there. The call is repeated until it is answered, or the session ends."""
    request = pb.StoreRequest(abort=pb.Abort(reservation_id=filling.reservation_id))
    while session.is_open:
        call = node.cache.Store(request, timeout=ABORT_TIMEOUT_S, metadata=session.metadata)
        code = await call.code()
        if code in _NOT_READING:
            return session.give_back(filling.segment)
        if code not in UNANSWERED:
            return _log.error("staging of a failed store is lost until its session ends", extra={"reason": str(code)})
        await asyncio.sleep(RETRY_S)
    return None


def _check_runs(runs: Iterable[rpb.StripRun], byte_count: int) -> None:
    """Check that the runs' bytes are the message's data, and that each run has at least the bytes that its strips take:
    a shorter run would be filled from bytes behind it. Raises InvalidRequest naming the run."""
    total = 0
    for number, run in enumerate(runs):
        least = ALIGNMENT * run.strip_count
        if not run.strip_count or run.byte_count < least:
            raise InvalidRequest(
                f"runs[{number}] has {run.byte_count} bytes for {run.strip_count} strips: a run has one or more, each "
                f"padded to {ALIGNMENT} bytes"
            )
        total += run.byte_count
    if total != byte_count or not total:
        raise InvalidRequest(f"the runs of a message must be its {byte_count} bytes of data")
