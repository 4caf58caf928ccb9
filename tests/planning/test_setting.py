"""Settings: named points of one algorithm, and what each needs."""

from __future__ import annotations

from typing import Any

import pytest
from kvstore_kernels import Metric, Selector

from kvstore.errors import InvalidRequest
from kvstore.planning.setting import LOOK_AHEAD_SHARE, LOOKING_AHEAD, METRICS, SELECTORS, Recompute


def test_the_names_are_the_kernels() -> None:
    assert tuple(Selector) == SELECTORS
    assert tuple(Metric) == METRICS
    assert set(LOOKING_AHEAD) < set(SELECTORS)


def test_the_papers_are_points_of_it() -> None:
    assert Recompute.cacheblend(3, 0.15) == Recompute(0, 2, 0.15)
    assert Recompute.cacheblend(3, 0.15).check_layer == 3
    assert Recompute.droidspeak(4, 9) == Recompute(4, 9, 0.0)
    assert Recompute.full(12) == Recompute(0, 11)
    assert Recompute.reuse() == Recompute(0, -1)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((0, 1, 1.5), "ratio"),
        ((0, 1, -0.1), "ratio"),
        ((0, 1, float("nan")), "ratio"),
        ((0, 1, "half"), "ratio"),
        ((-1, 1), "first_layer"),
        ((3, 1), "last_layer"),
        ((0.0, 1), "first_layer"),
        ((0, 1, 0.1, "best"), "selector"),
        ((0, 1, 0.1, "first", "kv"), "metric"),
        ((0, 1, 0.1, "first", "k", 2.0), "gradual"),
        ((0, 1, 0.1, "random", "k", 0.0, None), "seed"),
        ((0, 1, 0.1, "random", "k", 0.0, 1 << 63), "seed"),
    ],
)
def test_what_is_wrong_is_named(fields: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        Recompute(*fields)


def test_the_look_ahead_is_a_part_of_f() -> None:
    plain, ahead = Recompute(0, -1, 0.2), Recompute(0, -1, 0.2, "suffix_attention")
    assert plain.share(6) == pytest.approx(0.2)
    assert ahead.share(6) == pytest.approx(0.2 + LOOK_AHEAD_SHARE)
    assert ahead.carried_share(6) == plain.carried_share(6)
    for nothing_to_choose in (Recompute(0, 5, 0.3, "product"), Recompute(0, 2, 1.0, "product"), Recompute(0, 2)):
        assert nothing_to_choose.look_ahead_share(6) == 0.0
    assert Recompute(0, 4, 0.99, "product").share(6) == 1.0, "no setting costs more than a prefill"


def test_layers_the_model_does_not_have() -> None:
    Recompute.full(4).check(4)
    for setting in (Recompute.full(5), Recompute(4, 3, 0.1), Recompute.droidspeak(2, 6)):
        with pytest.raises(InvalidRequest, match="4 layers"):
            setting.check(4)


@pytest.mark.parametrize(
    ("setting", "loaded", "needs_hidden"),
    [
        (Recompute.reuse(), (0, 1, 2, 3, 4, 5), False),
        (Recompute.full(6), (), False),
        (Recompute(0, 0, 1.0), (), False),
        (Recompute.cacheblend(2, 0.2), (2, 3, 4, 5), False),
        (Recompute.cacheblend(2, 0.2, selector="first"), (3, 4, 5), False),
        (Recompute.cacheblend(2, 0.2, selector="product"), (0, 1, 2, 3, 4, 5), False),
        (Recompute.droidspeak(1, 3), (0, 4, 5), True),
        (Recompute.droidspeak(2, 5), (0, 1), True),
        (Recompute(2, 1, 0.2), (0, 1, 2, 3, 4, 5), True),
        (Recompute(2, 3, 1.0), (0, 1), True),
        (Recompute(2, 5, 0.3, "product"), (0, 1), True),
    ],
)
def test_what_is_loaded(setting: Recompute, loaded: tuple[int, ...], needs_hidden: bool) -> None:
    assert setting.loaded_layers(6) == loaded
    assert setting.needs_hidden is needs_hidden
