"""Listings: an entry for each chunk that an operator selects, and the totals of all."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence

import numpy as np

from kvstore.catalog import Namespace, parent_digest
from kvstore.controller.operators.selection import Chosen, RowNumbers
from kvstore.controller.operators.turns import Turn, Turns
from kvstore.controller.operators.values import (
    ChunkEntry,
    CopyFacts,
    ListPage,
    ModelTotal,
    TierTotal,
)
from kvstore.controller.parts import Parts
from kvstore.spec import Encoding

PAGE_COUNT = 24
"""Entries that are made in one step."""


class Listing:
    """Reads the catalog, and changes nothing."""

    def __init__(self, parts: Parts, turns: Turns) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._table = parts.catalog.table
        self._turns = turns

    async def pages(self, chosen: Chosen, limit: int) -> AsyncGenerator[ListPage]:
        """Give the first ``limit`` selected chunks, then the totals of all selected ones. Cost: a step per 8192 rows of
        the catalog, whatever is selected, and one per page of entries."""
        totals, turn = Totals(self._parts), self._turns.begin()
        async for rows in chosen.blocks(turn):
            told = [(row, self._table.digests[row]) for row in rows[:limit].tolist()]
            await totals.add(rows, turn)
            for first in range(0, len(told), PAGE_COUNT):
                await turn.next()
                entries = self._entries(told[first : first + PAGE_COUNT])
                limit -= len(entries)
                turn.end()
                if entries:
                    yield ListPage(entries)
        turn.end()
        yield ListPage(totals=totals.models(), is_last=True)

    def _entries(self, told: Sequence[tuple[int, bytes]]) -> tuple[ChunkEntry, ...]:
        """Return the entries of these (row, digest) pairs, without chunks that went meanwhile."""
        table = self._table
        rows = [row for row, digest in told if table.digests[row] == digest and table.is_resident(row)]
        copies = self._copies(rows)
        return tuple(
            self._entry(row, found, is_held=table.is_held(row)) for row, found in zip(rows, copies, strict=True)
        )

    def entry(self, row: int, *, is_held: bool) -> ChunkEntry:
        """Return the entry of one chunk that some local tier has."""
        return self._entry(row, self._copies([row])[0], is_held=is_held)

    def _entry(self, row: int, copies: Sequence[CopyFacts], *, is_held: bool) -> ChunkEntry:
        table, space = self._table, self._catalog.space_of(row)
        return ChunkEntry(
            digest=table.digests[row], parent=parent_digest(table, row), fingerprint=space.fingerprint,
            model_id=model_id_of(space), e_layer=-1 if space.layer is None else space.layer,
            provenance=space.provenance, exactness=space.exactness, token_count=table.token_counts[row],
            byte_count=space.known_bytes(table.token_counts[row]), copies=tuple(copies),
            use_count=table.uses[row], child_count=table.child_counts[row], is_held=is_held,
            stored_seconds=table.stored_s[row], is_pinned=self._parts.pins.is_kept(row),
        )  # fmt: skip

    def _copies(self, rows: Sequence[int]) -> list[list[CopyFacts]]:
        """Return the copies of each row, the fastest first."""
        found: dict[int, list[CopyFacts]] = {row: [] for row in rows}
        for copies in self._table.copies:
            here = [row for row in rows if row in copies]
            encodings = copies.encodings(np.array(here, np.int64)).tolist() if here else ()
            for row, encoding in zip(here, encodings, strict=True):
                is_proven = copies.is_proven(row)
                found[row].append(CopyFacts(copies.tier.name, copies.kind, Encoding(encoding), is_proven, False))
        for shared in self._parts.movement.shared_tiers.tiers:
            for row in rows:
                if row in shared:
                    facts = CopyFacts(shared.tier.name, shared.tier.kind, Encoding.NONE, shared.is_seen(row), True)
                    found[row].append(facts)
        return [found[row] for row in rows]


class Totals:
    """Totals of chunks, by model and tier."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._catalog = parts.catalog
        self._of: dict[bytes, ModelTotal] = {}

    async def add(self, rows: RowNumbers, turn: Turn) -> None:
        """Count these rows, which are resident now. Chunks of one namespace and length have the same size, so they are
        counted together."""
        table = self._catalog.table
        spaces = table.space_ids(np.frombuffer(table.spaces, np.uint16)[rows])
        kinds, places = np.unique(
            spaces << 32 | np.frombuffer(table.token_counts, np.int32)[rows], return_inverse=True
        )  # fmt: skip
        counts = {"": np.bincount(places, minlength=len(kinds)).tolist()}
        for copies in table.copies:
            counts[copies.tier.name] = np.bincount(places[copies.where(rows)], minlength=len(kinds)).tolist()
        for shared in self._parts.movement.shared_tiers.tiers:
            is_said = (np.frombuffer(table.shared, np.uint8)[rows] & shared.said_bit) != 0
            counts[shared.tier.name] = np.bincount(places[is_said], minlength=len(kinds)).tolist()
        for place, kind in enumerate(kinds.tolist()):
            self._count(kind >> 32, kind & 0xFFFFFFFF, {name: each[place] for name, each in counts.items()})
            await turn.between()

    def _count(self, space_id: int, token_count: int, counts: Mapping[str, int]) -> None:
        """Count chunks of one namespace and length. ``counts``: chunks by tier name; under "" those of all tiers."""
        space = self._catalog.spaces.by_id(space_id)
        if space is None:  # its last chunk left, and it was forgotten, while others were counted
            return
        size, total = space.known_bytes(token_count), self._total(space)
        total.chunk_count += counts[""]
        total.byte_count += counts[""] * size
        for name, count in counts.items():
            if name and count:
                of_tier = total.tiers.setdefault(name, TierTotal())
                of_tier.chunk_count += count
                of_tier.byte_count += count * size

    def _total(self, space: Namespace) -> ModelTotal:
        """Return the total of the namespace's model; while no model is registered, that of the namespace's
        fingerprint."""
        name = space.model_name or space.fingerprint
        if name not in self._of:
            known = self._catalog.models.get(name)
            profiles = self._parts.profiles.of(known.spec) if known is not None else []
            self._of[name] = ModelTotal(name, model_id_of(space), profiles=profiles)
        return self._of[name]

    def models(self) -> tuple[ModelTotal, ...]:
        """Return the totals, the largest model first."""
        return tuple(
            sorted(self._of.values(), key=lambda each: (-each.byte_count, -each.chunk_count, each.fingerprint))
        )


def model_id_of(space: Namespace) -> str:
    """Return the model's name; empty while the namespace's model is not registered."""
    return "" if space.model_spec is None else space.model_spec.model_id
