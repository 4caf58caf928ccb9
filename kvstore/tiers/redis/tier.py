"""Implements the tier's contract: byte movers move the bytes, redis-py does all other calls."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from kvstore.chunk import ChunkHeader, ChunkLayout, Making, Trust, encoding_cost
from kvstore.config import RedisAddress, RedisSettings
from kvstore.errors import DataLoss, Exhausted, PermissionDenied, Unavailable
from kvstore.seams import Clock, SystemRandom, Workers
from kvstore.seams.jobs import done
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Encoding, Tier
from kvstore.tiers.choice import EncodingChoice
from kvstore.tiers.contract import Buffer, ChunkName, TierStatistics, UploadState, host_memory
from kvstore.tiers.pace import Timed, Waits, grace_s, limit_s, timed
from kvstore.tiers.redis.access import Server
from kvstore.tiers.redis.chunk import RedisChunk, read_opened
from kvstore.tiers.redis.control import Control
from kvstore.tiers.redis.embedded import EmbeddedServer
from kvstore.tiers.redis.errands import Errands
from kvstore.tiers.redis.moves import JOB_S_MAX, PartRead, Written, write_copy
from kvstore.tiers.redis.names import ChunkKeys
from kvstore.tiers.redis.reads import AHEAD, ChunkReads, Reads
from kvstore.tiers.redis.replies import MOVED, NO_WRITES
from kvstore.tiers.redis.topology import topology_of

ATTEMPT_BYTES = 16
WHO_BYTES = 16
_random = SystemRandom()


class RedisTier:
    """Chunks in a Redis or Valkey. ``readers`` and ``writers`` move bytes, in any process, and belong to the tier.

    Raises: as in the contract. A server that is full, or drops a chunk while it is written, is Exhausted; so is one
    that keeps a copy of the chunk that this node cannot read. One that takes no writes is PermissionDenied to a write:
    it may well be read.
    """

    name = "redis"
    kind = Tier.REDIS
    durability = Durability.SHARED

    def __init__(
        self, settings: RedisSettings, *, readers: Workers, writers: Workers, clock: Clock,
        own: EmbeddedServer | None = None, trust: Trust | None = None,
    ) -> None:  # fmt: skip
        """``own``: the server, where it is the tier's. ``trust``: the copies that are believed, and the key that seals
        new ones. Connects to nothing yet."""
        address = RedisAddress(kind="server", path=own.path) if own else RedisAddress.of(settings.url)
        self._own = own
        self._trust = trust or Trust()
        self._choice = EncodingChoice(settings.encoding)
        self._keys = ChunkKeys(settings.prefix)
        self._who = _random.bytes(WHO_BYTES).hex().encode()
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._clock = clock
        self._waits = Waits(clock)
        topology = topology_of(settings, address, settings.control_count)
        self._control = Control(topology, settings.control_count, self._waits)
        errands = Control(topology, 1, Waits(clock))  # waits of its own: background calls do not count as stalls
        self._errands = Errands(errands, clock, 0 if settings.write == "never" else self._ttl_ms)
        self._readers, self._writers = readers, writers
        self._reads = Reads(readers, settings.reader_count, clock, self._waits)
        self._write_count = settings.writer_count * AHEAD
        self._turns = asyncio.Semaphore(self._write_count)
        self._failures: Counter[Server] = Counter()
        self._is_closed = False
        self._read_bytes = self._written_bytes = 0
        self._refused = ""
        """The reason why the server takes no writes; empty while it does."""

    def begin(self) -> None:
        """Begin to ask for the server's state, from the running loop. The first call does it, too."""
        self._errands.begin()

    # ------------------------------------------------------------ what is there

    async def probe(
        self, storage_keys: Sequence[bytes], timeout_s: float, chains: Sequence[int] = ()
    ) -> Sequence[bool | None]:
        self.begin()
        return await self._control.there(self._keys.chunks(storage_keys), timeout_s)

    async def claim(self, storage_keys: Sequence[bytes], claim_s: float, timeout_s: float) -> Sequence[UploadState]:
        self.begin()
        claims = [self._keys.claim(key, self.name) for key in storage_keys]
        chunks = self._keys.chunks(storage_keys)
        return await self._control.claim(claims, chunks, self._who, int(claim_s * 1000), timeout_s)

    def takes(self, layout: ChunkLayout) -> bool:
        return True

    async def open(self, name: ChunkName, ahead: Sequence[Buffer] = ()) -> RedisChunk | None:
        self.begin()
        key = self._keys.chunk(name.storage_key)
        found = await self._control.open(key, self._trust.header_bytes(name.layout))
        header = None if found is None else read_opened(name, found, self._trust)
        if header is None:
            return None
        self._errands.used(key)
        return RedisChunk(self, ChunkReads(await self._control.server_of(key), key), header, name)

    async def touch(self, storage_keys: Sequence[bytes]) -> None:
        """Have these chunks stay for another ``ttl_s``, and count as used where the engine drops unused keys."""
        for each in self._keys.chunks(storage_keys):
            self._errands.used(each)

    async def remove(self, storage_keys: Sequence[bytes]) -> None:
        self.begin()
        await self._control.remove(self._keys.chunks(storage_keys))

    # ------------------------------------------------------------ bytes

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Buffer]) -> None:
        self.begin()
        key = self._keys.chunk(header.storage_key)
        unfinished = self._keys.unfinished(header.storage_key, _random.bytes(ATTEMPT_BYTES))
        claim = self._keys.claim(header.storage_key, self.name)
        try:
            written = await self._write(unfinished, header, layout, host_memory(pieces))
            key_ids, begun_s = b"".join(self._trust.ring.key_ids), self._clock.monotonic()
            outcome = await self._control.commit(
                unfinished, key, claim, written.field_count, written.head, self._ttl_ms, key_ids
            )
            self._choice.answered(self._clock.monotonic() - begun_s)
        except BaseException as error:
            self._errands.given_up(unfinished)
            self._errands.given_up(claim)
            if isinstance(error, DataLoss):  # a foreign key there: the copy in memory is not damaged
                raise Unavailable(f"tiers.redis did not take a chunk: {error.message}") from error
            if isinstance(error, Unavailable) and NO_WRITES in error.fields:
                self._refused = error.message
                raise PermissionDenied(error.message) from error
            raise
        self._refused = ""
        if outcome == "incomplete":
            raise Exhausted(
                "the engine of tiers.redis drops chunks while they are written: raise its maxmemory, or write less"
            )
        if outcome == "newer":
            raise Exhausted(
                "tiers.redis: a newer release, or a node with another envelope key, has stored this chunk: update "
                "this node, or its key file"
            )
        self._written_bytes += written.byte_count

    async def _write(self, key: bytes, header: ChunkHeader, layout: ChunkLayout, source: list[Bytes]) -> Written:
        """Write a chunk's fields."""
        way = self._choice.way_of(header.fingerprint)
        if way.is_measured:
            async with self._turns:
                cost = await done(self._writers, encoding_cost, header, layout, source)
            self._choice.measured(header.fingerprint, cost)
        making = Making(header=header, layout=layout, encoding=way.encoding, sealing=self._trust.sealing())
        written, seconds = await self._move(layout.total_bytes, key, making, source)
        if way.encoding is Encoding.RAW:
            self._choice.sent(written.byte_count, seconds)
        return written

    async def _move(self, byte_count: int, key: bytes, making: Making, source: list[Bytes]) -> Timed[Written]:
        """Have a copy made and written, and once more where another server has the key by now. While a slot is being
        migrated no chunk of it is written: then no server takes a command with two keys."""
        try:
            return await self._move_once(byte_count, key, making, source)
        except Unavailable as error:
            if MOVED not in error.fields:
                raise
            await self._control.followed(key, str(error.fields[MOVED]))
        return await self._move_once(byte_count, key, making, source)

    async def _move_once(self, byte_count: int, key: bytes, making: Making, source: list[Bytes]) -> Timed[Written]:
        server = await self._control.server_of(key)
        failure_count = self._failures[server]
        async with self._turns:
            # do not wait for a dead server one after the other
            if self._is_closed or failure_count != self._failures[server]:
                raise self._control.as_part(
                    Unavailable("tiers.redis: the server failed others meanwhile: see tiers.redis.url")
                )
            server = await self._control.server_of(key)  # another one may be the primary by now
            with self._waits.asked(grace_s(self._write_count, byte_count)) as answered:
                until_s = self._clock.monotonic() + limit_s(JOB_S_MAX, byte_count)
                try:
                    found = await done(self._writers, timed, write_copy, server, key, making, source, until_s)
                except Unavailable as error:
                    if NO_WRITES in error.fields:
                        answered()
                    self._failed(error, server)
                    raise
                answered()
                return found

    async def read(self, reads: ChunkReads, part: PartRead) -> bool:
        """Read a part of an open chunk, and once more where another server has it by now."""
        try:
            return await self._reads.read(reads, part)
        except Unavailable as error:
            self._failed(error, reads.server)
            if MOVED not in error.fields:
                raise
            reads.server = await self._control.followed(reads.key, str(error.fields[MOVED]))
        return await self._reads.read(reads, part)

    def _failed(self, error: Unavailable, server: Server) -> None:
        """Have other writes not wait for a server that fails, and have it looked for anew: another may be the primary
        by now. Those to other nodes of a cluster go on."""
        self._control.as_part(error)
        if MOVED not in error.fields:
            self._failures[server] += NO_WRITES not in error.fields
            self._control.doubt()

    def was_read(self, byte_count: int) -> None:
        self._read_bytes += byte_count

    # ------------------------------------------------------------ tell

    def stalled_s(self) -> float:
        return self._waits.stalled_s()

    async def close(self) -> None:
        self._is_closed = True
        await self._errands.end()
        self._reads.give_up("tiers.redis is closed")
        for workers in (self._readers, self._writers):
            workers.close()
        await self._control.close()
        if self._own is not None:
            self._own.stop()

    def statistics(self) -> TierStatistics:
        """Return the account of the whole engine, with other nodes' chunks and other users' keys, as it was some
        seconds ago. No chunks are counted: the engine counts keys, and most of them may be others than chunks."""
        account = self._errands.account
        capacity = max(account.capacity_bytes, account.used_bytes)
        state = "failing" if self._errands.problem else "read-only" if self._refused else "up"
        return TierStatistics(
            name=self.name, state=state, capacity_bytes=capacity,
            file_bytes=account.used_bytes, allocated_bytes=account.used_bytes, free_bytes=0, quarantined_bytes=0,
            overhead_bytes=0, chunk_count=0, read_bytes=self._read_bytes,
            written_bytes=self._written_bytes, envelope=self._trust.kind,
            reason=self._errands.problem or self._refused, encodings=self._choice.figures(),
        )  # fmt: skip
