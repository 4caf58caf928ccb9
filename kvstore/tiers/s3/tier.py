"""The S3 tier: a chunk is an object, put there once and read in ranges.

Writing: the object that is there is looked at first. This chunk, in a format we know: where all its strips are right it
is adopted, and nothing is sent. Damaged: replaced. A newer release's: left alone. Otherwise the object is put on the
condition that there is still none, which some stores ignore: nothing relies on it.

Reading: the header and the first range in one request, then ranges of the same ETag, each strip verified.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, TypeVar

from kvstore.chunk import ChunkHeader, ChunkLayout, Making, Trust, encoding_cost
from kvstore.config import S3Settings
from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, KVStoreError, PermissionDenied, Unavailable
from kvstore.seams import Clock, Workers
from kvstore.seams.jobs import begun, failure_of, in_time, to_its_end
from kvstore.seams.memory import Bytes, joined
from kvstore.spec import Durability, Encoding, Tier
from kvstore.tiers.choice import EncodingChoice
from kvstore.tiers.contract import (
    IS_FULL,
    Buffer,
    ChunkName,
    StoredChunk,
    TierStatistics,
    UploadClaims,
    UploadState,
    check_header,
    host_memory,
)
from kvstore.tiers.pace import Pace, Timed, grace_s, timed
from kvstore.tiers.s3.allowance import Allowance
from kvstore.tiers.s3.bucket import BucketPresence
from kvstore.tiers.s3.depth import first_count
from kvstore.tiers.s3.judging import KEPT, REFUSED, Finding, Judgement, judge
from kvstore.tiers.s3.looking import RawGuesses, ask_for_bucket, look, probe_objects
from kvstore.tiers.s3.objects import warm_up
from kvstore.tiers.s3.reading import S3Chunk
from kvstore.tiers.s3.writing import (
    Condition,
    condition_of,
    remove_objects,
    request_count_of,
    write_object,
)

Result = TypeVar("Result")
DAMAGED_COUNT_MAX = 1024
SAID_AGAIN_S = 600.0
DENIED_S = 5.0
"""Seconds after a denied write in which no chunk is sent: each is sent whole before it is denied."""
CLOSE_S_MAX = 3.0
"""Seconds that a close waits for running jobs before it closes the lanes."""
ANSWER_BYTES_MAX = 96 << 10
"""A lane's answer carries a header up to this size; a larger header is read by a thread of this process."""
_log = logging.getLogger("kvstore.s3")


@dataclass(frozen=True)
class Lanes:
    """The workers of a tier's blocking jobs. ``near`` are this process's own threads."""

    readers: Workers
    writers: Workers
    askers: Workers
    near: Workers

    def __iter__(self) -> Any:
        return iter((self.readers, self.writers, self.askers, self.near))


