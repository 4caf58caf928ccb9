"""Shared tiers: what other nodes may have stored. Nobody knows for certain what they have: a hint, then a probe, then
the read, which alone decides."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstore.catalog import Catalog, Namespace
from kvstore.chunk import ChunkHeader, ChunkLayout, write_mark
from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, KVStoreError, Unavailable
from kvstore.keys import ROOT_DIGEST
from kvstore.movement.breaker import Breaker
from kvstore.movement.names import ChunkNames
from kvstore.movement.sources import may_enter
from kvstore.seams import Clock
from kvstore.seams.memory import Bytes
from kvstore.spec import Durability, Tier
from kvstore.telemetry import Counters
from kvstore.tiers import ChunkName, Residency, SharedTier, StoredChunk, TierStatistics

STALL_S = 2.0
"""A shared tier that has kept a request for so long is asked nothing more until it answers."""
WRITE_S_MAX = 30.0
"""A write that takes longer has failed."""
CLOSE_S_MAX = 5.0
"""A stop goes on without a tier that takes longer to close."""
REARM_S_MIN = 0.1
PROBE_COUNT_MAX = 1024
"""Keys of one question."""
HEARD_S = 5.0
"""For how long an answer is not asked for again."""
HEARD_COUNT_MAX = 65_536
RANK = 1000
"""Of the fastest shared tier among sources: all of them are slower than local ones."""
_log = logging.getLogger("kvstore.movement")


class SharedCopies:
    """One shared tier, and of which rows it was there when we last knew: a bit of the catalog's column."""

    def __init__(self, tier: SharedTier, lookup_s_max: float, catalog: Catalog, clock: Clock, rank: int) -> None:
        self.tier = tier
        self.lookup_s_max = lookup_s_max
        self.rank = rank
        self.breaker = Breaker(tier.name, clock)
        self._column = catalog.table.shared
        self._bit = catalog.table.new_shared_bit()

    def __contains__(self, row: int) -> bool:
        return bool(self._column[row] & self._bit)

    def put(self, row: int) -> None:
        """The tier has the chunk, or says so."""
        self._column[row] |= self._bit

    def take(self, row: int) -> None:
        """It does not."""
        self._column[row] &= ~self._bit

    @property
    def is_asked(self) -> bool:
        """Whether the tier answers, as far as we know."""
        return not self.breaker.is_open and self.tier.stalled_s() <= STALL_S

    def statistics(self) -> TierStatistics:
        """The tier's account, and whether it is asked."""
        found = replace(self.tier.statistics(), is_shared=True)
        return found if self.is_asked else replace(found, state="failing")


