"""Blends: the reuse of documents and siblings' caches, as candidates beside loading and computing the exact prefix.

Reuse is offered with all that is stored, and again without the slowest tiers: one document that lies deep then does not
make a prompt load none. The setting is always the one of the whole reuse. So rates choose which caches are worth their
load, and never how well they are mended: answers change with load only towards exact ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from kvstore.planning.decision import decide
from kvstore.planning.facts import Facts, Holding, Places
from kvstore.planning.loading.facts import IN_MEMORY, Blend, HeldRun, Stock, TierFacts, merged_runs, token_bytes_of
from kvstore.planning.loading.operations import Operations
from kvstore.planning.plan import Plan, StoredCache
from kvstore.planning.setting import Recompute
from kvstore.spec import Tier
from kvstore.spec.dtypes import item_size


@dataclass(frozen=True)
class BlendOffer:
    """A blend, and the facts from which ``decide`` makes its plan: they hold nothing else."""

    facts: Facts
    blend: Blend


def tiers_of(facts: Facts) -> frozenset[Tier]:
    """Return the tiers that have any stored token of a prompt."""
    found = set()
    for holding in (facts.own, *facts.senders):
        for places in (holding.places, *(segment.places for segment in holding.segments)):
            found |= {tier for _, tier in places}
    return frozenset(found)


def blend_offers(facts: Facts, tiers: Mapping[Tier, TierFacts]) -> list[BlendOffer]:
    """Return the blends that these facts allow, the one that reuses the most first; none when nothing is reused but the
    model's own prefix. ``tiers``: the tiers below memory, which are left out one after the other, the slowest first."""
    whole, left = decide(facts), set(tiers_of(facts))
    allowed, offers = _lossy(whole), list[BlendOffer]()
    slowest = sorted(left - set(IN_MEMORY), key=lambda tier: tiers[tier].rate.byte_s, reverse=True)
    for dropped in (None, *slowest):
        left.discard(dropped)
        held = facts if dropped is None else _within(facts, left)
        plan = whole if dropped is None else decide(held)
        is_sticky = plan.recompute in (None, whole.recompute) and _lossy(plan) <= allowed
        blend = _blend_of(held, plan) if is_sticky else None
        if blend is not None and all(blend != each.blend for each in offers):
            offers.append(BlendOffer(held, blend))
    return offers


def exact_part(facts: Facts, prefix_token_count: int) -> Facts:
    """Return the facts with nothing but the first tokens of the model's own prefix."""
    return replace(facts, own=Holding(None, prefix_token_count, places=facts.own.places), senders=())


def _lossy(plan: Plan) -> frozenset[StoredCache]:
    return frozenset(run.cache for run in plan.runs if not run.is_exact)


def _within(facts: Facts, tiers: Collection[Tier]) -> Facts:
    """Return the facts of what lies in these tiers: the model's own prefix up to the first chunk elsewhere, and other
    caches that lie there whole."""
    unit, count = facts.receiver.chunk_tokens, 0
    for tokens, tier in facts.own.places:
        if tier not in tiers:
            count -= count % unit
            break
        count += tokens
    senders = [_only(each, tiers) for each in facts.senders]
    own = replace(_only(facts.own, tiers), prefix_token_count=min(count, facts.own.prefix_token_count))
    return replace(facts, own=own, senders=tuple(senders))


def _only(holding: Holding, tiers: Collection[Tier]) -> Holding:
    def lies_there(places: Places) -> bool:
        return all(tier in tiers for _, tier in places)

    segments = tuple(segment for segment in holding.segments if lies_there(segment.places))
    count = holding.prefix_token_count if lies_there(holding.places) else 0
    return replace(holding, segments=segments, prefix_token_count=count)


def _blend_of(facts: Facts, plan: Plan) -> Blend | None:
    """Return what a plan loads; None when that is only the model's own prefix, of which other candidates tell."""
    if not any(run.sender is not None or run.is_standalone for run in plan.runs):
        return None
    lossy = [run for run in plan.runs if not run.is_exact]
    lossy_tokens = sum(run.token_count for run in lossy)
    share = Operations.of(facts.receiver).projection_share if facts.receiver.keeps_e else 0.0
    stock = Stock(merged_runs(_loaded(facts, plan)), "E" if facts.receiver.keeps_e else "KV", share)
    exact_tokens = plan.reused_token_count - lossy_tokens
    stop = max((run.token_stop for run in lossy), default=0)
    return Blend(plan.recompute or Recompute.reuse(), exact_tokens, lossy_tokens, stop, stock)


def _loaded(facts: Facts, plan: Plan) -> Iterator[HeldRun]:
    """Yield the bytes that a plan's transfers move: each cache is brought once, as far as it is stored."""
    by_cache = {run.cache: run for run in plan.runs}
    holdings = {each.sender: each for each in (facts.own, *facts.senders)}
    documents = {
        (holding.sender, each.token_start): each.places for holding in holdings.values() for each in holding.segments
    }
    for cache, run in by_cache.items():
        spec = cache.sender or facts.receiver
        token_bytes = token_bytes_of(spec, run.layers)
        if run.hidden_layer is not None:
            token_bytes += spec.hidden_size * item_size(spec.hidden_dtype)
        places = holdings[cache.sender].places
        if cache.is_standalone:
            places = documents[cache.sender, cache.token_start]
        elif cache.sender is None:
            places = _first(places, cache.token_stop)
        yield from (HeldRun(count, tier, token_bytes) for count, tier in places or ((run.token_count, Tier.DRAM),))


def _first(places: Places, token_count: int) -> Places:
    """Return the places of the first tokens."""
    found, left = [], token_count
    for count, tier in places:
        if left > 0:
            found.append((min(count, left), tier))
        left -= count
    return tuple(found)
