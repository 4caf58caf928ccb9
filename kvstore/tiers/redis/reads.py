"""Reads of open chunks, given to the byte movers in turns.

While all turns are taken, reads of one chunk gather, and become one job. A job costs the service as much as a mover
needs for a megabyte, and a mover that has several fields to read keeps a server on another machine busy while it checks
one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from functools import partial

from kvstore.errors import KVStoreError, Unavailable
from kvstore.seams import Clock, Workers
from kvstore.seams.jobs import begun, failure_of, to_its_end
from kvstore.tiers.pace import Waits, grace_s, limit_s
from kvstore.tiers.redis.access import Server
from kvstore.tiers.redis.moves import JOB_S_MAX, PartRead, read_parts
from kvstore.tiers.redis.replies import MOVED

JOB_BYTES_MAX = 16 << 20
AHEAD = 2
"""Jobs given to the movers for each of their threads."""
Job = asyncio.Future[list[bool]]
_Waiting = tuple[PartRead, "asyncio.Future[tuple[Job, int]]"]


class ChunkReads:
    """The reads of one chunk that wait for a turn. ``server`` has the chunk, as far as we know."""

    def __init__(self, server: Server, key: bytes) -> None:
        self.server = server
        self.key = key
        self.waiting: deque[_Waiting] = deque()

    def take(self) -> list[_Waiting]:
        """Return the next reads, as many as one job does."""
        taken: list[_Waiting] = []
        byte_count = 0
        while self.waiting:
            byte_count += self.waiting[0][0].slabs.byte_count
            if taken and byte_count > JOB_BYTES_MAX:
                break
            taken.append(self.waiting.popleft())
        return taken


class Reads:
    """Gives reads to the movers. ``thread_count``: the number of the movers' threads."""

    def __init__(self, workers: Workers, thread_count: int, clock: Clock, waits: Waits) -> None:
        self._workers = workers
        self._clock = clock
        self._waits = waits
        self._job_count = self._turn_count = thread_count * AHEAD
        self._chunks: deque[ChunkReads] = deque()
        """Chunks that have reads waiting, each once."""

    async def read(self, chunk: ChunkReads, part: PartRead) -> bool:
        """Read a part. Returns True when all its strips are right. A cancelled caller is released only when no mover
        works on its part. Raises the job's errors. When a server fails one read all that wait for it raise
        Unavailable."""
        begins: asyncio.Future[tuple[Job, int]] = asyncio.get_running_loop().create_future()
        if not chunk.waiting:
            self._chunks.append(chunk)
        chunk.waiting.append((part, begins))
        self._begin()
        try:
            job, number = await begins
        except asyncio.CancelledError:
            if begins.done() and not begins.cancelled() and begins.exception() is None:  # a mover has it already
                with suppress(KVStoreError):  # only its end matters, not its result
                    await to_its_end(begins.result()[0])
            raise
        return (await to_its_end(job))[number]

    def _begin(self) -> None:
        """Start jobs on the turns that are free."""
        while self._turn_count and self._chunks:
            chunk = self._chunks.popleft()
            taken = [each for each in chunk.take() if not each[1].done()]  # a cancelled caller has its memory again
            if chunk.waiting:
                self._chunks.append(chunk)
            if taken:
                self._start(chunk, taken)

    def _start(self, chunk: ChunkReads, taken: list[_Waiting]) -> None:
        parts = [part for part, _ in taken]
        byte_count = sum(part.slabs.byte_count for part in parts)
        until_s = self._clock.monotonic() + limit_s(JOB_S_MAX, byte_count)
        job = asyncio.wrap_future(begun(self._workers, read_parts, chunk.server, chunk.key, parts, until_s))
        self._turn_count -= 1
        self._waits.began(job, grace_s(self._job_count, byte_count))
        job.add_done_callback(partial(self._ended, chunk.server))
        for number, (_, begins) in enumerate(taken):
            begins.set_result((job, number))

    def _ended(self, server: Server, job: Job) -> None:
        self._turn_count += 1
        self._waits.ended(job)
        error = failure_of(job)
        if error is None or MOVED in error.fields or not isinstance(error, Unavailable):
            self._waits.answered()
        else:
            self.give_up(error.message, server)
        self._begin()

    def give_up(self, reason: str, server: Server | None = None) -> None:
        """Fail all reads that wait for a server: they are not to wait for a dead server one after the other. None: all
        servers."""
        chunks, self._chunks = self._chunks, deque()
        for chunk in chunks:
            if server not in (None, chunk.server):
                self._chunks.append(chunk)
                continue
            for _, begins in chunk.waiting:
                if not begins.done():
                    begins.set_exception(Unavailable(reason))
            chunk.waiting.clear()