class SharedTarget:
    """A shared tier as a target of writes. A short chunk does not go there: other nodes cannot know how long it is, and
    it is worth little to them. Nor does a value that may be replaced: a node would find the old one."""

    def __init__(self, catalog: Catalog, shared: SharedCopies, beyond: Beyond) -> None:
        self._catalog = catalog
        self._shared = shared
        self._beyond = beyond
        self.name = shared.tier.name
        self.durability: Durability = shared.tier.durability

    def has(self, row: int) -> bool:
        return row in self._shared

    def is_proven(self, row: int) -> bool:
        return row in self._shared

    def admits(self, row: int) -> bool:
        space = self._catalog.space_of(row)
        return is_for_others(space) and self._catalog.table.token_counts[row] == space.spec.chunk_tokens

    async def write(self, header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> Residency:
        """0: a shared tier's copies have no number. Raises Exhausted when the engine is full; else Unavailable, also
        where it is not asked now, or takes too long: what an engine says never condemns what memory has."""
        shared = self._shared
        if not shared.is_asked:
            raise Unavailable("no answer at present: it is left alone for a while")
        try:
            async with asyncio.timeout(WRITE_S_MAX):
                await shared.tier.write(header, layout, pieces)
        except TimeoutError as error:
            shared.breaker.failed()
            raise Unavailable(f"tiers.{self.name} took longer than {WRITE_S_MAX:.0f} s for a chunk") from error
        except Exhausted:
            raise
        except Exception as error:
            shared.breaker.failed()
            raise Unavailable(f"tiers.{self.name} did not take a chunk: {error}") from error
        shared.breaker.worked()
        return 0

    def keep(self, row: int, residency: Residency) -> None:
        self._shared.put(row)
        self._beyond.written(row)

    def discard(self, row: int, residency: Residency) -> None:
        """What was written is good for others."""


def is_for_others(space: Namespace) -> bool:
    """Whether chunks of this namespace go to shared tiers and come from them."""
    return not space.may_be_replaced


class SharedSource:
    """A chunk that a shared tier is said to have."""

    patience_s = STALL_S

    def __init__(
        self, shared: SharedCopies, row: int, chunk: ChunkName, catalog: Catalog, names: ChunkNames, beyond: Beyond
    ) -> None:
        self.name, self.kind, self.rank = shared.tier.name, shared.tier.kind, shared.rank
        self._shared = shared
        self._row = row
        self._chunk = chunk
        self._catalog = catalog
        self._names = names
        self._beyond = beyond

    async def open(self) -> StoredChunk | None:
        found = await self._shared.tier.open(self._chunk)
        if found is None:
            self._forget()
        elif not self._names.fits(self._row, found.header):
            found.close()
            raise DataLoss("another chunk lies where this one should", reason="header")
        return found

    def is_current(self, header: ChunkHeader) -> bool:
        return may_enter(self._catalog, self._row, write_mark(header.write_id), self._chunk.mark)

    def worked(self) -> None:
        self._shared.breaker.worked()

    async def failed(self, error: KVStoreError) -> None:
        """What fails its check is written anew when the chunk is stored again."""
        if isinstance(error, DataLoss):
            self._forget()
        else:
            self._shared.breaker.failed()

    def late(self) -> float:
        """A tier that answers others meanwhile is busy: it is waited for."""
        more_s = self.patience_s - self._shared.tier.stalled_s()
        if more_s >= REARM_S_MIN:
            return more_s
        self._shared.breaker.failed()
        return 0.0

    def _forget(self) -> None:
        self._shared.take(self._row)
        self._beyond.was_wrong(self._chunk.storage_key, self._shared)


class Whereabouts(NamedTuple):
    """Where one chunk is: of each part the shared tier that is said to have it, None where the node has it."""

    parts: tuple[SharedCopies | None, ...]

    @property
    def kind(self) -> Tier | None:
        """The slowest of them; None where the node has all parts."""
        slowest = max((each for each in self.parts if each), key=lambda each: each.rank, default=None)
        return slowest.tier.kind if slowest else None


class Heard(NamedTuple):
    """What was said of one key, and when: which tier has it, or which one has it not although it said so; None: that
    it is here, or nowhere."""

    at_s: float
    shared: SharedCopies | None
    is_there: bool


_HERE = Heard(0.0, None, is_there=True)


class Beyond:
    """All shared tiers of one tenant, the fastest first, and what was heard of them lately."""

    def __init__(self, catalog: Catalog, names: ChunkNames, clock: Clock, counters: Counters) -> None:
        self.tiers: list[SharedCopies] = []
        self._catalog = catalog
        self._names = names
        self._clock = clock
        self._counters = counters
        self._heard: OrderedDict[bytes, Heard] = OrderedDict()

    def add(self, tier: SharedTier, lookup_s_max: float) -> SharedCopies:
        """Take a tier into use, slower than those before it."""
        shared = SharedCopies(tier, lookup_s_max, self._catalog, self._clock, RANK + len(self.tiers))
        self.tiers.append(shared)
        return shared

    def source(self, row: int) -> SharedSource | None:
        """The fastest shared tier that is said to have a chunk, and answers."""
        for shared in self.tiers:
            if row in shared and shared.is_asked:
                chunk = self._names.of(row)
                if not self._catalog.table.is_resident(row):
                    chunk = ChunkName(chunk.storage_key, chunk.layout)  # any write of it
                return SharedSource(shared, row, chunk, self._catalog, self._names, self)
        return None

    # ------------------------------------------------------------ what they have

    async def find(self, spaces: Sequence[Namespace], digests: Sequence[bytes], timeout_s: float) -> list[Whereabouts]:
        """How far a chain goes on beyond the node: its leading chunks of which every part is here or said to be in a
        shared tier. As ``find_all``."""
        return (await self.find_all([(spaces, digests)], timeout_s))[0]

    async def find_all(
        self, chains: Sequence[tuple[Sequence[Namespace], Sequence[bytes]]], timeout_s: float
    ) -> list[list[Whereabouts]]:
        """``find`` of each chain. One question to each tier, answered within the tier's own bound, or not at all.
        ``timeout_s``: for how long the caller is waited for; half of that is left, for what the node has itself."""
        wanted = []
        for spaces, digests in chains:
            wanted.append(self._keys(spaces, digests))
            await self._clock.sleep(0)  # they may be many, each of many chunks: others are answered in between
        asked = dict.fromkeys(key for chunks in wanted for keys in chunks for key in keys if key)
        unheard = [key for key in asked if self._may_be_in(self.tiers[-1], key)][:PROBE_COUNT_MAX]
        await self._ask_all(unheard, self._clock.monotonic() + timeout_s / 2)
        return [self._found(*chain, chunks) for chain, chunks in zip(chains, wanted, strict=True)]

    def _found(
        self, spaces: Sequence[Namespace], digests: Sequence[bytes], chunks: Sequence[Sequence[bytes]]
    ) -> list[Whereabouts]:
        """By what was heard."""
        found: list[Whereabouts] = []
        for digest, keys in zip(digests, chunks, strict=False):
            if any(not key and digest not in space.index for space, key in zip(spaces, keys, strict=True)):
                break  # it left the node meanwhile
            heard = [self._heard_of(key) if key else _HERE for key in keys]
            if not all(each and each.is_there for each in heard):
                break
            found.append(Whereabouts(tuple(each.shared for each in heard if each)))
        return found

    def _keys(self, spaces: Sequence[Namespace], digests: Sequence[bytes]) -> list[list[bytes]]:
        """The storage key of each part of each chunk; none where the node has that part. Ends before a chunk that is
        being stored here, and before all where other nodes have nothing of these."""
        chunks: list[list[bytes]] = []
        if not self.tiers or not all(map(is_for_others, spaces)):
            return chunks
        for digest in digests[: PROBE_COUNT_MAX // len(spaces)]:
            if any(digest in space.pending for space in spaces):
                break
            chunks.append([b"" if digest in space.index else self._names.key(space, digest) for space in spaces])
        return chunks

    async def _ask_all(self, keys: list[bytes], until_s: float) -> None:
        """Each tier for what no faster one has. What none of them has is remembered only if all of them said so."""
        have_all_answered = True
        for shared in self.tiers:
            timeout_s = min(shared.lookup_s_max, until_s - self._clock.monotonic())
            asked = [key for key in keys if self._may_be_in(shared, key)]
            answers = await self._ask(shared, asked, timeout_s) if asked and shared.is_asked and timeout_s > 0 else None
            have_all_answered &= answers is not None or not asked
            found = {key for key, is_there in zip(asked, answers or [False] * len(asked), strict=True) if is_there}
            for key in found:
                self._remember(key, Heard(self._clock.monotonic(), shared, is_there=True))
            keys = [key for key in keys if key not in found]
        if have_all_answered:
            for key in keys:
                self._remember(key, Heard(self._clock.monotonic(), None, is_there=False))

    async def _ask(self, shared: SharedCopies, keys: Sequence[bytes], timeout_s: float) -> Sequence[bool] | None:
        """None: no answer. One that is late is counted, and no failure of the tier."""
        name = shared.tier.name
        self._counters.add_of(name, "asked_chunks", len(keys))
        try:
            async with asyncio.timeout(timeout_s):
                answers = list(await shared.tier.probe(keys, timeout_s))
            if len(answers) != len(keys):
                raise Unavailable(f"{len(answers)} answers for {len(keys)} keys")
        except (TimeoutError, DeadlineExceeded):
            self._counters.add_of(name, "late_answers")
            return None
        except Exception as error:  # noqa: BLE001 - the boundary: what an engine does fails no lookup
            _log.warning("a shared tier could not be asked", extra={"tier": name, "reason": str(error)})
            shared.breaker.failed()
            return None
        shared.breaker.worked()
        return answers

    def _heard_of(self, key: bytes) -> Heard | None:
        """What was heard lately."""
        heard = self._heard.get(key)
        return heard if heard and self._clock.monotonic() - heard.at_s < HEARD_S else None

    def _may_be_in(self, shared: SharedCopies, key: bytes) -> bool:
        """Whether a tier is to be asked: nothing was heard lately, or only that a faster one was wrong."""
        heard = self._heard_of(key)
        if heard is None:
            return True
        return not heard.is_there and heard.shared is not None and heard.shared.rank < shared.rank

    def _remember(self, key: bytes, heard: Heard) -> None:
        self._heard[key] = heard
        self._heard.move_to_end(key)
        if len(self._heard) > HEARD_COUNT_MAX:
            self._heard.popitem(last=False)

    def was_wrong(self, key: bytes, shared: SharedCopies) -> None:
        """A tier that was said to have a chunk has it not, or not whole."""
        self._remember(key, Heard(self._clock.monotonic(), shared, is_there=False))

    def written(self, row: int) -> None:
        """A tier has it by now, whatever was heard before."""
        self._heard.pop(self._names.of(row).storage_key, None)

    # ------------------------------------------------------------ rows

    def rows(
        self, spaces: Sequence[Namespace], digests: Sequence[bytes], start: int, found: Sequence[Whereabouts]
    ) -> list[list[int]]:
        """The rows, part by part, of a chain's chunks from number ``start`` on, each held by the caller from now on
        (``release``). Ends before a chunk that was claimed by a store meanwhile, or that is nowhere by now. Nothing is
        held when it raises: MemoryError, OverflowError."""
        chains: list[list[int]] = [[] for _ in spaces]
        try:
            self._fill(chains, spaces, digests, start, found)
        except BaseException:
            self.release(chains)
            raise
        return chains

    def release(self, chains: Iterable[Iterable[int]]) -> None:
        """Undo the holds of ``rows``."""
        for chain in chains:
            for row in chain:
                self._catalog.unhold(row)

    def _fill(
        self, chains: list[list[int]], spaces: Sequence[Namespace], digests: Sequence[bytes], start: int,
        found: Sequence[Whereabouts],
    ) -> None:  # fmt: skip
        for number, each in enumerate(found, start):
            digest, parent = digests[number], digests[number - 1] if number else ROOT_DIGEST
            parts = list(zip(spaces, each.parts, chains, strict=True))
            if any(digest in space.pending or (not shared and digest not in space.index) for space, shared, _ in parts):
                break
            for space, shared, chain in parts:
                row = self._catalog.known_row(space, digest, parent, space.spec.chunk_tokens)
                self._catalog.table.hold(row)
                if shared is not None:
                    shared.put(row)
                chain.append(row)

    async def close(self) -> None:
        """Of every tier. What one raises, or that it takes too long, is said: the stop goes on."""
        async with asyncio.TaskGroup() as group:
            for shared in self.tiers:
                group.create_task(_closed(shared.tier))
        self.tiers.clear()


async def _closed(tier: SharedTier) -> None:
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await tier.close()
    except Exception as error:  # noqa: BLE001 - the boundary: the engine is not ours
        _log.warning("a tier was not closed", extra={"tier": tier.name, "reason": repr(error)})
