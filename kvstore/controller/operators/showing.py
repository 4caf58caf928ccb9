"""All that is known of one chunk."""

from __future__ import annotations

import asyncio

from kvstore.catalog import ROOT_ROW, Catalog, Namespace
from kvstore.chunk import ChunkHeader
from kvstore.controller.operators.listing import Listing
from kvstore.controller.operators.selection import BLOCK_ROWS, NAMED_COUNT_MAX, Digits
from kvstore.controller.operators.turns import Turn, Turns
from kvstore.controller.operators.values import ChunkDetail, ShownChunk
from kvstore.controller.parts import Parts
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.seams import Deadline
from kvstore.spec import Durability, MissReason

ANCESTOR_COUNT_MAX = 1024
CHILD_COUNT_MAX = 256
"""Ancestors and children of a chunk that are told by their digests."""
CLIMB_COUNT = 2048
"""Ancestors that are walked in one step."""
DIGIT_COUNT_MIN = 4


class Showing:
    """Reads the catalog, and one header of each part; changes nothing."""

    def __init__(self, parts: Parts, turns: Turns, listing: Listing) -> None:
        self._parts = parts
        self._catalog: Catalog = parts.catalog
        self._table = parts.catalog.table
        self._turns = turns
        self._listing = listing

    async def chunk(self, text: str, deadline: Deadline) -> ShownChunk:
        """Return the chunk whose digest begins with the hexadecimal digits ``text``. Raises InvalidRequest for text
        that can begin no digest, and where several digests begin with it."""
        if len(text) < DIGIT_COUNT_MIN:
            raise InvalidRequest(f"digest {text!r}: say {DIGIT_COUNT_MIN} digits or more")
        digits, turn = Digits.of(text), self._turns.begin()
        await turn.next()
        digest = digits.whole or await self._only(digits, turn)
        if digest is None:
            return ShownChunk(())
        details = []
        for space in list(self._catalog.spaces.numbered):
            await turn.between()
            row = space.index.get(digest)
            if row is not None and (detail := await self._detail(space, digest, row, turn, deadline)):
                details.append(detail)
        return ShownChunk(tuple(details), MissReason.NONE if details else self._why(digest))

    async def _only(self, digits: Digits, turn: Turn) -> bytes | None:
        """Return the one digest of a stored chunk that begins with the digits; None: there is none. Raises
        InvalidRequest where there are several."""
        found: set[bytes] = set()
        start = 0
        while start < len(self._table.digests) and len(found) <= NAMED_COUNT_MAX:
            part = self._table.digests[start : start + BLOCK_ROWS // 8]
            named = (row for row, each in enumerate(part, start) if each and digits.begins(each))
            found |= {self._table.digests[row] for row in named if self._catalog.is_visible(row)}
            start += len(part)
            await turn.next()
        spaces = self._catalog.spaces.numbered
        stored = sorted(each for each in found if any(each in space.index for space in spaces))
        if len(stored) > 1:
            some = ", ".join(each.hex()[:16] for each in stored[:NAMED_COUNT_MAX])
            raise InvalidRequest(f"digest {digits.text}: several chunks begin so ({some} ...): say more digits")
        return stored[0] if stored else None

    def _why(self, digest: bytes) -> MissReason:
        """Return why a chunk is not here, if some namespace remembers it; else NONE."""
        reasons = (space.departures.get(digest) for space in self._catalog.spaces.numbered)
        return next((each for each in reasons if each), MissReason.NONE)

    async def _detail(
        self, space: Namespace, digest: bytes, row: int, turn: Turn, deadline: Deadline
    ) -> ChunkDetail | None:
        """Return one part of the chunk; None: the chunk went meanwhile. The row is held until the end, so that it is
        not reused for another chunk."""
        self._table.hold(row)
        try:
            header, tier, problem = await self._header(row, deadline)
            await turn.next()
            ancestors, ancestor_count = await self._above(row, turn)
            children = await self._below(row, turn)
            leases = self._parts.leases.holding(row)
            if space.index.get(digest) != row:
                return None
            own = 1  # the hold of this very call
            hold_count = self._table.hold_count(row) - own
            entry = self._listing.entry(row, is_held=hold_count > 0)
            levels = tuple(self._levels(row))
        finally:
            self._catalog.unhold(row)
        return ChunkDetail(
            chunk=entry, header=header, header_tier=tier, header_problem=problem, ancestors=ancestors,
            ancestor_count=ancestor_count, children=children, lease_count=leases, hold_count=hold_count, levels=levels,
        )  # fmt: skip

    async def _header(self, row: int, deadline: Deadline) -> tuple[ChunkHeader | None, str, str]:
        """Return the header of the fastest copy, the tier's name, and the problem where there is no header."""
        if self._catalog.space_of(row).model_spec is None:
            return None, "", "its model is not registered, so its layout is not known"
        copies = self._table.fastest(row)
        if copies is None:
            return None, "", "it went meanwhile"
        name = self._parts.movement.names.of(row)
        try:
            async with asyncio.timeout(deadline.left_s):
                stored = await copies.tier.open(name, copies.residency(row))
        except KVStoreError as error:
            return None, copies.tier.name, error.message
        except TimeoutError:
            return None, copies.tier.name, f"tiers.{copies.tier.name} did not answer in time"
        header = stored.header
        stored.close()
        return header, copies.tier.name, ""

    async def _above(self, row: int, turn: Turn) -> tuple[tuple[bytes, ...], int]:
        """Return the nearest ancestors' digests, and the number of all ancestors. The row must be held: then no
        ancestor's row is reused."""
        found: list[bytes] = []
        count, parent = 0, self._table.parents[row]
        while parent != ROOT_ROW:
            if count < ANCESTOR_COUNT_MAX:
                found.append(self._table.digests[parent])
            count += 1
            parent = self._table.parents[parent]
            if count % CLIMB_COUNT == 0:
                await turn.next()
        return tuple(found), count

    async def _below(self, row: int, turn: Turn) -> tuple[bytes, ...]:
        """Return the digests of a row's children, at most ``CHILD_COUNT_MAX``."""
        found: list[bytes] = []
        start, table = 0, self._table
        while start < len(table.digests) and len(found) < min(CHILD_COUNT_MAX, table.child_counts[row]):
            part = table.parents[start : start + BLOCK_ROWS]
            at = 0
            for _ in range(part.count(row)):
                at = part.index(row, at)
                if table.digests[start + at]:
                    found.append(table.digests[start + at])
                at += 1
            start += BLOCK_ROWS
            await turn.next()
        return tuple(found[:CHILD_COUNT_MAX])

    def _levels(self, row: int) -> list[Durability]:
        """Return the durability levels of the copies that are there for certain."""
        local = {copies.durability for copies in self._table.copies if copies.is_proven(row)}
        shared = {each.tier.durability for each in self._parts.movement.shared_tiers.tiers if each.is_seen(row)}
        return sorted(local | shared)
