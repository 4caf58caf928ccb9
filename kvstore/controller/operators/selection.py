"""Selections of chunks: names are resolved once, then chunks are decided a block of rows at a time, on copies of
columns."""

from __future__ import annotations

import string
from array import array
from collections.abc import AsyncIterator, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.catalog import NOWHERE, Catalog, Namespace
from kvstore.catalog.namespace import UNNUMBERED
from kvstore.controller.operators.turns import Turn
from kvstore.controller.operators.values import Selection
from kvstore.controller.parts import Parts
from kvstore.errors import InvalidRequest
from kvstore.keys import DIGEST_BYTES

BLOCK_ROWS = 8192
"""Rows that are looked at in one step: some 0.2 ms."""
PART_ROWS = 256
"""Rows of a block whose digests or sizes are looked at in one step."""
RowNumbers = NDArray[np.int64]
FINGERPRINT_DIGITS_MIN = 8
MEMORY_NAMES = ("memory", "dram")
NAMED_COUNT_MAX = 8
"""Models or chunks that an error names."""


@dataclass(frozen=True, slots=True)
class Digits:
    """The beginning of a digest, in hexadecimal digits. Their number may be odd."""

    text: str

    @staticmethod
    def of(text: str) -> Digits:
        """Check the digits. Raises InvalidRequest for text that can begin no digest."""
        if not set(text) <= set(string.hexdigits) or len(text) > 2 * DIGEST_BYTES:
            raise InvalidRequest(
                f"digest {text[:80]!r} is not the beginning of one: it has up to {2 * DIGEST_BYTES} hexadecimal digits"
            )
        return Digits(text.lower())

    @property
    def whole(self) -> bytes | None:
        """The digest, if ``text`` has all digits of one."""
        return bytes.fromhex(self.text) if len(self.text) == 2 * DIGEST_BYTES else None

    def begins(self, digest: bytes) -> bool:
        even = len(self.text) & ~1
        return digest.startswith(bytes.fromhex(self.text[:even])) and digest.hex().startswith(self.text)


class Chosen:
    """A selection, resolved against the registered models and the tiers in use. Raises InvalidRequest where a name fits
    no model or tier, or more than one."""

    def __init__(self, parts: Parts, selection: Selection, up_s: float) -> None:
        """``up_s``: seconds since the service's start. Chunks that it found at its start are at least so old."""
        self._catalog = catalog = parts.catalog
        self._table = catalog.table
        self._selection = selection
        self._digits = Digits.of(selection.digest)
        self._ids: NDArray[np.int64] | None = None
        """Ids of the selected model's namespaces; None: those of all models are meant."""
        if selection.model:
            self._ids = np.array(namespaces_named(catalog, selection.model), np.int64)
        self._column, self._bit, self._spares = self._tier(parts, selection.tier)
        self._before_s = int(parts.clock.wall()) - selection.older_than_s
        self._are_earlier_meant = selection.older_than_s <= up_s
        self._sizes: dict[int, bool] = {}
        self._links = frozenset(selection.chain)

    def _tier(self, parts: Parts, name: str) -> tuple[array[int] | None, int, Collection[int]]:
        """Return the column that tells which chunks a tier has; the bit that tells it, or NOWHERE where any value but
        NOWHERE tells it; and further rows: those of which the tier has a second copy alone. No column without a
        name."""
        if not name:
            return None, NOWHERE, ()
        wanted = MEMORY_NAMES[1] if name in MEMORY_NAMES else name
        for copies in self._table.copies:
            if copies.tier.name == wanted:
                return copies.column, NOWHERE, copies.spares
        for shared in parts.movement.shared_tiers.tiers:
            if shared.tier.name == wanted:
                return self._table.shared, shared.said_bit, ()
        raise no_such_tier(parts, name)

    async def blocks(self, turn: Turn) -> AsyncIterator[RowNumbers]:
        """Give the rows of selected chunks, at most a block at a time, each at the beginning of a step. The rows are
        right until the caller awaits something."""
        await self._recognize(turn)
        if self._selection.chain:
            async for rows in self._chained(turn):
                yield rows
            return
        start = 0
        while start < len(self._table.digests):
            await turn.next()
            found = self._of(start, min(start + BLOCK_ROWS, len(self._table.digests)))
            start += BLOCK_ROWS
            if not self._is_looked_at:
                yield found
                continue
            for first in range(0, len(found), PART_ROWS):
                if first:
                    await turn.next()
                part = filter(self._is_meant, found[first : first + PART_ROWS].tolist())
                yield np.array(list(part), np.int64)

    async def _recognize(self, turn: Turn) -> None:
        """Give the namespaces of recovered E their models: they have none until a query asks for their layer, even if
        the model is registered."""
        unnamed: dict[bytes, list[Namespace]] = {}
        for space in self._catalog.spaces.numbered:
            if space.model_spec is None and space.index:
                unnamed.setdefault(space.fingerprint, []).append(space)
        if not unnamed:
            return
        for model in list(self._catalog.models.values()):
            for layer in range(model.spec.layer_count):
                await turn.between()
                if self._catalog.models.get(model.fingerprint) is model:  # else it was forgotten meanwhile
                    model.recognize(layer, unnamed)
        if self._selection.model:
            self._ids = np.array(namespaces_named(self._catalog, self._selection.model), np.int64)

    async def _chained(self, turn: Turn) -> AsyncIterator[RowNumbers]:
        """Give the rows of selected chunks among ``selection.chain``, namespace by namespace, some of the chain at a
        time."""
        chain = self._selection.chain
        for space in list(self._catalog.spaces.numbered):
            if not self._is_of_model(space.number):
                continue
            for first in range(0, len(chain), PART_ROWS):
                await turn.next()
                rows = (space.index.get(digest) for digest in chain[first : first + PART_ROWS])
                found = [row for row in rows if row is not None and len(self._of(row, row + 1)) and self._is_meant(row)]
                if found:
                    yield np.array(found, np.int64)

    def names(self, row: int) -> bool:
        """True when the selection's names (model, digits, prompt) fit a row's chunk. The chunk may be in no tier any
        more; the selection's tiers, ages and sizes are ignored."""
        digest, space = self._table.digests[row], self._table.spaces[row]
        is_of_chain = not self._links or digest in self._links
        return self._is_of_model(space) and is_of_chain and self._digits.begins(digest)

    def _is_of_model(self, number: int) -> bool:
        """True when the namespace that has this number now is of the selected model."""
        return self._ids is None or (number != UNNUMBERED and self._table.space_id(number) in self._ids)

    @property
    def _is_looked_at(self) -> bool:
        """True when columns alone do not decide, and each chunk's digest or size is looked at."""
        return bool(self._digits.text or self._selection.byte_count_min or self._selection.byte_count_max)

    def _of(self, start: int, stop: int) -> RowNumbers:
        table, selection = self._table, self._selection
        found = np.zeros(stop - start, np.bool_)
        for copies in table.copies:
            found |= _part(copies.column, start, stop) != NOWHERE
        if self._ids is not None:
            found &= np.isin(table.space_ids(_part(table.spaces, start, stop)), self._ids)
        if self._column is not None:
            column = _part(self._column, start, stop)
            has = (column != NOWHERE) if self._bit == NOWHERE else (column & self._bit) != 0
            has[[row - start for row in self._spares if start <= row < stop]] = True
            found &= has
        if selection.use_count_max is not None:
            found &= _part(table.uses, start, stop) <= selection.use_count_max
        if selection.older_than_s:
            stored = _part(table.stored_s, start, stop)
            found &= np.where(stored == 0, self._are_earlier_meant, stored <= self._before_s)
        return np.flatnonzero(found) + start

    def _is_meant(self, row: int) -> bool:
        table = self._table
        if not table.digests[row] or not table.is_resident(row):  # the chunk went after its block was looked through
            return False
        return self._digits.begins(table.digests[row]) and self._fits(table.spaces[row], table.token_counts[row])

    def _fits(self, number: int, token_count: int) -> bool:
        """True when chunks of this namespace and length are within the selected sizes. The answer is remembered by
        namespace and length, of which there are few pairs."""
        kind = self._table.space_id(number) << 32 | token_count
        fits = self._sizes.get(kind)
        if fits is None:
            size = self._catalog.spaces.numbered[number].known_bytes(token_count)
            most = self._selection.byte_count_max or size
            fits = self._sizes[kind] = self._selection.byte_count_min <= size <= most
        return fits


