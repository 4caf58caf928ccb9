"""Eviction chooses who leaves a tier, in order, and at a bounded cost where very many copies stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.catalog import Catalog, Copies
from kvstore.keys import ROOT_DIGEST
from kvstore.movement import eviction
from kvstore.movement.eviction import Eviction
from kvstore.movement.removal import Removal
from kvstore.policy import LeastRecentlyUsed
from kvstore.seams import FaultPoints
from kvstore.spec import Exactness, Tier
from kvstore.telemetry import Counters
from kvstore.tiers import LocalTier, Residency
from tests.catalog.shelves import Shelf, put, shelved_catalog
from tests.specs import small_spec

SPEC = small_spec()
MANY = 20_000
SIZE_SHIFT = 32


def size_of(residency: Residency) -> int:
    """Return the need that a copy's room serves, as these tests number the places."""
    return residency >> SIZE_SHIFT


@dataclass(frozen=True)
class OfSize:
    """The needs of a tier of which only copies of one size help."""

    size: int

    def __call__(self, residencies: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = residencies >> SIZE_SHIFT == self.size
        return found


def evicting(catalog: Catalog, copies: Copies) -> Eviction:
    counters = Counters()
    for each in catalog.table.copies:
        counters.add_tier(each.tier.name)
    return Eviction(catalog, copies, Removal(catalog, counters), lambda row: None, FaultPoints(), counters)


def store(catalog: Catalog, copies: Copies, number: int, parent: bytes = ROOT_DIGEST, size: int = 0) -> int:
    """A chunk that a tier alone has now, the most recent one there."""
    space = catalog.model(catalog.register(SPEC).fingerprint).namespace(None, Exactness.EXACT)
    digest = (number + 1).to_bytes(32, "little")
    row = catalog.row_of(space, digest, parent, SPEC.chunk_tokens)
    copies.put(row, size << SIZE_SHIFT | number)
    catalog.publish(row)
    copies.policy.stored(row, digest, *catalog.worth(row))
    return row


class Asked:
    """Counts how often it is asked whether a copy would help."""

    def __init__(self, helps: Callable[[Residency], bool]) -> None:
        self._helps = helps
        self.count = 0

    def __call__(self, residency: Residency) -> bool:
        self.count += 1
        return self._helps(residency)


def test_memory_makes_room_at_once_although_the_device_takes_nothing() -> None:
    """Only what a fetch brought up from the device can go for nothing, and it is the most recent of all."""
    catalog = shelved_catalog()
    memory = catalog.table.copies[0]
    for number in range(MANY):
        store(catalog, memory, number)
    brought = [store(catalog, memory, MANY + number) for number in range(3)]
    for row in brought:
        put(catalog, row, row)
    oldest_alone = next(iter(memory.policy.victims(lambda _: True)))
    evict, asked = evicting(catalog, memory).evict, Asked(lambda _: True)
    for row in brought:
        assert evict(asked, lambda: True)
        assert row not in memory
    assert oldest_alone in memory
    for _ in range(100):
        assert evict(asked, lambda: True)
    assert oldest_alone not in memory
    assert asked.count < 1000, "a walk past all of memory for each victim stops the loop"


def test_a_device_full_of_another_models_chunks_makes_room_at_once() -> None:
    catalog = shelved_catalog()
    device = catalog.table.copies[1]
    for number in range(MANY):
        store(catalog, device, number, size=1)
    wanted = [store(catalog, device, MANY + number, size=2) for number in range(500)]
    asked = Asked(lambda residency: size_of(residency) == 2)
    evict = evicting(catalog, device).evict
    for row in wanted:
        assert evict(asked, lambda: True, among=OfSize(2))
        assert row not in device, "the oldest first"
    assert asked.count < 10_000, "a walk past the other model for each victim stops the loop"
    assert not evict(asked, lambda: True, among=OfSize(2))


def test_a_child_of_another_size_goes_before_its_parent_wherever_it_is_found() -> None:
    catalog = shelved_catalog()
    device = catalog.table.copies[1]
    for number in range(1000):
        store(catalog, device, number, size=1)
    parent = store(catalog, device, 1000, size=2)
    child = store(catalog, device, 1001, catalog.table.digests[parent], size=1)
    device.used([catalog.table.digests[row] for row in (parent, child)], [parent, child])
    helps = Asked(lambda residency: size_of(residency) == 2)
    assert evicting(catalog, device).evict(helps, lambda: parent not in device, among=OfSize(2))
    assert child not in device
    assert len(list(device.rows())) == 1000


def test_a_chosen_victim_that_was_used_since_stays() -> None:
    catalog = shelved_catalog()
    device = catalog.table.copies[1]
    for number in range(1000):
        store(catalog, device, number, size=1)
    first, second, third = (store(catalog, device, 1000 + number, size=2) for number in range(3))
    evict = evicting(catalog, device).evict
    assert evict(lambda each: size_of(each) == 2, lambda: True, among=OfSize(2))
    assert first not in device
    device.used([catalog.table.digests[second]], [second])
    assert evict(lambda each: size_of(each) == 2, lambda: True, among=OfSize(2))
    assert (second in device, third in device) == (True, False)


def test_what_was_superseded_goes_first_unless_it_is_held() -> None:
    catalog = shelved_catalog()
    memory = catalog.table.copies[0]
    oldest, tail = store(catalog, memory, 0), store(catalog, memory, 1)
    store(catalog, memory, 2)
    memory.policy.superseded(tail)
    catalog.table.hold(tail)
    evict = evicting(catalog, memory).evict
    assert evict(lambda _: True, lambda: True)
    assert (oldest in memory, tail in memory) == (False, True)
    catalog.table.unhold(tail)
    assert evict(lambda _: True, lambda: True)
    assert tail not in memory


def test_a_part_of_a_device_is_found_without_a_look_at_each_copy_before_it() -> None:
    """A whole region file goes: its places are neighbours."""
    catalog = shelved_catalog()
    device = catalog.table.copies[1]
    for number in range(1000):
        store(catalog, device, number)
    rows = [store(catalog, device, number, size=1) for number in range(1000, 1010)]
    store(catalog, device, 1010, size=2)
    compared: list[int] = []

    def is_in(near: NDArray[np.int64], wanted: NDArray[np.int64]) -> NDArray[np.bool_]:
        compared.append(len(near))
        return np.array([place in set(wanted.tolist()) for place in near.tolist()], np.bool_)

    with patch.object(np, "isin", is_in):
        assert sorted(device.at([device.residency(row) for row in rows])) == sorted(rows)
    assert compared == [len(rows)]
    assert device.at([]) == []
    assert evicting(catalog, device).evict_all([device.residency(row) for row in rows])
    assert not any(row in device for row in rows)
    assert len(list(device.rows())) == 1001


def grown(catalog: Catalog, parent: int, number: int) -> int:
    """A chunk below another one, of which memory has heard and the device has not."""
    return store(catalog, catalog.table.copies[0], number, catalog.table.digests[parent])


def test_what_only_memory_has_goes_with_the_chunk_that_it_hangs_on() -> None:
    """It was not used after it, and nobody would find it. Chunks that came later stay."""
    catalog = shelved_catalog()
    memory, device = catalog.table.copies
    oldest = store(catalog, device, 0)
    tail, other = grown(catalog, oldest, 1), grown(catalog, oldest, 2)
    deeper = grown(catalog, other, 3)
    latest = store(catalog, device, 4)
    assert evicting(catalog, device).evict(lambda _: True, lambda: True)
    assert (oldest in device, latest in device) == (False, True)
    assert not any(row in memory for row in (tail, other, deeper))
    assert len(catalog.table) == 1, "no row waits for a parent that nobody stores again"


def test_what_memory_can_still_give_without_the_device_stays_there() -> None:
    catalog = shelved_catalog()
    memory, device = catalog.table.copies
    parent = store(catalog, memory, 0)
    child = grown(catalog, parent, 1)
    put(catalog, parent, 0)
    device.policy.stored(parent, catalog.table.digests[parent], *catalog.worth(parent))
    assert evicting(catalog, device).evict(lambda _: True, lambda: True)
    assert (parent in device, parent in memory, child in memory) == (False, True, True)


def test_a_chunk_stays_while_something_below_it_is_in_use_or_on_the_device() -> None:
    catalog = shelved_catalog()
    device = catalog.table.copies[1]
    in_use, above = store(catalog, device, 0), store(catalog, device, 1)
    held = grown(catalog, grown(catalog, in_use, 2), 3)
    catalog.table.hold(held)
    below = store(catalog, device, 4, catalog.table.digests[grown(catalog, above, 5)])
    catalog.table.hold(below)
    device.used([catalog.table.digests[row] for row in (above, below)], [above, below])
    evict = evicting(catalog, device).evict
    assert not evict(lambda _: True, lambda: True)
    catalog.table.unhold(below)
    assert evict(lambda _: True, lambda: above not in device), "children go first"
    assert (below in device, in_use in device) == (False, True)
    catalog.table.unhold(held)
    assert evict(lambda _: True, lambda: in_use not in device)
    assert len(catalog.table) == 0


def test_further_copies_count_in_three_tiers() -> None:
    """A further copy takes the place of one that failed its check, once no tier has another one: what hangs on such a
    chunk can be found, and such a chunk outlasts its copy in memory."""
    catalog = shelved_catalog()
    memory, device = catalog.table.copies
    slower = Copies(cast(LocalTier, Shelf("files", Tier.NVME)), LeastRecentlyUsed())
    catalog.table.add_tier(slower)
    parent = store(catalog, device, 0)
    child = grown(catalog, parent, 1)
    slower.put_spare(parent, 0, 0, is_proven=True)
    assert evicting(catalog, device).evict(lambda _: True, lambda: True)
    assert (parent in device, parent in slower, child in memory) == (False, True, True)
    device.put_spare(child, 1, 0, is_proven=True)
    assert evicting(catalog, slower).evict(lambda _: True, lambda: True)
    assert len(catalog.table) == 0, "nothing stays that nobody finds"


def test_a_parent_stays_for_a_child_that_is_in_memory_and_on_the_device() -> None:
    """Also where it is less recent there: a long chain's first chunks are not touched for each one that is written."""
    catalog = shelved_catalog()
    memory, device = catalog.table.copies
    parent = store(catalog, device, 0)
    child = grown(catalog, parent, 1)
    put(catalog, child, 1)
    device.policy.stored(child, catalog.table.digests[child], *catalog.worth(child))
    assert evicting(catalog, device).evict(lambda _: True, lambda: True)
    assert (parent in device, child in device, child in memory) == (True, False, True)


@dataclass(frozen=True)
class Drawn:
    """A chunk of a drawn tier: how far before it its parent came (0: it has none), its size, whether the device has it,
    too, and whether it is held."""

    behind: int
    size: int
    is_below: bool
    is_held: bool


chunks = st.lists(st.builds(Drawn, st.integers(0, 3), st.integers(1, 2), st.booleans(), st.booleans()), max_size=30)


def order_of_leaving(drawn: list[Drawn], *, last_copies: bool, by_size: bool) -> list[bytes]:
    """Return what leaves memory, one after the other, until nothing can go any more."""
    catalog = shelved_catalog()
    memory = catalog.table.copies[0]
    rows: list[int] = []
    for number, each in enumerate(drawn):
        parent = catalog.table.digests[rows[-each.behind]] if 0 < each.behind <= number else ROOT_DIGEST
        rows.append(store(catalog, memory, number, parent, each.size))
        if each.is_below:
            put(catalog, rows[-1], number)
        if each.is_held:
            catalog.table.hold(rows[-1])
    evict, gone = evicting(catalog, memory).evict, []
    digests = {row: catalog.table.digests[row] for row in rows}
    need = OfSize(2) if by_size else None

    def helps(residency: Residency) -> bool:
        return not by_size or size_of(residency) == 2

    while evict(helps, lambda: True, last_copies=last_copies, among=need):
        gone += [digests[row] for row in rows if row not in memory and digests[row] not in gone]
    return gone


@given(chunks, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 3))
def test_what_is_chosen_together_is_what_goes_one_by_one(
    drawn: list[Drawn], last_copies: bool, by_size: bool, look_count: int, ahead_count: int
) -> None:
    """The same chunks go. Those that go first are the same, too, where no chunk waits for its children."""
    expected = order_of_leaving(drawn, last_copies=last_copies, by_size=by_size)
    with patch.multiple(eviction, LOOK_COUNT=look_count, AHEAD_COUNT=ahead_count):
        found = order_of_leaving(drawn, last_copies=last_copies, by_size=by_size)
    assert sorted(found) == sorted(expected)
    if not any(each.behind for each in drawn):
        assert found == expected
