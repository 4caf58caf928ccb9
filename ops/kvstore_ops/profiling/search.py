"""Which settings to measure: a coarse grid, cheapest first, then what lies around the frontier. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from kvstore.planning import Point
from kvstore.planning.profile import ERRORS
from kvstore.planning.setting import METRICS, Recompute

COARSE_RATIOS = (0.1, 0.25)
COARSE_SELECTORS = ("deviation", "product", "suffix_attention")
SELECTORS = (*COARSE_SELECTORS, "suffix_peak", "first")
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)
GRADUAL = (0.0, 0.3, 0.6, 1.0)
PROMISING = 0.9
"""Frontier points below that share of full prefill's quality are not looked around: nobody would ask for them."""
ENOUGH = 0.99
"""A share of full prefill's quality that a search must not end below while there are dearer settings."""
ROOM = 1.5
"""What costs that much more than a setting that answers as well as a full prefill is left out."""
FRONTIERS = 2
"""How many frontiers, one behind the other, are measured again: the second one was perhaps only less lucky."""


def nominal_share(setting: Recompute, layer_count: int) -> float:
    """f of a setting: its group whole, and the chosen tokens from the check layer on."""
    group = setting.check_layer - setting.first_layer
    return (group + setting.ratio * (layer_count - setting.check_layer)) / layer_count


def coarse(layer_count: int, reuse: str) -> list[Recompute]:
    """The grid, cheapest first: groups that begin at three depths and end every few layers, DroidSpeak's two or more,
    each alone and with two ratios by three selectors. Of a cache at another position only groups from the embeddings:
    its E was computed without what lies before, as its KV was."""
    step = max(2, -(-layer_count // 6))
    firsts = (0,) if reuse == "position" else (0, layer_count // 3, 2 * layer_count // 3)
    found = []
    for first in dict.fromkeys(firsts):
        for last in range(first - 1, layer_count, step):
            found += [Recompute(first, last)] if last >= first or first == 0 else []
            if last < layer_count - 1:
                found += [
                    Recompute(first, last, ratio, selector) for ratio in COARSE_RATIOS for selector in COARSE_SELECTORS
                ]
    kept = {setting for setting in found if _tells(setting, reuse) and not setting.computes_all(layer_count)}
    return by_cost(kept, layer_count)


def around(setting: Recompute, layer_count: int, reuse: str) -> Iterator[Recompute]:
    """Settings that differ by one step in one argument."""
    firsts = [setting.first_layer] if reuse == "position" else [setting.first_layer + step for step in (-1, 0, 1)]
    for first in firsts:
        for last in (setting.last_layer - 1, setting.last_layer, setting.last_layer + 1):
            if 0 <= first < layer_count and first - 1 <= last < layer_count:
                yield from _kept(replace(setting, first_layer=first, last_layer=last), layer_count, reuse)
    index = sum(ratio < setting.ratio for ratio in RATIOS)
    for ratio in RATIOS[max(index - 1, 0) : index + 2]:
        yield from _kept(replace(setting, ratio=ratio), layer_count, reuse)
    if setting.ratio:
        for selector in SELECTORS:
            yield from _kept(replace(setting, selector=selector, metric="both"), layer_count, reuse)
        if setting.selector in ("deviation", "product"):
            for metric in METRICS:
                yield from _kept(replace(setting, metric=metric), layer_count, reuse)
        index = GRADUAL.index(setting.gradual)
        for gradual in GRADUAL[max(index - 1, 0) : index + 2]:
            yield from _kept(replace(setting, gradual=gradual), layer_count, reuse)


def _kept(setting: Recompute, layer_count: int, reuse: str) -> Iterator[Recompute]:
    """Without a ratio nothing is selected, and in the last layer nothing filtered: one spelling of it. A full prefill
    is measured anyway."""
    if setting.check_layer >= layer_count or not setting.ratio:
        setting = Recompute(setting.first_layer, setting.last_layer)
    if setting.check_layer == layer_count - 1:
        setting = replace(setting, gradual=0.0)
    if _tells(setting, reuse) and not setting.computes_all(layer_count):
        yield setting


def _tells(setting: Recompute, reuse: str) -> bool:
    """Return True when its selector says something: a model's own keys and values of layer 0 are the same at every
    position, so that their deviation is rounding."""
    compares = setting.ratio > 0 and setting.selector in ("deviation", "product")
    return not (compares and setting.check_layer == 0 and reuse == "position")


def frontier(points: Iterable[Point], worth: Callable[[Point], float]) -> tuple[Point, ...]:
    """Those that nothing of less or the same f equals in worth, by rising f; of equal ones the one that every run has,
    in whatever order they come."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.share, -worth(each), str(each.setting))):
        if not found or worth(point) > worth(found[-1]):
            found.append(point)
    return tuple(found)


def quality(point: Point) -> float:
    """What is worth looking around is what may be good, not what surely is."""
    return point.quality


def frontiers(points: Iterable[Point], full: float) -> Iterator[tuple[Point, ...]]:
    """The frontier, what is the frontier without it, and so on; of those behind the first what is promising."""
    left = set(points)
    yield (edge := frontier(left, quality))
    left = {point for point in left - set(edge) if point.quality >= PROMISING * full}
    while left:
        yield (edge := frontier(left, quality))
        left -= set(edge)


def by_cost(settings: Iterable[Recompute], layer_count: int) -> list[Recompute]:
    """Cheapest first; of equal cost in an order that every run has."""
    return sorted(settings, key=lambda each: (nominal_share(each, layer_count), str(each)))


class Search:
    """What remains to be measured, given what is known. ``full``: the quality of a full prefill.

    What costs much more than a setting that surely answers as well as a full prefill is left out."""

    def __init__(self, layer_count: int, reuse: str, full: float, rounds: int) -> None:
        self._layer_count, self._reuse, self._full = layer_count, reuse, full
        self._rounds = rounds

    def next(self, known: Mapping[Recompute, Point | None]) -> list[Recompute]:
        """A batch, cheapest first; empty when all is measured. ``known``: None for a setting that was given up. The
        same for the same ``known``, so that a run that was killed goes on as it would have."""
        wanted = coarse(self._layer_count, self._reuse)
        left = self.left(wanted, known)
        seen = set(wanted)
        for _ in range(self._rounds):
            if left:
                return left
            edge = frontier((point for each in seen if (point := known.get(each))), quality)
            promising = [point for point in edge if point.quality >= PROMISING * self._full]
            wanted = [each for point in promising for each in around(point.setting, self._layer_count, self._reuse)]
            left = self.left(by_cost(set(wanted), self._layer_count), known)
            seen |= set(wanted)
        return left

    def left(self, wanted: list[Recompute], known: Mapping[Recompute, Point | None]) -> list[Recompute]:
        """Those not yet measured that are worth it."""
        enough = ROOM * min((point.share for point in known.values() if point and self._is_enough(point)), default=1.0)
        return [each for each in wanted if each not in known and nominal_share(each, self._layer_count) < enough]

    def _is_enough(self, point: Point) -> bool:
        """Nothing is lost, and that is no luck: on other contexts it will keep enough."""
        sure = point.quality - (ERRORS + 1) * point.loss_error
        return point.quality >= self._full and sure >= ENOUGH * self._full
