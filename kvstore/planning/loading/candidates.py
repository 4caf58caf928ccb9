"""The ways by which a prompt can come to its first token, and the time that each takes.

Every way is one pattern: tokens before a front are computed while tokens from the front to a stop are loaded, and the
rest is computed behind them, each layer as soon as it has landed. A prefill loads nothing, a load has no front, and
only ``Way.MEET`` has both. The time falls as more is loaded until the load takes longer than the compute beside it,
and rises from there. So the best stop lies where the two cross, or where a slower tier begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

from kvstore.planning.loading.facts import Blend, LoadFacts, Stock, TierFacts
from kvstore.planning.loading.timeline import Candidate, Way

STOPS_MAX = 8
"""Number of places where another tier begins that are tried as a stop, for each form."""


def candidates_of(facts: LoadFacts) -> Iterator[Candidate]:
    """Yield every candidate that the facts allow, plain prefill first."""
    prefill = _Pattern(facts, Stock(())).candidate(Way.PREFILL, 0, 0)
    yield prefill
    for stock in facts.stocks:
        pattern, usable = _Pattern(facts, stock), facts.usable(stock)
        if not usable:
            continue
        yield pattern.candidate(Way.LOAD, 0, usable)
        _, first = pattern.refined([(0, stop) for stop in pattern.stops(usable)], usable, may_meet=False)
        first = pattern.sure(first, usable)
        if first < usable:
            yield pattern.candidate(Way.FIRST, 0, first)
        front, stop = pattern.refined(pattern.meetings(first, usable), usable, may_meet=True)
        if front:
            yield pattern.candidate(Way.MEET, front, stop)
    for blend in facts.blends:
        yield _blended(facts, blend)


class _Waits(NamedTuple):
    """Seconds until the first layer of what is loaded has landed, until the last has, and until tiers have delivered
    all; and for how many seconds tiers and the link are busy."""

    first_s: float = 0.0
    landed_s: float = 0.0
    delivered_s: float = 0.0
    busy_s: float = 0.0

    def until(self, pass_s: float, facts: LoadFacts) -> float:
        """Return the second at which a pass over the layers ends that begins each layer once it has landed."""
        last_s = max(self.landed_s + pass_s / facts.layer_count, self.delivered_s + pass_s / facts.pieces)
        return max(self.first_s + pass_s, last_s)


_Slowness: TypeAlias = tuple[float, float, int, float]
"""A tier's latency in seconds, its seconds per byte, the least bytes that count, and the seconds of its queue."""


def _slowness(tier: TierFacts, caution: float) -> _Slowness:
    rate = tier.rate
    return (
        caution * rate.latency_s, caution * rate.byte_s, rate.least_bytes, caution * rate.byte_s * tier.queued_bytes
    )  # fmt: skip


