"""The profiler's search: what it looks at around a setting."""

from __future__ import annotations

from kvstore_client import Recompute
from kvstore_ops.profiling.search import around, coarse


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