def _part(column: array[int], start: int, stop: int) -> NDArray[Any]:
    """Return a copy of some rows of a column. A view would keep the column from growing."""
    return np.array(column[start:stop])


def tier_names(parts: Parts) -> list[str]:
    """Return the names of all tiers in use, the local ones first, each kind from fast to slow."""
    local = [copies.tier.name for copies in parts.catalog.table.copies]
    return [*local, *(shared.tier.name for shared in parts.movement.shared_tiers.tiers)]


def no_such_tier(parts: Parts, name: str) -> InvalidRequest:
    """Return the error that names the tiers in use."""
    known = ", ".join([MEMORY_NAMES[0], *tier_names(parts)[1:]])
    found = (
        "hbm, a pool on a GPU, has only what memory has" if name == "hbm" else f"no tier is called {name[:64]!r} here"
    )
    return InvalidRequest(f"{found}: {known}", tier=name[:64])


def namespaces_named(catalog: Catalog, name: str) -> list[int]:
    """Return the ids of the namespaces of one model, by its id or the first digits of its fingerprint; digits may
    also name a model that is not registered. Raises InvalidRequest for a name of none or several, naming the models."""
    models = list(catalog.models.values())
    found = [each for each in models if each.spec.model_id == name]
    found = found or [each for each in models if each.spec.model_id.rpartition("/")[2] == name]
    if len(found) == 1:
        return _ids_of(catalog, found[0].namespaces.values())
    if not found and len(name) >= FINGERPRINT_DIGITS_MIN and set(name) <= set(string.hexdigits):
        digits = name.lower()
        found = [each for each in models if each.fingerprint.hex().startswith(digits)]
        if len(found) == 1:
            return _ids_of(catalog, found[0].namespaces.values())
        numbered = (each for each in catalog.spaces.numbered if each.number != UNNUMBERED)
        spaces = [each for each in numbered if each.fingerprint.hex().startswith(digits)]
        if not found and len({each.fingerprint for each in spaces}) == 1:
            return _ids_of(catalog, spaces)
    known = [f"{each.spec.model_id} ({each.fingerprint.hex()[:16]})" for each in (found or models)[:NAMED_COUNT_MAX]]
    if found:
        raise InvalidRequest(
            f"several models are called {name[:128]!r}: say the digits of one: {', '.join(known)}", model=name[:128]
        )
    there = ", ".join(known) or "none: an engine registers its model at its start"
    raise InvalidRequest(f"no model is called {name[:128]!r} here. Registered: {there}", model=name[:128])


def _ids_of(catalog: Catalog, spaces: Iterable[Namespace]) -> list[int]:
    return [catalog.table.space_id(space.number) for space in spaces if space.number != UNNUMBERED]