@dataclass(frozen=True)
class _Pattern:
    """One form of a prompt's prefix, and the time that loading a stretch of it takes."""

    facts: LoadFacts
    stock: Stock

    @cached_property
    def _prefill_s(self) -> float:
        return self._computed_s(self.facts.token_count, 0)

    @cached_property
    def _tiers(self) -> tuple[tuple[_Slowness | None, ...], ...]:
        """Each tier's slowness on average, and in one case of ten. None: memory."""
        known = [self.facts.tiers.get(tier) for tier in self.stock.tiers]
        return tuple(
            tuple(None if each is None else _slowness(each, each.rate.caution if is_high else 1.0) for each in known)
            for is_high in (False, True)
        )

    def _computed_s(self, new_tokens: int, context_tokens: int) -> float:
        return self.facts.compute.seconds(new_tokens, context_tokens, self.facts.step_tokens)

    def waits(self, start: int, stop: int, *, is_high: bool = False) -> _Waits:
        """Return when the loaded bytes land. Tiers deliver side by side, each behind its queue, and each piece of a
        chunk whole. The link takes layers in order: a late one delays the next."""
        facts, layers, pieces = self.facts, self.facts.layer_count, self.facts.pieces
        first_s = last_s = busy_s = total_bytes = 0.0
        before, until = self.stock.bytes_until(start), self.stock.bytes_until(stop)
        for skipped, end, found in zip(before, until, self._tiers[is_high], strict=True):
            byte_count = end - skipped
            total_bytes += byte_count
            if found is None or not byte_count:
                continue
            tier_latency_s, byte_s, least_bytes, queue_s = found
            read_s = tier_latency_s + byte_s * (byte_count if byte_count > least_bytes else least_bytes)
            latency_s = queue_s + tier_latency_s
            first_s = max(first_s, latency_s + (queue_s + read_s - latency_s) / pieces)
            last_s, busy_s = max(last_s, queue_s + read_s), busy_s + read_s
        link_s = facts.link.seconds(total_bytes) * (facts.link.caution if is_high else 1.0)
        layer_s = link_s / layers
        piece_s = layer_s * facts.unit_tokens / (stop - start)
        landed_s = max(last_s + piece_s, first_s + link_s - layer_s, link_s)
        return _Waits(max(first_s + piece_s, layer_s), landed_s, last_s, busy_s + link_s)

    def work_s(self, start: int, stop: int) -> float:
        """Return the seconds that projecting K and V of the loaded tokens takes, where the form needs it."""
        return self.stock.work_share * self.facts.compute.load * self.facts.compute.token_s * (stop - start)

    def ttft_s(self, front: int, stop: int, *, is_high: bool = False) -> float:
        """Return the seconds to the first token when tokens from ``front`` to ``stop`` are loaded. The first pass
        behind them begins a layer when the layer before is computed and its own cache has landed."""
        facts = self.facts
        if front == stop:
            return self._prefill_s
        waits = self.waits(front, stop, is_high=is_high)
        rest, front_s = facts.token_count - stop, self._computed_s(front, 0)
        step = min(rest, facts.step_tokens or rest)
        step_s = self._computed_s(step, stop) + self.work_s(front, stop)
        behind_s = self._computed_s(rest - step, stop + step)
        return max(front_s + step_s, waits.until(step_s, facts)) + behind_s

    def candidate(self, way: Way, front: int, stop: int) -> Candidate:
        facts = self.facts
        waits = self.waits(front, stop) if stop > front else _Waits()
        ttft_s, rest = self.ttft_s(front, stop), facts.token_count - (stop if stop > front else 0)
        front_s = self._computed_s(front, 0) if stop > front else 0.0
        compute_s = front_s + self.work_s(front, stop) + self._computed_s(rest, facts.token_count - rest)
        return Candidate(
            way, self.stock.form if stop > front else "", front, stop, ttft_s, self.ttft_s(front, stop, is_high=True),
            front_s, waits.landed_s, compute_s, waits.busy_s, _cost(facts, ttft_s, compute_s, waits.busy_s),
        )  # fmt: skip

    def boundaries(self, usable: int) -> list[int]:
        """Return the tokens at which another tier begins, at most STOPS_MAX, and ``usable``: loading may stop there."""
        count = bisect_left(self._begins, usable)
        found = self._begins[:count]
        if count > STOPS_MAX:
            found = [found[index * count // STOPS_MAX] for index in range(STOPS_MAX)]
        return [*found, usable]

    @cached_property
    def _begins(self) -> list[int]:
        """The tokens at which runs begin, in whole units and ascending, but for the first run. Kept because a long
        prefix may have thousands of runs, and a search asks several times."""
        unit = self.facts.unit_tokens
        return [each for each in dict.fromkeys([start // unit * unit for start in self.stock.starts[1:]]) if each]

    def stops(self, usable: int) -> list[int]:
        """Return the stops to try for a load of the first tokens: the boundaries, and the crossing at which the load
        takes as long as the pass beside it."""
        facts, unit = self.facts, self.facts.unit_tokens

        def outlasts(stop: int) -> bool:
            rest = facts.token_count - stop
            return self.waits(0, stop).landed_s >= self._computed_s(min(rest, facts.step_tokens or rest), stop)

        crossing = _first(outlasts, usable // unit, unit)
        beside = {crossing, max(unit, crossing - unit)}
        return sorted({*self.boundaries(usable), *beside})

    def sure(self, first: int, usable: int) -> int:
        """Return ``first``, the best stop, unless its 90th percentile is later than a prefill. Then return the best
        boundary whose percentile is not, if there is one: that leaves out a slow tier that is hard to predict."""
        if self.ttft_s(0, first, is_high=True) <= self._prefill_s:
            return first
        safe = [stop for stop in self.boundaries(usable) if self.ttft_s(0, stop, is_high=True) <= self._prefill_s]
        return min(safe, key=lambda stop: self._timed_s((0, stop)), default=first)

    def meetings(self, first: int, usable: int) -> list[tuple[int, int]]:
        """Return the stretches to try for a load that begins in the middle: the load of the ``first`` tokens, a stretch
        around each boundary, and the best one that ends there. Tokens behind a stop are computed in any case: a
        boundary of which that alone takes longer than the best stretch so far is left out."""
        unit, boundaries = self.facts.unit_tokens, self.boundaries(usable)
        found = [(0, first), *((max(0, stop - unit), min(usable, stop + unit)) for stop in boundaries)]
        best_s = min(map(self._timed_s, found))
        for stop in reversed(boundaries):
            if self._least_s(0, stop) < best_s:
                found.append((self.front(stop), stop))
                best_s = min(best_s, self._timed_s(found[-1]))
        return found

    def front(self, stop: int) -> int:
        """Return the best front of a load that ends at ``stop``: the token at which computing everything before it, and
        the pass behind ``stop``, takes as long as the load."""
        facts, unit = self.facts, self.facts.unit_tokens
        rest = facts.token_count - stop
        beside_s = self._computed_s(min(rest, facts.step_tokens or rest), stop) * (1 - 1 / facts.layer_count)

        def outlasts(front: int) -> bool:
            return self._computed_s(front, 0) + beside_s >= self.waits(front, stop).landed_s

        crossing = _first(outlasts, stop // unit - 1, unit)
        return min((max(0, crossing - unit), crossing), key=lambda front: self._timed_s((front, stop)))

    @cached_property
    def _known(self) -> dict[tuple[int, int], float]:
        """Seconds to the first token by stretch. Kept because the search tries the same neighbours many times."""
        return {}

    def _timed_s(self, stretch: tuple[int, int]) -> float:
        found = self._known.get(stretch)
        if found is None:
            found = self._known[stretch] = self.ttft_s(*stretch)
        return found

    def _least_s(self, front: int, stop: int) -> float:
        """Return seconds that no load of this stretch can beat, however fast: what is computed in any case."""
        return self._computed_s(front, 0) + self._computed_s(self.facts.token_count - stop, stop)

    def refined(self, stretches: list[tuple[int, int]], usable: int, *, may_meet: bool) -> tuple[int, int]:
        """Return the fastest of these stretches after a local search: its ends are moved by steps that shrink to one
        unit as soon as no move is faster."""
        unit = self.facts.unit_tokens
        timed = [(self._timed_s(stretch), stretch) for stretch in stretches]
        best_s, best = min(timed)
        bits = (usable // unit).bit_length()
        step = unit << max(min(bits - 1, 2), bits - 3)
        while step >= unit:
            front, stop = best
            fronts = (front - step, front, front + step) if may_meet else (front,)
            near = [(start, end) for start in fronts for end in (stop - step, stop, stop + step)]
            near = [each for each in near if 0 <= each[0] < each[1] <= usable and self._least_s(*each) < best_s]
            found_s, found = min(((self._timed_s(each), each) for each in near), default=(best_s, best))
            if found_s < best_s:
                best_s, best = found_s, found
            else:
                step //= 2
        return best


def _first(is_past: Callable[[int], bool], last: int, unit: int) -> int:
    """Return the first multiple of ``unit``, from 1 to ``last`` units, for which ``is_past`` is true; the last when
    there is none. ``is_past`` must be monotonic: a binary search finds the answer."""
    low, high = 1, max(last, 0)
    while low < high:
        middle = (low + high) // 2
        if is_past(middle * unit):
            high = middle
        else:
            low = middle + 1
    return high * unit


def _blended(facts: LoadFacts, blend: Blend) -> Candidate:
    """Return the candidate that loads the exact prefix and the lossy runs, and computes the setting's share of these
    runs again. A setting that looks ahead has two phases: the suffix runs over all reused rows as they land, and then
    once more with the chosen rows. Gaps between runs make it no longer than said: computed tokens are taken to stand
    behind all reused ones, where they attend to the most, and lossy ones behind all gaps."""
    pattern, loaded = _Pattern(facts, blend.stock), blend.stock.token_count
    prefill_s = facts.compute.seconds(blend.lossy_tokens, blend.lossy_stop - blend.lossy_tokens)
    again_s = blend.setting.carried_share(facts.layer_count) * prefill_s
    rest_s = facts.compute.seconds(facts.token_count - blend.token_count, blend.token_count)
    rest_s += pattern.work_s(0, loaded)
    beside_s, behind_s = again_s + rest_s, 0.0
    ahead_s = blend.setting.look_ahead_share(facts.layer_count) * prefill_s
    if ahead_s:
        beside_s, behind_s = max(rest_s, ahead_s), again_s + rest_s

    def ttft_s(*, is_high: bool) -> float:
        return pattern.waits(0, loaded, is_high=is_high).until(beside_s, facts) + behind_s

    waits = pattern.waits(0, loaded)
    mean_s, compute_s = ttft_s(is_high=False), beside_s + behind_s
    return Candidate(
        Way.BLEND, blend.stock.form, 0, blend.token_count, mean_s, ttft_s(is_high=True), 0.0, waits.landed_s, compute_s,
        waits.busy_s, _cost(facts, mean_s, compute_s, waits.busy_s), blend.setting,
    )  # fmt: skip


def _cost(facts: LoadFacts, ttft_s: float, compute_s: float, tier_s: float) -> float:
    return ttft_s + facts.prices.compute * compute_s + facts.prices.tier * tier_s
