"""Blends: against every reuse there is, played by another evaluator; against their rules; and by hand."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from kvstore.planning import Facts, Holding, Pair, Permit, Recompute, StoredE, StoredSegment, decide
from kvstore.planning.blends import blend_offers, exact_part, tiers_of
from kvstore.planning.loading import ComputeRate, LoadPlan, TierFacts, TierRate, Way, plan_loading
from kvstore.planning.loading.facts import LoadFacts, prompt_facts
from kvstore.planning.permit import PROVENANCE
from kvstore.spec import ModelSpec, Tier
from tests.planning.brute_force import best_s, blend_played_s

UNIT, LAYERS = 8, 8
SPEC = ModelSpec.dense(
    "ours", "a1" * 32, layer_count=LAYERS, kv_heads=2, head_dim=16, hidden_size=32, vocab_size=96, chunk_tokens=UNIT
)
SIBLING = replace(SPEC, model_id="theirs", weights_digest="b2" * 32)
BELOW = (Tier.NVME, Tier.REDIS, Tier.S3)
SETTINGS = [Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute(0, 2, 0.1), Recompute(0, 6)]
LINK = TierRate(0.0, 1e-9, 1.0, 9)
TOKEN_S = 1e-3


def scene(seed: int) -> tuple[Facts, dict[Tier, TierFacts], ComputeRate]:
    """A prompt with a prefix, documents and perhaps a sibling, each anywhere, in tiers of any speed."""
    draw = random.Random(seed)

    def places(count: int) -> tuple[tuple[int, Tier], ...]:
        tiers = [draw.choice((Tier.DRAM, *BELOW))] * 2 + [draw.choice((Tier.DRAM, *BELOW))]
        cuts = [min(UNIT, count - start) for start in range(0, count, UNIT)]
        return tuple((cut, tiers[index % 3]) for index, cut in enumerate(cuts))

    prefix, place, segments = UNIT * draw.choice((0, 0, 1, 3)), 0, []
    place = prefix
    for _ in range(draw.choice((0, 1, 2, 3))):
        start = place + draw.choice((0, 3, 20))
        place = start + draw.choice((UNIT, 13, 3 * UNIT))
        segments.append(StoredSegment(start, place, place - start, places=places(place - start)))
    count = place + draw.choice((1, 5, 40))
    senders = []
    if draw.random() < 0.4:
        stored = min(count - 1, UNIT * draw.choice((2, 5, 9))) // UNIT * UNIT
        senders.append(Holding(SIBLING, stored, places=places(stored)))
    own = Holding(None, prefix, tuple(segments), places=places(prefix))
    facts = Facts(SPEC, count, count - 1, own, tuple(senders), draw.choice(SETTINGS))
    token_bytes = 4 * 2 * 16 * LAYERS
    tiers = {
        tier: TierFacts(TierRate(draw.choice((0.0, 1e-3)), TOKEN_S / token_bytes * 10 ** draw.uniform(-2, 2), 1.0, 9))
        for tier in BELOW
    }
    return facts, tiers, ComputeRate(0.0, TOKEN_S, TOKEN_S * 10 ** draw.uniform(-4, -2), 1.0, 1.0, 9)


def planned(
    facts: Facts, tiers: dict[Tier, TierFacts], compute: ComputeRate, ways: frozenset[Way] = frozenset(Way)
) -> tuple[LoadFacts, LoadPlan]:
    own = facts.own
    loads = prompt_facts(
        SPEC, own.places, token_count=facts.token_count, reusable_tokens=facts.reusable_token_count, compute=compute,
        link=LINK, tiers=tiers, step_tokens=0, ways=ways - {Way.MEET}, others=tiers_of(facts),
    )  # fmt: skip
    loads = replace(loads, blends=tuple(each.blend for each in blend_offers(facts, loads.tiers)))
    return loads, plan_loading(loads)


def played_of(loads: LoadFacts, plan: LoadPlan) -> float:
    """Return the seconds that the plan's choice takes, by the other evaluator."""
    if plan.chosen.way is Way.BLEND:
        blends = plan.candidates[len(plan.candidates) - len(loads.blends) :]
        return next(
            blend_played_s(loads, blend)
            for blend, each in zip(loads.blends, blends, strict=True)
            if each is plan.chosen
        )
    stock = loads.stocks[0] if plan.chosen.loaded_tokens else None
    return best_s(replace(loads, stocks=(stock,) if stock else ()), may_meet=False)


