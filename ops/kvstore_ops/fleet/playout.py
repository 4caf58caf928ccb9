"""Plays out one request that loads a stretch of its prompt from tiers, in virtual time: nothing waits, and nothing is
random. It gives the times that a plan predicts, from the true rates, chunk by chunk and layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.planning.loading.facts import LoadFacts, Stock
from kvstore.planning.loading.rates import BusyTime
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
