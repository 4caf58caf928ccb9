"""Schedules: who comes next, who never waits too long, and what is worth prefetching."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import ComputeRate
from kvstore.planning.order import Schedule, WaitingContext, schedule

CHUNK = 16
RATE = ComputeRate(token_s=0.01, sample_count=1)
FOREVER = 1e9


def context(path: str, *, warm: int = 0, stored: int = 0, waited_s: float = 0.0, rest: int = 1) -> WaitingContext:
    """``path``: a letter per chunk; what two have in common of it is the prefix that they share."""
    digests = [path[: stop + 1].encode() for stop in range(len(path))]
    return WaitingContext(len(path) * CHUNK + rest, digests, CHUNK, warm, stored, waited_s)


@st.composite
def queues(draw: st.DrawFn) -> list[WaitingContext]:
    found = []
    for _ in range(draw(st.integers(0, 12))):
        path = draw(st.text("ab", max_size=5))
        stored = draw(st.integers(0, len(path)))
        warm = draw(st.integers(0, stored))
        found.append(context(path, warm=warm, stored=stored, waited_s=draw(st.floats(0, 20))))
    return found


def computed_tokens(contexts: list[WaitingContext], order: tuple[int, ...]) -> int:
    """With a memory that loses nothing: what the order makes the engine compute."""
    warm = {digest for each in contexts for digest in each.chunks[: each.warm_chunks]}
    total = 0
    for index in order:
        each = contexts[index]
        total += each.token_count - CHUNK * len([digest for digest in each.chunks if digest in warm])
        warm.update(each.chunks)
    return total


@settings(max_examples=150, deadline=None)
@given(queues(), st.floats(0, 30))
def test_each_comes_once_and_begins_when_those_before_it_are_computed(
    contexts: list[WaitingContext], wait_s_max: float
) -> None:
    found = schedule(contexts, RATE, wait_s_max=wait_s_max)
    assert sorted(found.order) == list(range(len(contexts)))
    for count in range(len(contexts)):
        before = computed_tokens(contexts, found.order[:count])
        assert found.starts_s[count] == pytest.approx(before * RATE.token_s)


@settings(max_examples=150, deadline=None)
@given(queues(), st.floats(0, 30))
def test_who_has_waited_too_long_is_overtaken_by_none_that_came_later(
    contexts: list[WaitingContext], wait_s_max: float
) -> None:
    found = schedule(contexts, RATE, wait_s_max=wait_s_max)
    for place, index in enumerate(found.order):
        for earlier, begins_s in zip(found.order[:place], found.starts_s, strict=False):
            came_later = contexts[earlier].waited_s < contexts[index].waited_s
            assert not (came_later and contexts[index].waited_s + begins_s >= wait_s_max)


@settings(max_examples=150, deadline=None)
@given(queues())
def test_who_has_waited_long_enough_for_nobody_has_most_in_memory(contexts: list[WaitingContext]) -> None:
    """Checked step by step against the definition."""
    found = schedule(contexts, RATE, wait_s_max=FOREVER)
    warm = {digest for each in contexts for digest in each.chunks[: each.warm_chunks]}
    left = set(range(len(contexts)))
    for index in found.order:
        most = {each: sum(digest in warm for digest in contexts[each].chunks) for each in left}
        longest = [each for each in left if most[each] == max(most.values())]
        assert contexts[index].waited_s == max(contexts[each].waited_s for each in longest)
        assert index in longest
        left.remove(index)
        warm.update(contexts[index].chunks)


@settings(max_examples=150, deadline=None)
@given(queues(), st.integers(0, 6))
def test_hints_name_what_is_below_memory_once_and_in_time(contexts: list[WaitingContext], hints_max: int) -> None:
    found = schedule(contexts, RATE, wait_s_max=5.0, hints_max=hints_max)
    assert len(found.hints) <= hints_max
    starts_s = dict(zip(found.order, found.starts_s, strict=True))
    told = [digest for each in contexts for digest in set(each.chunks[: each.warm_chunks])]
    told = list(dict.fromkeys(told))
    for hint in found.hints:
        each = contexts[hint.index]
        assert each.warm_chunks <= hint.start < hint.stop == each.stored_chunks
        assert hint.due_s == starts_s[hint.index]
        told += each.chunks[hint.start : hint.stop]
    assert [hint.due_s for hint in found.hints] == sorted(hint.due_s for hint in found.hints)
    assert len(told) == len(set(told))


def shown(found: Schedule) -> str:
    return "".join(map(str, found.order))


def test_a_conversation_is_not_torn_apart() -> None:
    """In the order of arrival, one short memory would compute the shared beginning of each twice."""
    contexts = [context(path) for path in ("aab", "bb", "aaa", "bbb", "aa")]
    order = shown(schedule(contexts, RATE, wait_s_max=FOREVER))
    assert order in ("02413", "04213", "02431", "04231")


def test_a_stranger_waits_no_longer_than_the_bound() -> None:
    """Four share what is in memory, and take 0.01 s each; the one that shares nothing came before them."""
    contexts = [*(context("aaaa", warm=4, stored=4) for _ in range(4)), context("z", waited_s=9.985)]
    assert shown(schedule(contexts, RATE, wait_s_max=FOREVER)) == "01234"
    assert shown(schedule(contexts, RATE, wait_s_max=10.0)) == "01423"


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRequest, match="wait_s_max"):
        schedule([], RATE, wait_s_max=float("nan"))
    with pytest.raises(InvalidRequest, match="warm_chunks 3"):
        context("ab", warm=3)
    with pytest.raises(InvalidRequest, match="token_count 20"):
        WaitingContext(20, [b"a", b"b"], CHUNK)
    with pytest.raises(InvalidRequest, match="waited_s nan"):
        context("ab", waited_s=float("nan"))
    assert schedule([], RATE, wait_s_max=1.0) == Schedule((), (), ())


def test_a_thousand_contexts_of_one_beginning_are_ordered_by_passing_each_chunk_once() -> None:
    passed = 0

    class Counted(list[bytes]):
        def __getitem__(self, place):  # type: ignore[no-untyped-def]  # both forms of list's
            nonlocal passed
            passed += 1
            return super().__getitem__(place)

    shared = [b"%d" % each for each in range(100)]
    contexts = [WaitingContext(102 * CHUNK, Counted([*shared, b"own %d" % each]), CHUNK) for each in range(1000)]
    schedule(contexts, RATE, wait_s_max=FOREVER)
    assert passed < 5 * 101 * 1000
