"""The profiler's search: what it looks at around a setting."""

from __future__ import annotations

from itertools import permutations

from kvstore_client import Recompute
from kvstore_ops.profiling.search import Search, around, coarse, frontier, frontiers, quality

from kvstore.planning import Point


def test_gradual_filtering_is_searched_where_there_are_layers_to_filter_in() -> None:
    found = set(around(Recompute(0, 2, 0.2, "product"), 6, "position"))
    assert Recompute(0, 2, 0.2, "product", gradual=0.3) in found
    wider = set(around(Recompute(0, 2, 0.2, "product", gradual=0.3), 6, "position"))
    assert {each.gradual for each in wider} == {0.0, 0.3, 0.6}
    for each in found | set(around(Recompute(0, 3, 0.2), 6, "position")):
        assert each.gradual == 0.0 or each.check_layer < 5


def test_what_deviates_by_rounding_alone_selects_nothing() -> None:
    """A model's own keys and values of layer 0 are the same at every position; a sibling's are not."""
    for reuse, compared in (("position", False), ("both", True)):
        searched = {*coarse(6, reuse), *around(Recompute(0, 0, 0.1), 6, reuse), *around(Recompute.reuse(), 6, reuse)}
        of_layer_0 = {each.selector for each in searched if each.ratio and each.check_layer == 0}
        assert ("deviation" in of_layer_0) is compared
        assert "suffix_attention" in of_layer_0


def point(share: float, quality: float, error: float) -> Point:
    return Point(Recompute(0, 0, share), share, quality, error, error, 0.0)


def test_a_cheap_point_that_is_not_sure_does_not_hide_a_dear_one_that_is() -> None:
    cheap, sure, idle = point(0.2, 0.98, 0.01), point(0.3, 0.979, 0.001), point(0.4, 0.978, 0.001)
    assert frontier([idle, sure, cheap], lambda each: each.assured) == (cheap, sure)
    assert frontier([idle, sure, cheap], quality) == (cheap,)
    bad = point(0.05, 0.2, 0.01), point(0.1, 0.1, 0.01)
    assert list(frontiers([idle, sure, cheap, *bad], 1.0)) == [(bad[0], cheap), (sure,), (idle,)]


def test_of_equal_points_every_run_takes_the_same() -> None:
    """A run that goes on meets them in another order: sets of settings have another one in every process."""
    equal = [
        Point(Recompute(0, 0, 0.2, selector), 0.3, 0.97, 0.01, 0.01, 0.0)
        for selector in ("product", "deviation", "first")
    ]
    assert len({frontier(each, quality) for each in permutations(equal)}) == 1


def test_what_costs_much_more_than_what_surely_loses_nothing_is_left_out() -> None:
    search = Search(6, "position", 0.97, 3)
    wanted = [Recompute(0, -1, ratio, "suffix_attention") for ratio in (0.2, 0.4, 0.5)]  # .08 more, to look ahead
    for found, left in (
        (point(0.38, 0.97, 0.001), wanted[:2]),
        (point(0.38, 0.97, 0.01), wanted),  # perhaps it was only lucky
        (point(0.38, 0.969, 0.001), wanted),
    ):
        assert search.left(wanted, {found.setting: found}) == left
        assert search.left(wanted, {found.setting: None, wanted[1]: None}) == [wanted[0], wanted[2]]
