"""The shared tiers of a tenant, and chunks that come from them. Their content is not known but hinted: a tier is asked,
its answer is a hint for some seconds, and only a read decides."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import compress, repeat
from typing import NamedTuple

from kvstore.catalog import Catalog, Namespace
from kvstore.errors import Unavailable
from kvstore.keys import ROOT_DIGEST
from kvstore.movement.names import ChunkNames
from kvstore.movement.questions import PROBE_COUNT_MAX, in_questions
from kvstore.movement.reach import Beyond, ChunkHint, PartReach, Reach
from kvstore.movement.shared import SharedCopies, is_for_others
from kvstore.movement.shared_source import SharedSource
from kvstore.seams import Clock
from kvstore.spec import Tier
from kvstore.telemetry import NO_TRACING, Counters, Tracing
from kvstore.tiers import ChunkName, SharedUse

CLOSE_S_MAX = 5.0
"""A stop goes on without a tier that takes more seconds to close."""
CHECK_S_MAX = 12.0
"""Seconds that a shared tier may take for its answer to ``check``."""
HINT_S = 5.0
"""Seconds for which an answer is not asked for again."""
ABSENT_BOUNDS = 20
"""As many bounds of the slowest tier's lookups the answer that no tier has a key stands, and ``HINT_S`` at most: 0.1 s
with Redis, and a second with S3, which has its price. Another node may be sending the key, and engines wait for that
(``kvstore_prefilled``)."""
HINT_COUNT_MAX = 65_536
RANK = 1000
"""The rank of the fastest shared tier among sources: all shared tiers are slower than local ones."""
_log = logging.getLogger("kvstore.movement")


class KeyHint(NamedTuple):
    """The last answer on one key, and when it came. ``shared``: the tier that has the key (``is_there``), or that said
    so and was wrong. None: the key is on the node (``is_there``), or nowhere."""

    at_s: float
    shared: SharedCopies | None
    is_there: bool


class TierWord(NamedTuple):
    """The keys that a tier says it has. Not ``is_whole``: it may have more, as it was not asked, or did not answer for
    all."""

    kind: Tier
    keys: set[bytes]
    is_whole: bool


_HERE = KeyHint(0.0, None, is_there=True)


class SharedTiers:
    """All shared tiers of one tenant, the fastest first, and hints of what they have."""

    def __init__(
        self, catalog: Catalog, names: ChunkNames, clock: Clock, counters: Counters, tracing: Tracing = NO_TRACING
    ) -> None:
        self.tiers: list[SharedCopies] = []
        self._catalog = catalog
        self._names = names
        self._clock = clock
        self._counters = counters
        self._tracing = tracing
        self._hints: OrderedDict[bytes, KeyHint] = OrderedDict()

    def add(self, use: SharedUse) -> SharedCopies:
        """Take a tier into use, slower than those before it."""
        shared = SharedCopies(use, self._catalog, self._clock, self._counters, RANK + len(self.tiers))
        self.tiers.append(shared)
        return shared

    def source(self, row: int) -> SharedSource | None:
        """Return the fastest shared tier that is said to have the chunk and answers, as a source; None without one."""
        for shared in self.tiers:
            if row in shared and shared.is_asked:
                chunk = self._names.of(row)
                if not self._catalog.table.is_resident(row):
                    chunk = ChunkName(chunk.storage_key, chunk.layout)  # any write of it
                return SharedSource(shared, row, chunk, self._catalog, self._names, self.was_wrong)
        return None

    async def check(self, name: str) -> None:
        """Raise Unavailable where the shared tier of this name does not answer a question now."""
        for shared in self.tiers:
            if shared.tier.name == name and (
                not shared.is_asked or await shared.ask([ROOT_DIGEST], CHECK_S_MAX) is None
            ):
                reason = shared.breaker.reason or f"no answer for {CHECK_S_MAX:.0f} s"
                raise Unavailable(
                    f"the {name} tier does not answer ({reason}): nothing was changed. Try again when kvstore tiers "
                    "shows it as up"
                )

    # ------------------------------------------------------------ what they have

    async def find(self, spaces: Sequence[Namespace], digests: Sequence[bytes], timeout_s: float) -> Beyond:
        """Return how far a chain continues beyond the node: its leading chunks of which every part is here or said to
        be in a shared tier. As ``find_all``."""
        return (await self.find_all([(spaces, digests)], timeout_s))[0]

    async def find_all(
        self, chains: Sequence[tuple[Sequence[Namespace], Sequence[bytes]]], timeout_s: float
    ) -> list[Beyond]:
        """``find`` for each chain. Questions of ``PROBE_COUNT_MAX`` keys go to each tier, the next one where the chain
        goes on behind the one before. All questions to all tiers together take no longer than the longest of the
        tiers' own bounds; what was not asked by then is not known. ``timeout_s``: the seconds that the caller may
        take; the questions get half of them, the rest is for the node's own work."""
        if not self.tiers:
            return [Beyond([], is_known=True) for _ in chains]
        bound_s = max(shared.lookup_s_max for shared in self.tiers)
        reaches, asked = [Reach(*chain) for chain in chains], set[bytes]()
        until_s: float | None = None
        while going_on := [each for each in reaches if each.is_open]:
            fresh, now_s = await self._unheard(going_on, asked), self._clock.monotonic()
            if until_s is None:
                until_s = now_s + min(timeout_s / 2, bound_s)
            elif now_s >= until_s:
                break
            await self._ask_all(fresh, until_s)
            await self._clock.sleep(0)  # where nothing was asked, other requests are answered all the same
            for each in going_on:
                self._go_on(each, asked)
        return [each.beyond for each in reaches]

    async def _unheard(self, reaches: Sequence[Reach], asked: set[bytes]) -> list[list[bytes]]:
        """Return the keys to ask for next, each once, and enter them in ``asked``. Each part of a chain becomes a chain
        of its own, for a tier may have one part without the others."""
        found: list[list[bytes]] = []
        room = PROBE_COUNT_MAX
        for number, reach in enumerate(reaches):
            if number:
                await self._clock.sleep(0)  # many long chains take time: other requests are answered in between
            reach.keys = self._keys(reach.spaces, reach.rest) if room else ()
            now_s = self._clock.monotonic()
            for keys in reach.keys:
                fresh = self._to_ask(self.tiers[-1], [key for key in keys if key and key not in asked], now_s)[:room]
                room -= len(fresh)
                asked.update(fresh)
                found.append(fresh)
        return found

    def _go_on(self, reach: Reach, asked: Collection[bytes]) -> None:
        """Have a chain go on as far as the hints say by now. Its turn has not come where it has no keys."""
        if reach.keys:
            parts = [
                self._places(space, reach.rest, keys, asked)
                for space, keys in zip(reach.spaces, reach.keys, strict=True)
            ]
            reach.go_on(parts)

    def _places(
        self, space: Namespace, digests: Sequence[bytes], keys: Sequence[bytes], asked: Collection[bytes]
    ) -> PartReach:
        """Return the places of one part of a chain's leading chunks. Ends before a part that no tier has, or that left
        the node meanwhile; before one of which that is not known; and before one that nobody was asked for."""
        now_s = self._clock.monotonic()
        places: list[SharedCopies | None] = []
        for digest, key in zip(digests, keys, strict=False):
            hint = self._hint_of(key, now_s) if key else _HERE
            if hint is None or not hint.is_there or (not key and digest not in space.index):
                is_known = hint is not None and hint.shared in (None, self.tiers[-1])  # else a slower tier may have it
                return PartReach(places, is_known, is_open=hint is None and key not in asked)
            places.append(hint.shared)
        return PartReach(places, is_open=bool(keys))

    def _keys(self, spaces: Sequence[Namespace], digests: Sequence[bytes]) -> list[list[bytes]]:
        """Return the storage keys of a chain's chunks, part by part; empty where the node has that part. Ends before a
        chunk that is being stored here. Returns nothing where other nodes can have none of these chunks."""
        if not all(map(is_for_others, spaces)):
            return [[] for _ in spaces]
        digests = digests[: PROBE_COUNT_MAX // len(spaces)]
        pending = [space.pending.keys() for space in spaces if not space.pending.keys().isdisjoint(digests)]
        stop = next((at for at, each in enumerate(digests) if any(each in some for some in pending)), None)
        return [self._part_keys(space, digests[:stop]) for space in spaces]

    def _part_keys(self, space: Namespace, digests: Sequence[bytes]) -> list[bytes]:
        keys = iter(self._names.keys(space, (each for each in digests if each not in space.index)))
        return [b"" if each in space.index else next(keys) for each in digests]

    async def _ask_all(self, chains: list[list[bytes]], until_s: float) -> None:
        """Ask each tier for the keys that no faster tier has. A key that none of them has is remembered as such only if
        all of them answered for it."""
        unknown = set[bytes]()
        for shared in self.tiers:
            now_s = self._clock.monotonic()
            timeout_s = min(shared.lookup_s, until_s - now_s)
            parts = [self._to_ask(shared, keys, now_s) for keys in chains]
            asked, lengths = [key for keys in parts for key in keys], [len(keys) for keys in parts if keys]
            is_asked = asked and shared.is_asked_by_lookups and timeout_s > 0
            answers = await self._answers(shared, asked, timeout_s, lengths) if is_asked else None
            unknown.update(key for key, each in zip(asked, answers or repeat(None), strict=False) if each is None)
            found = self._said_there(shared, asked, answers or ())
            chains = [[key for key in keys if key not in found] for keys in chains]
        now_s = self._clock.monotonic()
        missing = [key for keys in chains for key in keys if key not in unknown and not self._is_there(key, now_s)]
        self._remember(missing, KeyHint(now_s, None, is_there=False))

    def _is_there(self, key: bytes, now_s: float) -> bool:
        """Return True when a tier is known to have a key. Another question may have had the answer meanwhile; no tier
        was asked any more then."""
        hint = self._hint_of(key, now_s)
        return hint is not None and hint.is_there

    def _said_there(self, shared: SharedCopies, asked: Sequence[bytes], answers: Sequence[bool | None]) -> set[bytes]:
        """Remember the keys that a tier says are there, and return them."""
        found, there = set(compress(asked, answers)), KeyHint(self._clock.monotonic(), shared, is_there=True)
        self._remember(found, there)
        return found

    async def _answers(
        self, shared: SharedCopies, keys: Sequence[bytes], timeout_s: float, lengths: Sequence[int]
    ) -> Sequence[bool | None] | None:
        def late(answers: Sequence[bool | None]) -> None:
            """Serve the lookups that follow. What a faster tier, or a read, said meanwhile stays."""
            now_s = self._clock.monotonic()
            unheard = [self._hint_of(key, now_s) is None for key in keys]
            self._said_there(shared, keys, [each and new for each, new in zip(answers, unheard, strict=True)])

        with self._tracing.span("kvstore.ask", tier=shared.tier.name, asked_chunks=len(keys)) as span:
            answers = await shared.ask(keys, timeout_s, lengths, late)
            span.note(**{"is_late": True} if answers is None else {"there_chunks": sum(map(bool, answers))})
            return answers

    async def said(self, chains: Sequence[Sequence[bytes]], timeout_s: float) -> list[TierWord]:
        """Return what each tier says of these chains. All tiers are asked at once, each for all chains in as few
        questions as hold them. A tier that does not answer is asked no more. A chain has one part of each chunk, for a
        tier may have one part without the others."""
        until_s, questions = self._clock.monotonic() + timeout_s, in_questions(chains)
        return await asyncio.gather(*(self._said(each, questions, until_s) for each in self.tiers))

    async def _said(
        self, shared: SharedCopies, questions: Sequence[Sequence[Sequence[bytes]]], until_s: float
    ) -> TierWord:
        found, is_whole = set[bytes](), True
        for chains in questions:
            keys = [key for chain in chains for key in chain]
            timeout_s = min(shared.lookup_s, until_s - self._clock.monotonic())
            is_asked = shared.is_asked_by_lookups and timeout_s > 0
            answers = await shared.ask(keys, timeout_s, [len(chain) for chain in chains]) if is_asked else None
            if answers is None:
                return TierWord(shared.tier.kind, found, is_whole=False)
            found.update(compress(keys, answers))
            is_whole &= None not in answers
        return TierWord(shared.tier.kind, found, is_whole)

    def _hint_of(self, key: bytes, now_s: float) -> KeyHint | None:
        """Return the hint of a key, unless it is too old."""
        hint = self._hints.get(key)
        if hint is None:
            return None
        is_absent = hint.shared is None and not hint.is_there
        return hint if now_s - hint.at_s < (self.absent_s if is_absent else HINT_S) else None

    @property
    def absent_s(self) -> float:
        """Seconds for which the answer that no tier has a key is not asked for again."""
        return min(HINT_S, ABSENT_BOUNDS * max((each.lookup_s_max for each in self.tiers), default=0.0))

    def _to_ask(self, shared: SharedCopies, keys: list[bytes], now_s: float) -> list[bytes]:
        """Return the keys for which a tier is to be asked."""
        if self._hints.keys().isdisjoint(keys):
            return keys
        return [key for key in keys if self._may_be_in(shared, key, now_s)]

    def _may_be_in(self, shared: SharedCopies, key: bytes, now_s: float) -> bool:
        """Return True when a tier is to be asked: there is no hint, or only that a faster tier was wrong."""
        hint = self._hint_of(key, now_s)
        if hint is None:
            return True
        return not hint.is_there and hint.shared is not None and hint.shared.rank < shared.rank

    def _remember(self, keys: Collection[bytes], hint: KeyHint) -> None:
        if not self._hints.keys().isdisjoint(keys):
            for key in keys:
                self._hints.pop(key, None)  # the newest hints are the last
        self._hints.update(dict.fromkeys(keys, hint))
        while len(self._hints) > HINT_COUNT_MAX:
            self._hints.popitem(last=False)

    def was_wrong(self, key: bytes, shared: SharedCopies) -> None:
        """Remember that a tier that was said to have a chunk does not have it, or not whole."""
        self._remember((key,), KeyHint(self._clock.monotonic(), shared, is_there=False))

    def written(self, row: int) -> None:
        """Forget the hint of a chunk that was written: a tier has it by now."""
        self._hints.pop(self._names.of(row).storage_key, None)

    # ------------------------------------------------------------ rows

    def rows(
        self, spaces: Sequence[Namespace], digests: Sequence[bytes], start: int, found: Sequence[ChunkHint]
    ) -> list[list[int]]:
        """Return the rows, part by part, of a chain's chunks from number ``start`` on, each held by the caller from now
        on (``release``). Ends before a chunk that a store claimed meanwhile, or that is nowhere by now. Raises
        MemoryError, OverflowError: no row is held then."""
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
        found: Sequence[ChunkHint],
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
        """Close every tier. A tier's error, or a close that takes too long, is logged: the stop goes on."""
        async with asyncio.TaskGroup() as group:
            for shared in self.tiers:
                group.create_task(_closed(shared))
        self.tiers.clear()


async def _closed(shared: SharedCopies) -> None:
    try:
        async with asyncio.timeout(CLOSE_S_MAX):
            await shared.close()
    except Exception as error:  # noqa: BLE001 - the boundary: the engine is not ours
        _log.warning("a tier was not closed", extra={"tier": shared.tier.name, "reason": repr(error)})
