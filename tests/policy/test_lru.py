"""The linked columns against the obvious ordered dict."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.policy import LeastRecentlyUsed
from kvstore.spec import MissReason


def use(policy: LeastRecentlyUsed, rows: Sequence[int]) -> None:
    policy.requested([bytes([row % 256]) for row in rows], rows, len(rows))


chains = st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True)
steps = st.lists(st.one_of(chains, st.integers(0, 12)), max_size=40)


@given(steps)
def test_order_is_that_of_an_ordered_dict(history: list[list[int] | int]) -> None:
    policy, model = LeastRecentlyUsed(), OrderedDict[int, None]()
    for step in history:
        if isinstance(step, int):
            policy.removed(step, MissReason.EVICTED)
            model.pop(step, None)
            continue
        use(policy, step)
        for row in reversed(step):
            model[row] = None
            model.move_to_end(row)
        assert list(policy.victims(lambda _: True)) == list(model)


@given(steps, st.sets(st.integers(0, 12)), st.data())
def test_victims_may_go_while_they_are_asked_for(
    history: list[list[int] | int], refused: set[int], data: st.DataObject
) -> None:
    policy, rows = LeastRecentlyUsed(), set[int]()
    for step in history:
        if not isinstance(step, int):
            use(policy, step)
            rows |= set(step)
    gone: list[int] = []
    for row in policy.victims(lambda each: each not in refused):
        taken = {row} | (data.draw(st.sets(st.sampled_from(sorted(rows)))) if rows else set())
        for each in taken & rows:
            policy.removed(each, MissReason.EVICTED)
            rows.discard(each)
        gone.append(row)
    assert len(gone) == len(set(gone))
    assert rows <= refused, "who may go and is still there was yielded"
    assert list(policy.victims(lambda _: True)) == [each for each in policy.victims(lambda _: True) if each in rows]


@given(steps, st.lists(st.integers(0, 14), max_size=4), steps)
def test_what_was_superseded_goes_first_until_it_is_used(
    before: list[list[int] | int], superseded: list[int], after: list[list[int] | int]
) -> None:
    policy, model = LeastRecentlyUsed(), OrderedDict[int, None]()

    def take(history: list[list[int] | int]) -> None:
        for step in history:
            if isinstance(step, int):
                policy.removed(step, MissReason.EVICTED)
                model.pop(step, None)
                continue
            use(policy, step)
            for row in reversed(step):
                model[row] = None
                model.move_to_end(row)

    take(before)
    for row in superseded:
        policy.superseded(row)
        if row in model:
            model.move_to_end(row, last=False)
        assert list(policy.victims(lambda _: True)) == list(model)
    take(after)
    assert list(policy.victims(lambda _: True)) == list(model)


@pytest.mark.parametrize("column", ["_next", "_previous"])
def test_a_column_that_cannot_grow_changes_nothing(column: str) -> None:
    """Rows are taken and given back as before, the one that failed too, once there is memory."""
    policy = LeastRecentlyUsed()
    use(policy, [0, 1])
    with memoryview(getattr(policy, column)):  # as where memory is short: it cannot grow
        for chain in ([0, 1, 5], [3]):
            with pytest.raises(BufferError):
                use(policy, chain)
            policy.removed(5, MissReason.EVICTED)
            policy.superseded(3)
            assert list(policy.victims(lambda _: True)) == [1, 0]
    use(policy, [2])
    use(policy, [0, 5])
    use(policy, [3])
    assert list(policy.victims(lambda _: True)) == [1, 2, 5, 0, 3]
    policy.removed(5, MissReason.EVICTED)
    policy.superseded(3)
    assert list(policy.victims(lambda _: True)) == [3, 1, 2, 0]


def test_a_parent_outlives_its_children() -> None:
    policy = LeastRecentlyUsed()
    use(policy, [1, 2, 3])
    use(policy, [1, 2, 4])
    assert list(policy.victims(lambda _: True)) == [3, 4, 2, 1]


@given(steps, st.lists(st.integers(0, 14), max_size=4), st.sets(st.integers(0, 12)), st.integers(1, 5))
def test_some_rows_are_ordered_as_all_are(
    history: list[list[int] | int], superseded: list[int], asked: set[int], count_max: int
) -> None:
    policy = LeastRecentlyUsed()
    for step in history:
        if isinstance(step, int):
            policy.removed(step, MissReason.EVICTED)
        else:
            use(policy, step)
    for row in superseded:
        policy.superseded(row)
    order = list(policy.victims(lambda _: True))
    assert sorted(order, key=policy.place) == order
    assert [row for row in range(16) if policy.place(row)] == sorted(order)
    some = [row for row in order if row in asked]
    rows, found = np.array(sorted(some), np.int64), list[int]()
    while part := policy.in_order(rows, policy.place(found[-1]) if found else None, count_max):
        assert len(part) <= count_max
        found += part
    assert found == some