class S3Tier:
    """One node's access to a bucket. It makes no request before it is called, so that a service starts without the
    endpoint, and uses it once it is there."""

    name = "s3"
    kind = Tier.S3
    durability = Durability.OBJECT

    def __init__(
        self, settings: S3Settings, lanes: Lanes, clock: Clock, trust: Trust | None = None,
        claims: UploadClaims | None = None, account: Path | None = None,
    ) -> None:  # fmt: skip
        """``trust``: the copies that are believed, and the key that seals new ones. ``claims``: the place where nodes
        tell each other what they are about to write; a bucket itself has none. ``account``: the file that keeps the
        counts for the day's limits over restarts."""
        self._settings = settings
        self._trust = trust or Trust()
        paid = settings.paid_bytes_per_s
        self._choice = EncodingChoice(settings.encoding, 1 / paid if paid else 0.0)
        self._raw = RawGuesses(is_raw=settings.encoding != "lz4")
        self._claims = claims
        self._lanes = lanes
        self._clock = clock
        counts = {lanes.readers: settings.reader_count, lanes.writers: settings.writer_count}
        self._pace = {workers: Pace(counts.get(workers, 1)) for workers in lanes}
        self._allowance = Allowance(settings, clock, account)
        self._bucket = BucketPresence(clock)
        self._damaged: OrderedDict[bytes, str] = OrderedDict()
        """Storage key -> ETag of objects whose strips failed their check although their headers are right."""
        self._said: dict[str, float] = {}
        self._read_bytes = self._written_bytes = 0
        self._denied: tuple[float, str] | None = None
        """Until when no chunk is sent, and why; None while writes are not denied."""

    def prepare(self) -> None:
        """Have every process that works for the tier make its client now: that takes a second."""
        for workers, count in ((self._lanes.readers, self._settings.reader_count), (self._lanes.askers, 1)):
            for _ in range(count):
                begun(workers, warm_up, self._settings)

    async def _run(
        self, workers: Workers, function: Callable[..., Result], *args: object, grace_s: float = 0.0
    ) -> Result:
        """Run a job on a lane. A cancelled caller is released only when the job has ended: until then its memory is in
        use."""
        job = asyncio.wrap_future(begun(workers, function, *args))
        self._pace[workers].began(job, self._clock, grace_s)
        return await to_its_end(job)

    def _say(self, what: str, **fields: object) -> None:
        """Log a warning, at most once in a while: the problem stays, or comes again and again."""
        now_s = self._clock.monotonic()
        if now_s - self._said.get(what, float("-inf")) >= SAID_AGAIN_S:
            self._said[what] = now_s
            _log.warning(what, extra={"tier": self.name, **fields})

    def _is_spent(self) -> bool:
        """Return True when the tier may make no more requests today."""
        setting = self._allowance.reached
        if setting:
            self._say("the day's limit is reached: nothing is asked of the tier before the next one", setting=setting)
        return bool(setting)

    def _check_allowance(self, what: str) -> None:
        """Raise Exhausted when the tier may make no more requests today. ``what`` cannot be done there."""
        if self._is_spent():
            words = f"tiers.s3.{self._allowance.reached} is reached: nothing is {what} there before tomorrow; raise it"
            raise Exhausted(words, **{IS_FULL: True})

    # ------------------------------------------------------------ look

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool | None]:
        if not storage_keys or self._is_spent():
            return [None] * len(storage_keys)
        asks_bucket = self._bucket.is_due
        if asks_bucket:
            self._bucket.asked()
        elif self._bucket.problem:
            raise Unavailable(self._bucket.problem)
        asked = (list(storage_keys), list(chains), timeout_s, asks_bucket)
        sent_count = first_count(len(storage_keys), chains)
        self._allowance.used(0, sent_count)  # now: without an answer nobody tells how many were sent
        job = asyncio.wrap_future(begun(self._lanes.askers, probe_objects, self._settings, *asked))
        try:
            found = await in_time(job, timeout_s)
        except (TimeoutError, DeadlineExceeded) as error:
            if asks_bucket:
                self._ask_for_bucket(storage_keys[0])  # beside the caller, who had no time for it
            raise DeadlineExceeded(f"tiers.s3 has not answered within {timeout_s:g} s") from error
        except Unavailable as error:
            self._bucket.refused(error)
            raise
        self._allowance.used(0, found.request_count - sent_count)
        if found.is_bucket_seen:
            self._bucket.seen()
        if found.is_denied:
            self._say_denied()
        return found.answers

    def _ask_for_bucket(self, storage_key: bytes) -> None:
        job = asyncio.wrap_future(begun(self._lanes.askers, ask_for_bucket, self._settings, storage_key))
        self._allowance.used(0, 1)
        job.add_done_callback(self._bucket_told)

    def _bucket_told(self, job: asyncio.Future[bool]) -> None:
        error = failure_of(job)
        if isinstance(error, KVStoreError):
            self._bucket.refused(error)
        elif error is None and job.result():
            self._bucket.seen()

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        """See ``SharedTier.claim``. Chunks that another node has claimed are not looked for: each look is a request.
        Chunks that this node could not write anyway are not claimed."""
        keys, claims = list(storage_keys), self._claims
        if claims is None or not keys or self._denied or self._is_spent():
            found = await self.probe(keys, timeout_s)
            return list(map(self._state_of, found))
        own = list(compress(keys, await claims.claim(keys, claim_s)))
        states = dict(zip(own, map(self._state_of, await self.probe(own, timeout_s)), strict=True))
        await claims.release([key for key, state in states.items() if state is UploadState.THERE])
        return [states.get(key, UploadState.TAKEN) for key in keys]

    def _state_of(self, answer: bool | None) -> UploadState:
        """Return the state for an answer to ``probe``; None: an archived object, or a limit let nothing be asked."""
        is_free = self._is_spent() if answer is None else not answer
        return UploadState.FREE if is_free else UploadState.THERE

    def _say_denied(self) -> None:
        self._say(
            "the bucket denies reads: what is not there looks like this, too, without the right s3:ListBucket; give it "
            "and s3:GetObject, or check tiers.s3.expected_owner",
            bucket=self._settings.bucket,
        )

    async def _judge(self, name: ChunkName, ahead: Sequence[Bytes] = ()) -> Judgement:
        """Look at the object and classify it. A denied object is perhaps not there."""
        byte_count = self._trust.header_bytes(name.layout)
        workers = self._lanes.readers if byte_count <= ANSWER_BYTES_MAX else self._lanes.near
        ahead_bytes = sum(piece.size for piece in ahead)
        if ahead:
            await self._allowance.turn(ahead_bytes)
        self._allowance.used(byte_count + ahead_bytes, 1)
        try:
            looked = await self._run(
                workers, look, self._settings, name.storage_key, byte_count, ahead,
                grace_s=self._read_grace_s(ahead_bytes),
            )  # fmt: skip
        except PermissionDenied:
            self._allowance.give_back(ahead_bytes)
            self._say_denied()
            return Judgement(Finding.HIDDEN)
        except Unavailable as error:
            self._bucket.refused(error)
            raise
        self._bucket.seen()
        beyond_bytes = byte_count + ahead_bytes - (looked.total_bytes if looked else 0)
        self._allowance.give_back(min(ahead_bytes, max(0, beyond_bytes)))
        found = judge(looked, name, self._trust)
        if found.finding in KEPT:
            self._say(f"{KEPT[found.finding]}: it is a miss here, and stays", etag=found.etag)
        return found

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> StoredChunk | None:
        """See ``SharedTier.open``. Reads the header, and ``ahead`` in the same request where it fits: another request
        would wait for its first byte once more."""
        self._check_allowance("read")
        memory = host_memory(ahead)
        is_one_request = self._raw.of(name.layout) and sum(each.size for each in memory) <= self._settings.range_bytes
        found = await self._judge(name, joined(memory) if memory and is_one_request else ())
        if found.header is None:
            if found.reason is not None:
                raise found.reason
            return None
        header = check_header(name, found.header)
        self._raw.saw(name.layout, is_raw=header.encoding == "raw")
        return S3Chunk(self, self._settings, header, name.layout, found.etag, memory if found.is_ahead else ())

    # ------------------------------------------------------------ read

    async def run_read(self, byte_count: int, function: Callable[..., Any], *args: object) -> Any:
        await self._allowance.turn(byte_count)
        self._allowance.used(byte_count, -(-byte_count // self._settings.range_bytes))
        return await self._run(self._lanes.readers, function, *args, grace_s=self._read_grace_s(byte_count))

    def _read_grace_s(self, byte_count: int) -> float:
        """Seconds that reads of this size, side by side on a slow line, take without a stall. At most ``timeout_s``:
        a request that is silent for longer fails by itself."""
        return min(self._settings.timeout_s, grace_s(self._settings.reader_count, byte_count))

    async def run_check(self, function: Callable[..., Any], *args: object) -> Any:
        return await self._run(self._lanes.readers, function, *args)

    def was_read(self, byte_count: int) -> None:
        """Count bytes that were read and passed their checksums."""
        self._read_bytes += byte_count

    def was_damaged(self, storage_key: bytes, etag: str) -> None:
        """Have the object replaced when the chunk is stored again: its header does not show the damage."""
        self._damaged[storage_key] = etag
        if len(self._damaged) > DAMAGED_COUNT_MAX:
            self._damaged.popitem(last=False)

    # ------------------------------------------------------------ write

    def takes(self, layout: ChunkLayout) -> bool:
        return layout.total_bytes >= self._settings.chunk_bytes_min

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        self._check_allowance("stored")
        try:
            await self._write(header, layout, host_memory(pieces))
        finally:
            if self._claims is not None:
                await self._claims.release([header.storage_key])

    async def _write(self, header: ChunkHeader, layout: ChunkLayout, source: Sequence[Bytes]) -> None:
        name = ChunkName(header.storage_key, layout)
        byte_count = sum(piece.size for piece in source)
        refused = ""
        for _ in range(2):  # another node may put an object there between a look and the write
            begun_s = self._clock.monotonic()
            found = await self._judge(name)
            self._choice.answered(self._clock.monotonic() - begun_s)
            if found.finding in REFUSED:
                raise Exhausted(REFUSED[found.finding])
            is_damaged = found.finding is Finding.DAMAGED or self._damaged.get(header.storage_key) == found.etag
            if found.header is not None and not is_damaged:
                if await self._is_whole(found.header, layout, found.etag):
                    return
                is_damaged = True
            if self._denied:
                if (now_s := self._clock.monotonic()) < self._denied[0]:
                    raise PermissionDenied(self._denied[1])
                self._denied = (now_s + DENIED_S, self._denied[1])  # this one finds out, and the others wait for that
            await self._allowance.turn(byte_count)
            self._allowance.used(byte_count, request_count_of(byte_count))
            replaced = found.etag if is_damaged else ""
            sent_bytes = await self._put(header, layout, source, condition_of(replaced, refused))
            if sent_bytes:
                self._damaged.pop(header.storage_key, None)
                self._bucket.seen()
                self._allowance.used(sent_bytes - byte_count, 0)  # an encoded copy is smaller, a sealed one larger
                self._written_bytes += sent_bytes
                return
            refused = replaced
            if found.finding is Finding.HIDDEN:
                raise PermissionDenied("tiers.s3: an object is there already: to tell what it is takes s3:GetObject")
        raise Unavailable("tiers.s3: others keep changing the object that a chunk was to go to: it is tried again")

    async def _is_whole(self, header: ChunkHeader, layout: ChunkLayout, etag: str) -> bool:
        """Read a whole object before it is adopted, because a durability level is promised on its strips. Returns True
        when all of them are right."""
        try:
            await S3Chunk(self, self._settings, header, layout, etag).check(range(len(layout.slabs)))
        except DataLoss:
            return False
        return True

    async def _put(
        self, header: ChunkHeader, layout: ChunkLayout, source: Sequence[Bytes], condition: Condition
    ) -> int:
        """Write the object. Returns its bytes; 0: another node's object is there instead."""
        way = self._choice.way_of(header.fingerprint)
        if way.is_measured:
            cost = await self._run(self._lanes.writers, encoding_cost, header, layout, source)
            self._choice.measured(header.fingerprint, cost)
        making = Making(header=header, layout=layout, encoding=way.encoding, sealing=self._trust.sealing())
        work = (write_object, self._settings, header.storage_key, making, source, condition)
        slow_s = grace_s(self._settings.writer_count, layout.total_bytes)
        try:
            put: Timed[int] = await self._run(self._lanes.writers, timed, *work, grace_s=slow_s)
        except PermissionDenied as error:
            self._denied = (self._clock.monotonic() + DENIED_S, error.message)
            raise
        self._denied = None
        if way.encoding is Encoding.RAW:
            self._choice.sent(put.result, put.seconds)
        return put.result

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        self._allowance.used(0, len(storage_keys))
        await self._run(self._lanes.writers, remove_objects, self._settings, list(storage_keys))

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        """Do nothing: an object's age is that of its write."""

    # ------------------------------------------------------------ told

    def stalled_s(self) -> float:
        return max(pace.stalled_s(self._clock) for pace in self._pace.values())

    async def close(self) -> None:
        jobs = [job for pace in self._pace.values() for job in pace.given]
        if jobs:
            await asyncio.wait(jobs, timeout=CLOSE_S_MAX)
        for workers in self._lanes:
            workers.close()
        self._allowance.keep()
        if self._claims is not None:
            await self._claims.close()

    def statistics(self) -> TierStatistics:
        """Return the account without the bucket's content, which is not known: ``kvstore scan`` counts it, in its own
        time."""
        reached = self._allowance.reached
        problem = f"tiers.s3.{reached} is reached" if reached else self._bucket.problem
        state = "failing" if problem else "read-only" if self._denied else "up"
        denied = "the bucket does not take writes from this node: give it s3:PutObject" if self._denied else ""
        return TierStatistics(
            name=self.name, state=state, capacity_bytes=0, file_bytes=0, allocated_bytes=0, free_bytes=0,
            quarantined_bytes=0, overhead_bytes=0, chunk_count=0, read_bytes=self._read_bytes,
            written_bytes=self._written_bytes, envelope=self._trust.kind,
            reason=problem or denied, encodings=self._choice.figures(),
        )  # fmt: skip