def test_no_reuse_is_a_tenth_faster_and_none_is_slower_than_a_prefill() -> None:
    """Exact prefix, first of it, any level of documents and siblings, nothing: the choice is the best of them."""
    ways = set()
    for seed in range(600):
        loads, plan = planned(*scene(seed))
        every = [blend_played_s(loads, blend) for blend in loads.blends]
        best, prefill = min([best_s(loads, may_meet=False), *every]), best_s(replace(loads, stocks=()), may_meet=False)
        took = played_of(loads, plan)
        assert took <= 1.1 * best, (seed, took / best, str(plan))
        assert took <= 1.0001 * prefill, (seed, took / prefill, str(plan))
        assert plan.chosen.ttft_high_s <= plan.prefill.ttft_s
        ways.add(plan.chosen.way)
    assert ways >= {Way.PREFILL, Way.LOAD, Way.BLEND}


def test_a_blend_that_may_take_longer_than_a_prefill_is_refused() -> None:
    facts, compute = documents(Tier.NVME), ComputeRate(0.0, TOKEN_S, 0.0, 1.0, 1.0, 9)
    fast = TierRate(0.0, 1e-9, 1.0, 9)
    _, sure = planned(facts, {Tier.NVME: TierFacts(fast)}, compute)
    assert sure.chosen.way is Way.BLEND
    doubtful = TierFacts(replace(fast, byte_s=1e-7, caution=1e3))
    _, plan = planned(facts, {Tier.NVME: doubtful}, compute)
    assert plan.chosen.way is Way.PREFILL
    blend = plan.candidates[-1]
    assert blend.way is Way.BLEND
    assert blend.ttft_s < plan.prefill.ttft_s < blend.ttft_high_s
    assert "in one case of ten" in plan.why


def test_the_setting_is_the_same_at_every_speed() -> None:
    """Rates choose what is reused, never how well it is mended: answers do not change with load."""
    for seed in range(600):
        facts, tiers, compute = scene(seed)
        whole = decide(facts)
        lossy = {run.cache for run in whole.runs if not run.is_exact}
        for offer in blend_offers(facts, tiers):
            plan = decide(offer.facts)
            assert plan.recompute in (None, whole.recompute)
            assert {run.cache for run in plan.runs if not run.is_exact} <= lossy
        for slow in (1e-12, 1.0):
            rates = {tier: TierFacts(TierRate(0.0, slow, 1.0, 9)) for tier in BELOW}
            _, plan = planned(facts, rates, compute)
            assert plan.chosen.setting in (None, whole.recompute, Recompute.reuse())


def test_a_smaller_reuse_never_takes_another_setting() -> None:
    """Documents and a sibling's cache are mixed with the stricter setting. Without the sibling, documents alone would
    be mended less."""
    cheap, strict = Recompute.cacheblend(1, 0.1), Recompute.cacheblend(1, 0.5)
    facts = documents(Tier.DRAM)
    permits = [
        (Permit(Pair.of(SPEC, sender, reuse, PROVENANCE[reuse]), setting, "", "digest"),)
        for sender, reuse, setting in ((None, "position", cheap), (SIBLING, "sibling", strict))
    ]
    theirs = Holding(SIBLING, 24, permits=permits[1], places=((24, Tier.S3),))
    own = replace(facts.own, permits=permits[0])
    facts = replace(facts, own=own, senders=(theirs,), setting=None)
    alone = blend_offers(replace(facts, senders=()), {})
    assert [each.blend.setting for each in alone] == [cheap]
    rates = {Tier.S3: TierFacts(TierRate(0.0, 1e-9, 1.0, 9))}
    assert [each.blend.setting for each in blend_offers(facts, rates)] == [strict]


