"""A shared tier as a target of writes: whether a chunk is needed there, and how it goes there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kvstore.catalog import Catalog
from kvstore.chunk import ChunkHeader, ChunkLayout
from kvstore.errors import DataLoss, Exhausted, KVStoreError, PermissionDenied, Unavailable
from kvstore.movement.breaker import told_of
from kvstore.movement.names import ChunkNames
from kvstore.movement.questions import PROBE_COUNT_MAX
from kvstore.movement.shared import REUSED, SILENT, SharedCopies, is_for_others, part_in, reason_of
from kvstore.movement.sources import WENT
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, Residency, UploadState, WritePolicy
from kvstore.tiers.pace import limit_s

WRITE_S_MAX = 30.0
"""A write that takes more seconds than this plus the time for its bytes (``limit_s``) has failed."""
ASK_S_MAX = 2.0
"""Seconds that a write waits for the answer whether it is needed."""
ASK_COUNT_MAX = 16
"""Waiting chunks in one question. The question claims the chunks that are not there, so nodes that store the same
chunks share the work in parts of this size."""
ANSWER_AGE_S_MAX = 2.0
"""An answer that is more seconds old is asked for again."""
CLAIM_S, CLAIM_BYTES_PER_S, CLAIM_S_MAX = 5.0, 20e6, 15.0
"""Seconds for which other nodes leave chunks to us: CLAIM_S plus the time for the chunks' bytes, at most CLAIM_S_MAX. A
node that dies meanwhile delays the others no longer than that."""
CONFIRM_S_MAX = 10.0
"""Seconds that an operator's command waits for a tier's word on chunks that are to leave the node."""
_log = logging.getLogger("kvstore.movement")


class SharedTarget:
    """A shared tier as a target of writes. ``written``: called for each chunk that the tier has by now.

    A short chunk does not go there: other nodes cannot know its length, and it is worth little to them. Nor does a
    value that may be replaced: a node would find the old one.
    """

    is_local = False

    def __init__(
        self, catalog: Catalog, shared: SharedCopies, names: ChunkNames, written: Callable[[int], None],
        counters: Counters,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._written = written
        self._names = names
        self._counters = counters
        self.shared = shared
        self.name = shared.tier.name
        self.durability: Durability = shared.tier.durability
        self._answers: dict[bytes, UploadState] = {}
        self._answered_s = 0.0
        self._asking = asyncio.Lock()

    def has(self, row: int) -> bool:
        return row in self.shared

    def is_proven(self, row: int) -> bool:
        return self.shared.is_seen(row)

    def admits(self, row: int) -> bool:
        space = self._catalog.space_of(row)
        if space.model_spec is None:  # an earlier life's: its size is not known before it is registered
            return False
        is_whole = self._catalog.table.token_counts[row] == space.spec.chunk_tokens
        return is_for_others(space) and is_whole and self.shared.tier.takes(self._names.of(row).layout)

    def wants(self, row: int) -> bool:
        policy = self.shared.write_policy
        if policy is WritePolicy.REUSE:
            return self._catalog.table.uses[row] >= REUSED
        return policy is WritePolicy.BACK

    async def confirm(self, rows: Sequence[int]) -> None:
        """See ``MoveTarget``. A chunk that was seen a week ago may have been dropped since."""
        table, names = self._catalog.table, self._names
        seen = [(row, table.identity(row), names.of(row).storage_key) for row in rows if self.shared.is_seen(row)]
        for start in range(0, len(seen), PROBE_COUNT_MAX):
            part = seen[start : start + PROBE_COUNT_MAX]
            is_asked = self.shared.is_asked
            answers = await self.shared.ask([key for *_, key in part], CONFIRM_S_MAX) if is_asked else None
            for (row, identity, _), is_there in zip(part, answers or [None] * len(part), strict=True):
                if not is_there and table.identity(row) == identity:
                    self.shared.doubt(row) if is_there is None else self.shared.take(row)

    async def finds(self, row: int, others: Iterable[int], *, is_proof: bool) -> UploadState:
        """See ``MoveTarget``. Many nodes that meet one prompt send it once. The tier is asked first; the same question
        asks for the waiting chunks in ``others``, and claims those that the tier lacks. The tier's word is a hint:
        nothing is promised on it before the chunk was read."""
        shared, key = self.shared, self._names.of(row).storage_key
        self._check_asked()
        state = await self._said(row, others)
        if state is not UploadState.THERE:
            return state
        if is_proof or key in shared.bad:  # another node may have put it right: a further write would disturb readers
            if not await self.is_whole(row):
                return UploadState.FREE
            shared.see(row)
        else:
            shared.put(row)
        self._written(row)
        self._counters.add_of(self.name, "present_chunks")
        return UploadState.THERE

    async def _said(self, row: int, others: Iterable[int]) -> UploadState:
        """Return the tier's word on a chunk. An answer is used once, and soon."""
        name = self._names.of(row)
        if not self._is_answered(name.storage_key):
            async with self._asking:
                if not self._is_answered(name.storage_key):
                    await self._ask(name, islice(filter(self._is_to_go, others), ASK_COUNT_MAX - 1))
        return self._answers.pop(name.storage_key, UploadState.FREE)

    def _is_to_go(self, row: int) -> bool:
        """Return True when a row that waits still has a chunk for the tier: that may have left meanwhile."""
        return bool(self._catalog.table.digests[row]) and self.admits(row)

    async def _ask(self, name: ChunkName, others: Iterable[int]) -> None:
        names = [name, *(self._names.of(row) for row in others)]
        keys = [each.storage_key for each in names]
        claim_s = min(CLAIM_S + sum(each.layout.total_bytes for each in names) / CLAIM_BYTES_PER_S, CLAIM_S_MAX)
        found = await self.shared.claim(keys, claim_s, ASK_S_MAX)
        self._answers = dict(zip(keys, found or [UploadState.FREE] * len(keys), strict=True))
        self._answered_s = self.shared.clock.monotonic()

    def _is_answered(self, key: bytes) -> bool:
        return key in self._answers and self.shared.clock.monotonic() - self._answered_s < ANSWER_AGE_S_MAX

    async def is_whole(self, row: int) -> bool:
        """Return True when the copy there is the chunk, by every check that a read makes. A copy that goes while it is
        read is looked for once more: it was dropped, or another node wrote it anew. Raises Unavailable."""
        name, shared = self._names.of(row), self.shared
        try:
            async with asyncio.timeout(limit_s(WRITE_S_MAX, name.layout.total_bytes)):
                try:
                    found = await self._read_through(row, name)
                except DataLoss as error:
                    if error.fields.get("reason") not in WENT:
                        raise
                    found = await self._read_through(row, name)
        except DataLoss:
            shared.is_bad(name.storage_key)
            return False
        except Exception as error:
            shared.failed(error, reason_of(error))
            reason = f"tiers.{self.name} did not give a chunk that it has: {error!r}"
            raise Unavailable(reason, **part_in(error)) from error
        shared.bad.pop(name.storage_key, None)
        return found

    async def _read_through(self, row: int, name: ChunkName) -> bool:
        """Read a whole copy. False: there is none. Raises DataLoss; the tier's errors."""
        stored = await self.shared.tier.open(ChunkName(name.storage_key, name.layout))  # any write of it
        if stored is None:
            return False
        try:
            if not self._names.fits(row, stored.header):
                raise DataLoss("another chunk lies where this one should", reason="header")
            await stored.check(range(len(name.layout.slabs)))
        finally:
            stored.close()
        return True

    async def check(self, row: int) -> bool | None:
        """Read the tier's whole copy of a chunk. True: it passed its checks. False: it failed, and is written anew when
        the chunk is stored again. None: the tier did not give it."""
        try:
            is_whole = await self.is_whole(row)
        except KVStoreError as error:
            _log.warning("a copy could not be read", extra={"tier": self.name, "reason": error.message})
            return None
        if not is_whole:
            self.shared.take(row)
            return False if self._names.of(row).storage_key in self.shared.bad else None
        return True

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        """Write a chunk. Returns 0: a shared tier's copies have no number. Raises Exhausted when the engine is full,
        PermissionDenied where this node may only read; else Unavailable, also where the tier is not asked now, or takes
        too long. An engine's DataLoss becomes Unavailable, too: it must not condemn the copy in memory."""
        shared = self.shared
        self._check_asked()
        seconds = limit_s(WRITE_S_MAX, layout.total_bytes)
        try:
            async with asyncio.timeout(seconds):
                await shared.tier.write(header, layout, pieces)
        except TimeoutError as error:
            reason = f"tiers.{self.name} took longer than {seconds:.0f} s for a chunk"
            shared.breaker.failed(reason)
            raise Unavailable(reason) from error
        except (Exhausted, PermissionDenied):  # it answers, and may well be read
            raise
        except Exception as error:
            reason = told_of(self.name, str(error))
            shared.failed(error, reason)
            raise Unavailable(reason, **part_in(error)) from error
        shared.worked()
        return 0

    def _check_asked(self) -> None:
        if not self.shared.is_asked:
            raise Unavailable(self.shared.breaker.reason or SILENT)

    def keep(self, row: int, residency: Residency) -> None:
        self.shared.see(row)
        self.shared.bad.pop(self._names.of(row).storage_key, None)
        self._written(row)

    def discard(self, row: int, residency: Residency) -> None:
        """Keep the copy: it is good for other nodes."""
