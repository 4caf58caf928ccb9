"""Rows, ghosts, tails: what is visible, what is kept because something hangs on it, what is free again."""

from __future__ import annotations

import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.catalog import NOWHERE, ROOT_ROW, Catalog, Namespace
from kvstore.catalog.tails import NAMED_MAX, Tails
from kvstore.errors import Exhausted
from kvstore.keys import ROOT_DIGEST
from kvstore.spec import ChunkState, Encoding, Exactness, MissReason, Provenance, Tier
from tests.catalog.shelves import put as shelve
from tests.catalog.shelves import shelved_catalog
from tests.presence.shown import difference
from tests.specs import small_spec

FULL = 16


def digest(name: str) -> bytes:
    return name.encode().ljust(32, b".")


@pytest.fixture
def catalog() -> Catalog:
    return shelved_catalog()


@pytest.fixture
def space(catalog: Catalog) -> Namespace:
    return catalog.register(small_spec()).namespace(None, Exactness.EXACT)


def put(catalog: Catalog, space: Namespace, name: str, parent: str = "", *, count: int = FULL, where: int = 7) -> int:
    row = catalog.row_of(space, digest(name), digest(parent) if parent else ROOT_DIGEST, count)
    shelve(catalog, row, where)
    catalog.publish(row)
    return row


def take(catalog: Catalog, row: int, reason: MissReason = MissReason.EVICTED) -> None:
    shelve(catalog, row, NOWHERE)
    catalog.withdraw(row, reason, Tier.NVME)


def test_a_chunk_that_leaves_before_its_child_leaves_a_ghost(catalog: Catalog, space: Namespace) -> None:
    parent = put(catalog, space, "a")
    child = put(catalog, space, "b", "a")
    take(catalog, parent, MissReason.CORRUPT)
    walk = catalog.walk([space], [digest("a"), digest("b")])
    assert (walk.hit_count, walk.reason) == (0, MissReason.CORRUPT)
    assert space.ghosts == {digest("a"): parent}
    assert put(catalog, space, "a") == parent, "the store takes the ghost over"
    assert catalog.walk([space], [digest("a"), digest("b")]).hit_count == 2
    take(catalog, child)
    take(catalog, parent)
    assert (len(catalog.table), space.ghosts) == (0, {})


def test_a_chain_that_turns_back_makes_no_ring(catalog: Catalog, space: Namespace) -> None:
    """A child is here, and its parent is said to hang on it."""
    child = put(catalog, space, "child", "parent")
    parent = catalog.known_row(space, digest("parent"), digest("child"), FULL)
    assert catalog.table.parents[parent] == ROOT_ROW
    take(catalog, child)
    assert len(catalog.table) == 0


def test_recovered_out_of_order(catalog: Catalog, space: Namespace) -> None:
    """A device tells its chunks in any order; parents may be missing."""
    grandchild = put(catalog, space, "c", "b")
    child = put(catalog, space, "b", "a")
    assert catalog.walk([space], [digest(each) for each in "abc"]).hit_count == 0
    root = put(catalog, space, "a")
    assert catalog.walk([space], [digest(each) for each in "abc"]).hit_count == 3
    assert catalog.table.parents[grandchild] == child
    assert catalog.table.parents[child] == root
    assert catalog.table.parents[root] == ROOT_ROW
    for row in (grandchild, child, root):
        take(catalog, row)
    assert len(catalog.table) == 0


@pytest.mark.parametrize("part", [0, 1])
def test_what_is_on_its_way_or_left_is_told_beside_what_is_cold(catalog: Catalog, space: Namespace, part: int) -> None:
    parts = [space, catalog.models[space.fingerprint].namespace(0, Exactness.EXACT)]
    names = [digest(name) for name in "abc"]
    assert [run[:3] for run in catalog.walk(parts, names).runs] == [(3, ChunkState.MISS, MissReason.COLD)]
    catalog.depart(parts[part], names[1], MissReason.EVICTED)
    assert [run.reason for run in catalog.walk(parts, names).runs] == [
        MissReason.COLD, MissReason.EVICTED, MissReason.COLD,
    ]  # fmt: skip
    put(catalog, parts[part], "b")
    catalog.claim(parts[part], names[2], object())
    assert [run[:2] for run in catalog.walk(parts, names).runs] == [(2, ChunkState.MISS), (1, ChunkState.PENDING)]


