"""A simulator of requests over tiers of any speed, in virtual time. It shows the worth of plans when rates have to be
learned, and change.

Each request is planned with the rates learned so far, then played out chunk by chunk and layer by layer with the true
rates; the measured times are learned. Nothing waits, and nothing is random.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.planning.loading.compute import Prefill, Prefills
from kvstore.planning.loading.facts import LoadFacts, Stock, TierFacts
from kvstore.planning.loading.planner import LoadPlan, plan_loading
from kvstore.planning.loading.rates import ASSUMED, SLOWEST, BusyTime, BusyTimes, is_probe_due
from kvstore.spec import Tier


@dataclass(frozen=True)
class Played:
    """The result of loading one stretch: the seconds to the first token, and the bytes and busy seconds of each tier.
    The link's are under ``Tier.NONE``."""

    ttft_s: float
    busy: dict[Tier, BusyTime]


def play(truth: LoadFacts, stock: Stock, front: int, stop: int) -> Played:
    """Play a stretch out. Tiers deliver side by side, one layer of a chunk at a time, all of a layer before the next.
    The link moves these pieces in order. The engine computes the front, then each layer of the first pass once it has
    landed, then the rest."""
    rate, step = truth.compute, truth.step_tokens
    if stop <= front:
        return Played(rate.seconds(truth.token_count, 0, step), {})
    landed, busy = _landings(truth, stock, front, stop)
    now = rate.seconds(front, 0, step)
    rest = truth.token_count - stop
    first = min(rest, step or rest)
    work_s = stock.work_share * rate.load * rate.token_s * (stop - front)
    layer_s = (rate.seconds(first, stop) + work_s) / truth.layer_count
    for landed_s in landed:
        now = max(now, landed_s) + layer_s
    return Played(now + rate.seconds(rest - first, stop + first, step), busy)


def _landings(truth: LoadFacts, stock: Stock, front: int, stop: int) -> tuple[list[float], dict[Tier, BusyTime]]:
    """Return the second at which each layer has landed, and the bytes and busy seconds of each tier."""
    layers, unit = truth.layer_count, truth.unit_tokens
    pieces = [
        (tier, byte_count / layers)
        for start in range(front, stop, unit)
        for tier in stock.tiers
        if (byte_count := stock.bytes_of(tier, start, min(start + unit, stop)))
    ]
    free = {tier: each.rate.byte_s * each.queued_bytes for tier, each in truth.tiers.items()}
    begun = dict(free)
    link_free, landed = truth.link.latency_s, []
    for _ in range(layers):
        for tier, size in pieces:
            ready = 0.0
            if tier in free:
                found = truth.tiers[tier].rate
                free[tier] += size * found.byte_s + (found.latency_s if free[tier] == begun[tier] else 0.0)
                ready = free[tier]
            link_free = max(link_free, ready) + size * truth.link.byte_s
        landed.append(link_free)
    sums = {tier: stock.bytes_of(tier, front, stop) for tier in stock.tiers}
    busy = {
        tier: BusyTime(int(total), free[tier] - begun[tier]) for tier, total in sums.items() if total and tier in free
    }
    total = sum(sums.values())
    busy[Tier.NONE] = BusyTime(int(total), truth.link.seconds(total))
    return landed, busy


@dataclass(frozen=True)
class SimulatedOutcome:
    """One request: its plan, and its true seconds to the first token."""

    plan: LoadPlan
    ttft_s: float


class Simulation:
    """A service and an engine that learn from request to request. ``pair_share``: as of ``Prefills``."""

    def __init__(self, pair_share: float = 0.0) -> None:
        self.now_s = 0.0
        self._prefills = Prefills(pair_share)
        self._times: dict[Tier, BusyTimes] = {}
        self._probed_s: dict[Tier, float] = {}

    def request(self, truth: LoadFacts, *, idle_s: float = 0.0) -> SimulatedOutcome:
        """Plan one prompt with the learned rates, play it out with the true ones, and learn from it. ``truth``: the
        prompt's facts with the rates that are true now. ``idle_s``: seconds until the next request comes."""
        plan = plan_loading(self._known(truth))
        chosen = plan.chosen
        stock = next((each for each in truth.stocks if each.form == chosen.form), Stock(()))
        played = play(truth, stock, chosen.load_start, chosen.load_stop)
        for tier, busy in played.busy.items():
            self._learn(tier, busy)
        self._measure(truth)
        for tier in (tier for each in truth.stocks for tier in each.tiers if tier not in played.busy):
            self._probe(tier, truth)
        self.now_s += played.ttft_s + idle_s
        return SimulatedOutcome(plan, played.ttft_s)

    def _known(self, truth: LoadFacts) -> LoadFacts:
        tiers = {
            tier: TierFacts(self._times.get(tier, BusyTimes()).rate or ASSUMED.get(tier, SLOWEST), each.queued_bytes)
            for tier, each in truth.tiers.items()
        }
        link = self._times.get(Tier.NONE, BusyTimes()).rate or ASSUMED[Tier.DRAM]
        return replace(truth, tiers=tiers, link=link, compute=self._prefills.rate)

    def _learn(self, tier: Tier, busy: BusyTime) -> None:
        self._times[tier] = self._times.get(tier, BusyTimes()).observed(busy)

    def _measure(self, truth: LoadFacts) -> None:
        """Learn from the engine's last pass, which it reports."""
        step = truth.step_tokens or truth.token_count
        seconds = truth.compute.seconds(step)
        self._prefills = self._prefills.observed(Prefill(step, 0, seconds))

    def _probe(self, tier: Tier, truth: LoadFacts) -> None:
        """Read one chunk, beside the request, from a tier that the plan avoids, if a probe is due."""
        found = truth.tiers.get(tier)
        stock = next(each for each in truth.stocks if tier in each.tiers)
        size = next(run.token_bytes for run in stock.runs if run.tier == tier) * truth.unit_tokens
        known = self._times.get(tier, BusyTimes()).rate or ASSUMED.get(tier, SLOWEST)
        if found is None or not is_probe_due(known, size, self.now_s - self._probed_s.get(tier, float("-inf"))):
            return
        self._probed_s[tier] = self.now_s
        self._learn(tier, BusyTime(int(size), found.rate.seconds(size)))
