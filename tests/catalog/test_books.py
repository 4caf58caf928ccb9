"""Random histories of a catalog of several models at its limits, against sets: chunks here, pinned, on their way."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.catalog import Namespace
from kvstore.config import LimitSettings
from kvstore.controller.pins import Pins
from kvstore.errors import Exhausted
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import EventKind, Exactness, MissReason, Tier
from tests.catalog.shelves import put as shelve
from tests.catalog.shelves import shelved_catalog
from tests.catalog.test_catalog import FULL, NOWHERE, digest
from tests.presence.shown import difference
from tests.simulated import ManualClock
from tests.specs import small_spec

MODELS, SPACES = 6, 3
"""Models that come; a ``shelved_catalog`` registers four at once, and these catalogs have so many namespaces."""
Chunk = tuple[int, str]
"""A model's number, and a path. A path that ends with a digit is a partial chunk of so many tokens."""
chunks = st.tuples(st.integers(0, MODELS - 1), st.from_regex("[ab]{0,3}[ab1-3]", fullmatch=True))
SPECS = [small_spec(model_id=f"m{number}") for number in range(MODELS)]


def tokens_in(path: str) -> int:
    return int(path[-1]) if path[-1].isdigit() else FULL


class CatalogBooks(RuleBasedStateMachine):
    """``here``: the row of each visible chunk. ``pins``: the row of each pinned one. ``told``: by the events."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = shelved_catalog(namespace_count_max=SPACES)
        self.clock = ManualClock()
        limits = LimitSettings(leased_bytes_max=1 << 30, pin_bytes_max=1 << 30)
        self.pins = Pins(self.catalog, limits, self.clock)
        self.watcher = self.catalog.spaces.events.watch(1 << 20, 1)
        self.here: dict[Chunk, int] = {}
        self.pinned: dict[Chunk, int] = {}
        self.until: dict[Chunk, float] = {}
        self.coming: set[Chunk] = set()
        self.told: Counter[Chunk] = Counter()

    def space(self, number: int) -> Namespace | None:
        """Return the namespace for a store; None where the limits refuse it."""
        try:
            return self.catalog.register(SPECS[number]).namespace(None, Exactness.EXACT)
        except Exhausted:
            busy = {number for number, _ in (*self.here, *self.pinned, *self.coming)}
            assert len(busy) >= SPACES, "refused, and something could have been forgotten"
            return None

    @rule(chunk=chunks)
    def claim(self, chunk: Chunk) -> None:
        space = self.space(chunk[0])
        if space is not None and chunk not in self.here:
            self.catalog.claim(space, digest(chunk[1]), self)
            self.coming.add(chunk)

    @rule(data=st.data(), fails=st.booleans())
    def arrive(self, data: st.DataObject, fails: bool) -> None:
        if not self.coming:
            return
        chunk = data.draw(st.sampled_from(sorted(self.coming)))
        self.coming.remove(chunk)
        space = self.space(chunk[0])
        assert space is not None
        path = chunk[1]
        if not fails:
            parent = digest(path[:-1]) if len(path) > 1 else ROOT_DIGEST
            row = self.catalog.row_of(space, digest(path), parent, tokens_in(path))
            shelve(self.catalog, row, 7)
            self.catalog.publish(row)
            self.here[chunk] = row
        self.catalog.unclaim(space, digest(path))

    @rule(data=st.data(), reason=st.sampled_from([MissReason.EVICTED, MissReason.CORRUPT]))
    def go(self, data: st.DataObject, reason: MissReason) -> None:
        if self.here:
            row = self.here.pop(data.draw(st.sampled_from(sorted(self.here))))
            shelve(self.catalog, row, NOWHERE)
            self.catalog.withdraw(row, reason, Tier.NVME)

    @rule(data=st.data(), seconds=st.sampled_from([0.0, 2.0, 7.0]))
    def pin(self, data: st.DataObject, seconds: float) -> None:
        if self.here:
            chunk = data.draw(st.sampled_from(sorted(self.here)))
            if self.pinned.get(chunk, self.here[chunk]) == self.here[chunk]:
                self.pins.pin(self.here[chunk], seconds)
                self.pinned[chunk] = self.here[chunk]
                self.until[chunk] = self.clock.monotonic() + seconds if seconds else float("inf")

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pinned:
            chunk = data.draw(st.sampled_from(sorted(self.pinned)))
            assert self.pins.unpin(self.pinned.pop(chunk))

    @rule(seconds=st.sampled_from([1.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        while self.pins.expire():
            pass
        self.pinned = {each: row for each, row in self.pinned.items() if self.until[each] > self.clock.monotonic()}

    def _spaces(self) -> dict[int, Namespace]:
        known = {each.spec.model_id: each for each in self.catalog.models.values()}
        found = {}
        for number, spec in enumerate(SPECS):
            if spec.model_id in known:
                for space in known[spec.model_id].namespaces.values():
                    found[number] = space
        return found

    @invariant()
    def the_books_balance(self) -> None:
        table, spaces = self.catalog.table, self._spaces()
        indexed = {(number, name.decode().rstrip(".")) for number, space in spaces.items() for name in space.index}
        assert indexed == set(self.here)
        assert {
            (number, name.decode().rstrip(".")) for number, space in spaces.items() for name in space.pending
        } == self.coming
        for number, space in spaces.items():
            of_model = [path for each, path in self.here if each == number]
            assert space.byte_count == sum(space.chunk_bytes(tokens_in(path)) for path in of_model)
            assert not space.ghosts.keys() & space.index.keys()
            assert not space.departures.keys() & space.index.keys()
            assert table.row_count(space.number) == len(space.index) + len(space.ghosts)
            for path in ("", "a", "b", "ab"):
                tails = sorted(tokens_in(each) for each in of_model if each[:-1] == path and each[-1].isdigit())
                parent = digest(path) if path else ROOT_DIGEST
                assert sorted(table.token_counts[row] for row in space.tails.named(parent)) == tails
        assert {chunk for chunk, row in self.pinned.items() if row in self.pins} == set(self.pinned)
        assert len(self.pins) == len(self.pinned)
        kept = {row for row in table.rows() if self.pins.is_kept(row)}
        assert set(self.pinned.values()) <= kept
        assert all(table.is_held(row) for row in kept)
        assert bool(kept) == bool(self.pinned)
        assert (self.pins.byte_count == 0) == (not kept)
        needed = set(self.here.values()) | kept
        assert all(row in needed or table.is_needed(row) for row in table.rows())
        assert self.catalog.spaces.count <= SPACES
        assert len(self.catalog.models) <= 4
        assert difference(self.catalog) == ""

    @invariant()
    def events_tell_what_is_here(self) -> None:
        while self.watcher._queue:
            event = self.watcher._queue.popleft()
            assert event.space.model_spec is not None
            chunk = int(event.space.model_spec.model_id[1:]), event.digest.decode().rstrip(".")
            self.told[chunk] += {EventKind.STORED: 1, EventKind.REMOVED: -1}[event.kind]
        assert {chunk for chunk, count in self.told.items() if count == 1} == set(self.here)
        assert set(self.told.values()) <= {0, 1}

    def teardown(self) -> None:
        for row in self.pinned.values():
            self.pins.unpin(row)
        for row in self.here.values():
            shelve(self.catalog, row, NOWHERE)
            self.catalog.withdraw(row, MissReason.EVICTED, Tier.NVME)
        for number, path in self.coming:
            self.catalog.unclaim(self._spaces()[number], digest(path))
        assert len(self.catalog.table) == 0
        assert self.pins.byte_count == 0
        departed = sum(len(space.departures) for space in self.catalog.spaces.numbered)
        assert departed == len(self.catalog.spaces.departures._order)


TestCatalogBooks = CatalogBooks.TestCase
TestCatalogBooks.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
