"""The search for settings to measure: a coarse grid, cheapest first, then the neighbours of the frontier. Pure."""

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
"""The search skips the neighbours of frontier points below this share of full prefill's quality: no user wants them."""
ENOUGH = 0.99
"""Share of full prefill's quality that the search must reach while there are more expensive settings."""
ROOM = 1.5
"""Settings that cost this many times more than a setting as good as a full prefill are left out."""
FRONTIERS = 2
"""Number of successive frontiers that are measured again: the second was perhaps only less lucky than the first."""


def nominal_share(setting: Recompute, layer_count: int) -> float:
    """Return f of a setting: its whole group, the chosen tokens from the check layer on, and its look ahead."""
    return setting.share(layer_count)


def coarse(layer_count: int, reuse: str) -> list[Recompute]:
    """Return the grid, cheapest first: groups that begin at three depths and end every few layers (two or more, as in
    DroidSpeak), each alone and with two ratios by three selectors. For a cache at another position the groups begin at
    the embeddings, because its E, like its KV, was computed without the tokens before it."""
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
    """Yield the settings that differ by one step in one argument."""
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
    """Yield the setting in its only spelling: without a ratio the selector means nothing, and in the last layer gradual
    filtering means nothing. Yield nothing for a full prefill, which is measured anyway, or a useless selector."""
    if setting.check_layer >= layer_count or not setting.ratio:
        setting = Recompute(setting.first_layer, setting.last_layer)
    if setting.check_layer == layer_count - 1:
        setting = replace(setting, gradual=0.0)
    if _tells(setting, reuse) and not setting.computes_all(layer_count):
        yield setting


def _tells(setting: Recompute, reuse: str) -> bool:
    """True when the setting's selector is useful. A model's own keys and values of layer 0 are the same at every
    position, so that their deviation there is only rounding."""
    compares = setting.ratio > 0 and setting.selector in ("deviation", "product")
    return not (compares and setting.check_layer == 0 and reuse == "position")


def frontier(points: Iterable[Point], worth: Callable[[Point], float]) -> tuple[Point, ...]:
    """Return the points that are worth more than every point of less or equal f, by rising f. Of equal points, every
    run keeps the same one, whatever their order."""
    found: list[Point] = []
    for point in sorted(points, key=lambda each: (each.share, -worth(each), str(each.setting))):
        if not found or worth(point) > worth(found[-1]):
            found.append(point)
    return tuple(found)


def quality(point: Point) -> float:
    """Return the measured quality, by which the search compares points: it looks for settings that may be good, not for
    those that surely are."""
    return point.quality


def frontiers(points: Iterable[Point], full: float) -> Iterator[tuple[Point, ...]]:
    """Yield the frontier, then the frontier of the remaining points, and so on. Behind the first frontier only
    promising points count."""
    left = set(points)
    yield (edge := frontier(left, quality))
    left = {point for point in left - set(edge) if point.quality >= PROMISING * full}
    while left:
        yield (edge := frontier(left, quality))
        left -= set(edge)


def by_cost(settings: Iterable[Recompute], layer_count: int) -> list[Recompute]:
    """Sort settings, the cheapest first; settings of equal cost are in the same order in every run."""
    return sorted(settings, key=lambda each: (nominal_share(each, layer_count), str(each)))


class Search:
    """Chooses the settings to measure next, given the measured points. ``full``: the quality of a full prefill.

    Settings that cost much more than one that is surely as good as a full prefill are left out."""

    def __init__(self, layer_count: int, reuse: str, full: float, rounds: int) -> None:
        self._layer_count, self._reuse, self._full = layer_count, reuse, full
        self._rounds = rounds

    def next(self, known: Mapping[Recompute, Point | None]) -> list[Recompute]:
        """Return the next batch, cheapest first; empty when all is measured. ``known``: None for a setting that was
        given up. The batch depends on ``known`` alone, so that a killed run continues as it would have."""
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
        """Return the settings that are not measured yet and do not cost too much."""
        enough = ROOM * min((point.share for point in known.values() if point and self._is_enough(point)), default=1.0)
        return [each for each in wanted if each not in known and nominal_share(each, self._layer_count) < enough]

    def _is_enough(self, point: Point) -> bool:
        """True when the point loses nothing, and will surely keep enough quality on other contexts."""
        sure = point.quality - (ERRORS + 1) * point.loss_error
        return point.quality >= self._full and sure >= ENOUGH * self._full