def documents(*tiers: Tier, prefix: int = 0) -> Facts:
    """Documents of 24 tokens each, one per tier, behind a prefix in memory and 3 tokens that nobody has."""
    start, segments = prefix + 3, []
    for tier in tiers:
        segments.append(StoredSegment(start, start + 24, 24, places=((24, tier),)))
        start += 24
    own = Holding(None, prefix, tuple(segments), places=((prefix, Tier.DRAM),) * bool(prefix))
    return Facts(SPEC, start + 4, start + 3, own, (), Recompute.cacheblend(1, 0.2))


def test_a_document_that_lies_deep_is_left_and_the_others_are_reused() -> None:
    facts = documents(Tier.DRAM, Tier.S3, Tier.NVME, prefix=16)
    rates = {Tier.S3: TierFacts(TierRate(5.0, 1e-3, 1.0, 9)), Tier.NVME: TierFacts(TierRate(0.0, 1e-9, 1.0, 9))}
    offers = blend_offers(facts, rates)
    assert [each.blend.token_count for each in offers] == [16 + 72, 16 + 48, 16 + 24]
    loads, plan = planned(facts, rates, ComputeRate(0.0, TOKEN_S, 0.0, 1.0, 1.0, 9))
    assert plan.chosen.way is Way.BLEND
    assert plan.chosen.loaded_tokens == 16 + 48
    left = decide(offers[1].facts)
    assert [run.token_start for run in left.runs] == [0, 19, 67]
    stock = loads.blends[1].stock
    assert stock.token_count == 16 + 48
    assert stock.bytes_until(64)[stock.tiers.index(Tier.NVME)] == 24 * 4 * 2 * 16 * (LAYERS - 1), "layer 0 is computed"


@pytest.mark.parametrize("facts", [documents(), documents(prefix=16)])
def test_without_documents_there_is_nothing_to_blend(facts: Facts) -> None:
    assert blend_offers(facts, {}) == []


def test_an_unmeasured_engine_reuses_all_that_is_stored() -> None:
    slow = {Tier.S3: TierFacts(TierRate(5.0, 1.0, 1.0, 9))}
    _, plan = planned(documents(Tier.S3, Tier.DRAM, prefix=16), slow, ComputeRate())
    assert (plan.chosen.way, plan.chosen.loaded_tokens, plan.is_measured) == (Way.BLEND, 64, False)


def test_the_exact_part_has_nothing_else() -> None:
    facts = documents(Tier.DRAM, prefix=16)
    plan = decide(exact_part(facts, 8))
    assert [(run.token_start, run.token_stop) for run in plan.runs] == [(0, 8)]
    assert plan.recompute is None


def test_more_is_reused_first() -> None:
    for seed in range(200):
        facts, tiers, _ = scene(seed)
        counts = [each.blend.token_count for each in blend_offers(facts, tiers)]
        assert all(more >= less for more, less in pairwise(counts))


def many_documents(count: int) -> Facts:
    """A prompt of so many documents, of which the model and a sibling have all. E of each is known."""
    cuts = [range(UNIT * number + 5, UNIT * number + 5 + UNIT - 2) for number in range(count)]
    segments = tuple(StoredSegment(cut.start, cut.stop, len(cut), places=((len(cut), Tier.NVME),)) for cut in cuts)
    length = UNIT * count + 10
    senders = (Holding(SIBLING, UNIT * count, places=((UNIT * count, Tier.DRAM),)),)
    facts = Facts(SPEC, length, length - 1, Holding(None, 2, segments), senders, Recompute(1, 2, 0.1))
    return replace(facts, hidden=tuple(StoredE(*each, UNIT) for each in decide(facts).hidden))


def test_twice_the_documents_cost_twice_the_work() -> None:
    """Counted in calls, not in time."""
    tiers = {Tier.NVME: TierFacts(TierRate(0.0, 1e-9, 1.0, 9))}

    def calls(facts: Facts) -> int:
        seen: list[str] = []
        sys.setprofile(lambda _, kind, __: seen.append(kind) if kind == "call" else None)
        try:
            assert decide(facts).reused_token_count
            assert blend_offers(facts, tiers)
        finally:
            sys.setprofile(None)
        return len(seen)

    assert calls(many_documents(400)) < 5 * calls(many_documents(100))