def test_reasons_are_kept_of_so_many_chunks_in_all_namespaces_together(
    catalog: Catalog, space: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each namespace kept as many for itself: memory times the number of namespaces, which clients make."""
    monkeypatch.setattr("kvstore.catalog.namespace.DEPARTURE_COUNT_MAX", 4)
    spaces = [space, *(catalog.models[space.fingerprint].namespace(layer, Exactness.EXACT) for layer in (0, 1))]
    for name in "abc":
        for each in spaces:
            catalog.depart(each, digest(name), MissReason.EVICTED)
    assert [list(each.departures) for each in spaces] == [[digest("c")], [digest("c")], [digest("b"), digest("c")]]
    catalog.depart(spaces[2], digest("b"), MissReason.CORRUPT)  # the oldest one becomes the newest
    put(catalog, spaces[0], "c")  # and one is here again
    for name in "de":
        catalog.depart(spaces[1], digest(name), MissReason.EVICTED)
    assert [sorted(each.departures) for each in spaces] == [[], [digest("d"), digest("e")], [digest("b"), digest("c")]]
    assert [catalog.walk([each], [digest("b")]).reason for each in spaces] == [
        MissReason.COLD, MissReason.COLD, MissReason.CORRUPT,
    ]  # fmt: skip
    assert difference(catalog) == ""


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_chunk_hits_where_every_part_of_it_is(catalog: Catalog, space: Namespace, lacking: int) -> None:
    """A chain of which a prompt wants the hidden states of two layers, too."""
    model = catalog.models[space.fingerprint]
    parts = [space, model.namespace(0, Exactness.EXACT), model.namespace(1, Exactness.EXACT)]
    for number, part in enumerate(parts):
        put(catalog, part, "a")
        if number != lacking:
            put(catalog, part, "b", "a")
    walk = catalog.walk(parts, [digest("a"), digest("b")])
    assert (walk.hit_count, walk.reason) == (1, MissReason.COLD)
    assert [len(chain) for chain in walk.chains] == [1, 1, 1]


def test_a_held_row_is_not_given_to_another(catalog: Catalog, space: Namespace) -> None:
    row = put(catalog, space, "a")
    catalog.table.hold(row)
    take(catalog, row, MissReason.CORRUPT)
    other = put(catalog, space, "x")
    assert other != row
    catalog.unhold(row)
    assert put(catalog, space, "y") == row, "free now, and used again"


def test_walk_tells_the_tier_of_each_run(catalog: Catalog, space: Namespace) -> None:
    rows = [put(catalog, space, "a"), put(catalog, space, "b", "a"), put(catalog, space, "c", "b", where=2 << 56)]
    catalog.table.copies[0].put(rows[0], Encoding.RAW << 56)
    runs = catalog.walk([space], [digest(each) for each in "abcd"]).runs
    assert [(run.chunk_count, run.tier, run.encoding) for run in runs] == [
        (1, Tier.DRAM, Encoding.RAW),
        (1, Tier.NVME, Encoding.NONE),
        (1, Tier.NVME, Encoding.LZ4),
        (1, Tier.NONE, Encoding.NONE),
    ]
    assert runs[-1].state is ChunkState.MISS


def test_a_parent_keeps_any_number_of_tails(catalog: Catalog, space: Namespace) -> None:
    """A few are named, the newest; of more their lengths are told, as long as one of a length is there."""
    rows = [put(catalog, space, f"t{number}", count=3 + number % 5) for number in range(NAMED_MAX)]
    assert catalog.tails([space], ROOT_DIGEST) == (rows, 0)
    rows += [put(catalog, space, f"t{number}", count=3 + number % 5) for number in range(NAMED_MAX, 20)]
    put(catalog, space, "f")
    assert catalog.tails([space], ROOT_DIGEST) == (rows[-NAMED_MAX:], 0b11111000)
    assert all(digest(f"t{number}") in space.index for number in range(20))
    for row in rows[4::5]:
        take(catalog, row)
    assert catalog.tails([space], ROOT_DIGEST).lengths == 0b1111000, "none of 7 tokens is left"
    assert difference(catalog) == "", "clients see the same lengths"
    for row in set(rows) - set(rows[4::5]):
        take(catalog, row)
    assert ROOT_DIGEST not in space.tails


def test_what_tells_tails_does_not_grow_with_them() -> None:
    """The root of a service for short prompts: a lookup's work is that of one tail, and nothing is kept per tail."""
    tails, counts = Tails(), array("i", [1 + row % 255 for row in range(100_000)])
    tracemalloc.start()
    for row in range(len(counts)):
        tails.add(ROOT_DIGEST, row, counts)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 64 << 10, "a number per length"
    assert len(tails.named(ROOT_DIGEST)) == NAMED_MAX
    assert tails.bits(ROOT_DIGEST, counts) == (1 << 256) - 2
    for row in range(len(counts)):
        assert tails.remove(ROOT_DIGEST, row, counts) == (row == len(counts) - 1)
    assert ROOT_DIGEST not in tails


@given(
    st.lists(st.tuples(st.sampled_from([True, True, False]), st.sampled_from("pppq"), st.integers(0, 11)), max_size=60)
)
def test_tails_are_those_of_a_dict(history: list[tuple[bool, str, int]]) -> None:
    tails, model = Tails(), dict[str, list[int]]()
    counts = array("i", [1 + row % 3 for row in range(12)])
    for comes, parent, row in history:
        here = model.setdefault(parent, [])
        if comes and not any(row in each for each in model.values()):
            assert tails.add(digest(parent), row, counts) == (not here)
            here.append(row)
        elif not comes and row in here:
            here.remove(row)
            assert tails.remove(digest(parent), row, counts) == (not here)
        for name, rows in model.items():
            assert (digest(name) in tails) == bool(rows)
            assert tails.bits(digest(name), counts) == sum({1 << counts[each] for each in rows})
            named = list(tails.named(digest(name)))
            assert set(named) <= set(rows)
            assert tails.are_all_named(digest(name)) == (sorted(named) == sorted(rows))


def test_the_eldest_tail_is_known_by_its_length_when_the_named_are_gone() -> None:
    tails, counts = Tails(), array("i", [1 + row for row in range(NAMED_MAX + 1)])
    for row in range(len(counts)):
        tails.add(ROOT_DIGEST, row, counts)
    assert tails.bits(ROOT_DIGEST, counts) == sum(1 << each for each in counts)
    for row in range(1, len(counts)):
        assert not tails.remove(ROOT_DIGEST, row, counts)
    assert ROOT_DIGEST in tails
    assert not tails.are_all_named(ROOT_DIGEST)
    assert tails.bits(ROOT_DIGEST, counts) == 1 << counts[0]
    assert tails.remove(ROOT_DIGEST, 0, counts)
    assert ROOT_DIGEST not in tails


def test_what_hangs_on_a_chunk_comes_parents_first(catalog: Catalog, space: Namespace) -> None:
    other = catalog.register(small_spec()).namespace(None, Exactness.DERIVED)
    root, _ = put(catalog, space, "a"), put(catalog, other, "a")
    assert catalog.below(space, [root]) == []
    left = put(catalog, space, "gone", "a")
    below = [put(catalog, space, name, parent) for name, parent in (("d", "c"), ("c", "a"), ("e", "d"))]
    put(catalog, other, "c", "a")
    take(catalog, left)
    assert catalog.below(space, [root]) == [below[1], below[0], below[2]]
    assert catalog.below(space, [below[0]]) == [below[2]]


def test_what_came_before_a_chunk_hangs_on_an_earlier_one_of_its_name(catalog: Catalog, space: Namespace) -> None:
    """Of a value that is replaced again and again, all that earlier ones left would be walked each time."""
    chain = (("old", "root"), ("older", "old"), ("root", ""), ("new", "root"), ("newer", "new"), ("other", "root"))
    rows = {}
    for second, (name, parent) in enumerate(chain):
        rows[name] = put(catalog, space, name, parent)
        catalog.table.came(rows[name], 1000 + second)
    assert catalog.below(space, [rows["root"]]) == [rows["new"], rows["other"], rows["newer"]]


def test_documents_are_no_tails() -> None:
    """Each ends where it ends: many of them begin at the root, and nobody looks for them by a length."""
    catalog = shelved_catalog()
    space = catalog.register(small_spec()).namespace(None, Exactness.EXACT, Provenance.STANDALONE)
    for number in range(5):
        put(catalog, space, f"d{number}", count=number + 1)
    put(catalog, space, "full")
    assert catalog.tails([space], ROOT_DIGEST) == ([], 0)
    assert len(space.index) == 6


def test_a_namespace_waits_for_its_model() -> None:
    """What a device holds of a model that nobody registered is kept, and found once somebody does."""
    known = shelved_catalog()
    name = known.register(small_spec()).namespace(None, Exactness.EXACT).fingerprint
    catalog = shelved_catalog()
    space = catalog.spaces.get(name, Provenance.IN_CONTEXT, Exactness.EXACT)
    put(catalog, space, "a")
    tail = put(catalog, space, "t", "a", count=5)
    put(catalog, space, "wrong", "a", count=FULL + 1)
    model = catalog.register(small_spec())
    found = model.namespace(None, Exactness.EXACT)
    assert found is space
    assert catalog.tails([space], digest("a")) == ([tail], 0)
    assert catalog.walk([space], [digest("a"), digest("wrong")]).hit_count == 1
    assert space.byte_count == space.chunk_bytes(FULL) + space.chunk_bytes(5)


class CatalogMachine(RuleBasedStateMachine):
    """Chunks named by their path come, go, are held and let go, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.catalog = shelved_catalog()
        self.space = self.catalog.register(small_spec()).namespace(None, Exactness.EXACT)
        self.here: dict[str, int] = {}
        self.held: list[tuple[str, int]] = []

    @rule(path=st.text("ab", min_size=1, max_size=4))
    def come(self, path: str) -> None:
        if path not in self.here:
            self.here[path] = put(self.catalog, self.space, path, path[:-1])

    @rule(data=st.data())
    def go(self, data: st.DataObject) -> None:
        if self.here:
            path = data.draw(st.sampled_from(sorted(self.here)))
            take(self.catalog, self.here.pop(path))

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        if self.here:
            path = data.draw(st.sampled_from(sorted(self.here)))
            self.catalog.table.hold(self.here[path])
            self.held.append((path, self.here[path]))

    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        if self.held:
            path, row = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            assert self.catalog.table.digests[row] == digest(path), "a held row was given to another chunk"
            self.catalog.unhold(row)

    @invariant()
    def the_table_is_what_it_should_be(self) -> None:
        table, needed = self.catalog.table, set(self.here) | {path for path, _ in self.held}
        for path in list(needed):
            needed |= {path[:count] for count in range(1, len(path))} if path in self.here else set()
        used = {table.digests[row].decode().rstrip("."): row for row in table.rows()}
        assert set(self.here.items()) <= set(used.items())
        assert {name for name in used if name not in needed and not table.is_needed(used[name])} == set()
        assert {each.decode().rstrip(".") for each in self.space.index} == set(self.here)
        assert self.space.byte_count == len(self.here) * self.space.chunk_bytes(FULL)
        assert difference(self.catalog) == ""
        for path, row in self.here.items():
            parent = table.parents[row]
            assert (parent == ROOT_ROW) == (len(path) == 1)
            assert parent == ROOT_ROW or table.digests[parent] == digest(path[:-1])


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_who_only_looks_makes_no_namespace(catalog: Catalog) -> None:
    model = catalog.register(small_spec())
    for layer in (None, 0, 1):
        for exactness in Exactness:
            for provenance in Provenance:
                looked = model.seen(layer, exactness, provenance)
                assert catalog.walk([looked], [digest("a")]).runs[0].reason is MissReason.COLD
                assert catalog.tails([looked], ROOT_DIGEST) == ([], 0)
    assert catalog.spaces.numbered == []
    made = model.namespace(None, Exactness.EXACT)
    assert model.seen(None, Exactness.EXACT) is made
    assert catalog.spaces.numbered == [made]


def test_namespaces_end_at_their_limit_and_those_that_are_there_go_on() -> None:
    catalog = shelved_catalog(namespace_count_max=2)
    model = catalog.register(small_spec())
    spaces = [model.namespace(layer, Exactness.EXACT) for layer in (None, 0)]
    for number, space in enumerate(spaces):
        put(catalog, space, f"a{number}")
    with pytest.raises(Exhausted, match=r"limits\.namespace_count_max"):
        model.namespace(1, Exactness.EXACT)
    for number, space in enumerate(spaces):
        assert catalog.walk([model.seen(space.layer, Exactness.EXACT)], [digest(f"a{number}")]).hit_count == 1
    assert catalog.walk([model.seen(1, Exactness.EXACT)], [digest("a0")]).hit_count == 0


@pytest.mark.parametrize("has_free_row", [False, True])
@pytest.mark.parametrize("wrong", [{"space": 1 << 16}, {"parent": 1 << 31}, {"token_count": 1 << 31}])
def test_columns_never_shift_against_each_other(wrong: dict[str, int], has_free_row: bool) -> None:
    """A row that cannot be added changes nothing, whichever column refuses it, and the next one is whole."""
    table = shelved_catalog().table
    first = table.add(1, digest("a"), ROOT_ROW, 3)
    if has_free_row:
        table.remove(table.add(2, digest("gone"), ROOT_ROW, 4))
    with pytest.raises(OverflowError):
        table.add(**{"space": 1, "digest": digest("b"), "parent": ROOT_ROW, "token_count": 5, **wrong})
    columns = (table.spaces, table.parents, table.child_counts, table.token_counts, table.copies[1].column)
    for column in columns:
        with memoryview(column):
            if not has_free_row:
                with pytest.raises(BufferError):
                    table.add(1, digest("b"), ROOT_ROW, 5)
    assert len(table) == 1
    rows = [first, *(table.add(number, digest(f"c{number}"), first, number) for number in (5, 6, 7))]
    assert [table.digests[row] for row in rows] == [digest("a"), *(digest(f"c{number}") for number in (5, 6, 7))]
    assert [table.spaces[row] for row in rows] == [1, 5, 6, 7]
    assert [table.token_counts[row] for row in rows] == [3, 5, 6, 7]
    assert [table.parents[row] for row in rows] == [ROOT_ROW, first, first, first]
    assert table.child_counts[first] == 3
    assert {len(column) for column in (*columns, table.write_marks, table.digests)} == {len(table.digests)}
