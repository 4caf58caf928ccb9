"""The planner of loads: against every plan there is, against its rules, and at its size."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from kvstore.planning import Recompute
from kvstore.planning.loading import (
    Blend,
    ComputeRate,
    HeldRun,
    LoadFacts,
    Prices,
    Stock,
    TierFacts,
    TierRate,
    Way,
    candidates,
    merged_runs,
    plan_loading,
)
from kvstore.spec import Tier
from tests.planning.brute_force import best_s, played_s

TIERS = (Tier.DRAM, Tier.NVME, Tier.REDIS, Tier.S3)
SCENES = 1500 if os.environ.get("KVSTORE_TEST_SCALE") == "full" else 400


def scene(seed: int) -> LoadFacts:
    """A prompt of at most eight chunks in tiers of any speed, of a model of any, with rates that are certain."""
    draw = random.Random(seed)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** draw.random()

    unit, layers = draw.choice((2, 4)), draw.choice((4, 8, 16))
    stocks = []
    for form in ("KV", "E")[: draw.choice((1, 1, 2))]:
        runs = [HeldRun(unit * draw.randint(1, 3), draw.choice(TIERS), 1000.0) for _ in range(draw.randint(1, 3))]
        share = 0.0 if form == "KV" else between(0.01, 0.2)
        if form == "E":
            runs = [replace(run, token_bytes=500.0) for run in runs]
        stocks.append(Stock(merged_runs(runs), form, share))
    stored = max(stock.token_count for stock in stocks)
    token_s = 1e-3
    tiers = {
        tier: TierFacts(
            TierRate(draw.choice((0.0, between(1e-4, 1e-2))), token_s / 1000 * between(0.02, 20), 1.0, 9),
            draw.choice((0.0, 0.0, between(1e2, 1e4))),
        )
        for tier in TIERS[1:]
    }
    count = max(2, stored + draw.randint(-unit, 3 * unit))
    return LoadFacts(
        token_count=count, reusable_tokens=count - 1, stocks=tuple(stocks), tiers=tiers, layer_count=layers,
        compute=ComputeRate(draw.choice((0.0, 1e-3)), token_s, token_s * between(1e-4, 1e-1), 1.0, 1.0, 9),
        link=TierRate(0.0, token_s / 1000 * between(0.001, 1), 1.0, 9), unit_tokens=unit,
        step_tokens=draw.choice((0, 0, unit, 2 * unit)), piece_count=draw.choice((0, 0, 1, 2, 4)),
    )  # fmt: skip


def chosen_s(facts: LoadFacts) -> float:
    """What the planner's choice takes, by the other evaluator."""
    chosen = plan_loading(facts).chosen
    stock = next((each for each in facts.stocks if each.form == chosen.form), Stock(()))
    return played_s(facts, stock, chosen.load_start, chosen.load_stop)


@pytest.mark.parametrize("may_meet", [True, False], ids=["meet", "first"])
def test_no_plan_is_five_percent_faster(may_meet: bool) -> None:
    ways = frozenset(Way) if may_meet else frozenset(Way) - {Way.MEET}
    for seed in range(SCENES):
        facts = replace(scene(seed), ways=ways)
        best, ours = best_s(facts, may_meet=may_meet), chosen_s(facts)
        assert ours <= 1.05 * best, (seed, ours / best, plan_loading(facts))


def test_every_way_is_the_best_one_somewhere() -> None:
    chosen = {plan_loading(scene(seed)).chosen.way for seed in range(300)}
    assert chosen >= {Way.PREFILL, Way.LOAD, Way.FIRST, Way.MEET}


def test_what_a_plan_says_is_what_it_takes() -> None:
    off = []
    for seed in range(300):
        facts = scene(seed)
        off.append(plan_loading(facts).chosen.ttft_s / chosen_s(facts))
    assert min(off) > 0.88, min(off)
    assert max(off) < 1.12, max(off)


def plain(**changes: object) -> LoadFacts:
    """4,096 tokens, all stored on a device; loading takes a tenth of computing."""
    facts = LoadFacts(
        token_count=4160, reusable_tokens=4159, stocks=(Stock((HeldRun(4096, Tier.NVME, 1e5),)),),
        compute=ComputeRate(0.0, 1e-4, 1e-9, 1.0, 1.1, 9), link=TierRate(0.0, 1e-11, 1.0, 9),
        tiers={Tier.NVME: TierFacts(TierRate(0.0, 1e-10, 1.0, 9))}, layer_count=32, unit_tokens=64,
    )  # fmt: skip
    return replace(facts, **changes)


def nvme(byte_s: float, caution: float = 1.0, queued: float = 0.0) -> dict[Tier, TierFacts]:
    return {Tier.NVME: TierFacts(TierRate(0.0, byte_s, caution, 9), queued)}


def test_a_plan_beats_a_prefill_in_nine_of_ten_cases_or_it_is_not_chosen() -> None:
    ways = frozenset({Way.PREFILL, Way.LOAD})
    sure = plan_loading(plain(ways=ways))
    assert sure.chosen.way is Way.LOAD
    assert sure.chosen.ttft_high_s < sure.prefill.ttft_s
    doubtful = plan_loading(plain(ways=ways, tiers=nvme(1e-10, caution=12.0)))
    assert doubtful.chosen.way is Way.PREFILL
    load = next(each for each in doubtful.candidates if each.way is Way.LOAD)
    assert load.ttft_s == sure.chosen.ttft_s, "on average it would have been as fast"
    assert "one case of ten" in doubtful.why


def test_a_queue_before_a_tier_is_waited_for() -> None:
    idle, busy = plan_loading(plain()), plan_loading(plain(tiers=nvme(1e-10, queued=2e9)))
    assert busy.chosen.ttft_s > idle.chosen.ttft_s
    assert busy.chosen.way in (Way.MEET, Way.PREFILL, Way.FIRST)


def test_what_the_engine_cannot_do_is_listed_and_not_chosen() -> None:
    plan = plan_loading(plain(tiers=nvme(1e-9), ways=frozenset({Way.PREFILL})))
    assert plan.chosen.way is Way.PREFILL
    assert {each.way for each in plan.candidates} == {Way.PREFILL, Way.LOAD, Way.FIRST, Way.MEET}
    assert all(each.refused for each in plan.candidates[1:])
    assert "cannot" in plan.why


def test_without_a_measured_prefill_everything_is_loaded() -> None:
    plan = plan_loading(plain(compute=ComputeRate()))
    assert (plan.chosen.way, plan.loaded_tokens, plan.is_measured) == (Way.LOAD, 4096, False)
    assert plan_loading(plain(compute=ComputeRate(), stocks=())).chosen.way is Way.PREFILL


def test_nothing_is_loaded_beyond_what_may_be_reused() -> None:
    for reusable in (0, 63, 64, 1000, 4096):
        for each in plan_loading(plain(reusable_tokens=reusable)).candidates:
            assert each.load_stop <= reusable
            assert each.load_start % 64 == each.load_stop % 64 == 0


@pytest.mark.parametrize("compute", [plain().compute, ComputeRate()])
def test_a_prefill_of_a_prompt_of_which_something_is_stored_says_why_it_is_not_loaded(compute: ComputeRate) -> None:
    short = plan_loading(plain(compute=compute, token_count=60, reusable_tokens=59))
    assert short.why == "what can be loaded of it is less than the least load, 64 tokens"
    assert plan_loading(plain(compute=compute, stocks=())).why == "nothing of the prompt is stored"
    unable = plan_loading(plain(compute=compute, ways=frozenset({Way.PREFILL})))
    assert unable.why.endswith(", but this engine cannot do it")


def test_prices_of_the_engine_and_of_tiers_move_the_choice() -> None:
    slow = plain(tiers=nvme(2.2e-9), ways=frozenset({Way.PREFILL, Way.LOAD, Way.MEET}))
    free = plan_loading(slow)
    assert free.chosen.way is Way.MEET
    busy_engine = plan_loading(replace(slow, tiers=nvme(0.9e-9), prices=Prices(compute=10.0)))
    assert busy_engine.chosen.compute_s < free.chosen.compute_s
    busy_tier = plan_loading(replace(slow, prices=Prices(tier=10.0)))
    assert busy_tier.chosen.tier_s < free.chosen.tier_s


def test_meeting_in_the_middle_takes_what_both_together_take() -> None:
    """T = n c l / (c + l), within a tenth and a chunk."""
    for chunks in (16, 64, 512):
        for ratio in (0.25, 0.5, 1.0, 2.0, 4.0):
            count, compute_s, load_s = chunks * 64, 64 * 1e-4, 64 * 1e-4 * ratio
            facts = plain(
                token_count=count + 1, reusable_tokens=count, stocks=(Stock((HeldRun(count, Tier.NVME, 1e5),)),),
                tiers=nvme(load_s / 64 / 1e5), compute=ComputeRate(0.0, 1e-4, 0.0, 1.0, 1.0, 9), step_tokens=64,
                link=TierRate(0.0, 0.0, 1.0, 9),
            )  # fmt: skip
            ideal = chunks * compute_s * load_s / (compute_s + load_s)
            assert chosen_s(facts) <= 1.1 * ideal + max(compute_s, load_s), (chunks, ratio)


def test_a_blend_is_chosen_only_where_it_is_faster_than_exact_work() -> None:
    runs = (HeldRun(4096, Tier.DRAM, 1e5),)
    blend = Blend(Recompute(0, 2, 0.15), 0, 4096, 4096, Stock(runs))
    facts = plain(stocks=(), blends=(blend,))
    assert plan_loading(facts).chosen.way is Way.BLEND
    assert plan_loading(facts).chosen.setting == blend.setting
    assert plan_loading(replace(facts, link=TierRate(0.0, 2e-9, 1.0, 9))).chosen.way is Way.PREFILL
    ahead = replace(blend, setting=Recompute(0, -1, 0.15, "suffix_attention"))
    one, two = plan_loading(facts), plan_loading(replace(facts, blends=(ahead,)))
    shares = blend.setting.share(32), ahead.setting.share(32)
    assert abs(shares[0] - shares[1]) < 0.02
    assert two.chosen.ttft_s > one.chosen.ttft_s, "the suffix passes twice, and nothing hides the load"


def test_512_chunks_in_512_runs_take_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan looks at runs and bisects; it never walks over chunks, nor over pairs of them."""
    runs = tuple(HeldRun(64, (Tier.DRAM, Tier.NVME)[index % 2], 1e5) for index in range(512))
    facts = plain(token_count=512 * 64 + 64, reusable_tokens=512 * 64, stocks=(Stock(runs),))
    seen, waits = [0], candidates._Pattern.waits

    def counted(*args: object, **more: object) -> tuple[float, float, float]:
        seen[0] += 1
        return waits(*args, **more)

    monkeypatch.setattr(candidates._Pattern, "waits", counted)
    assert plan_loading(facts).chosen.way is not Way.PREFILL
    assert seen[0] <= 250


def test_a_million_tokens_in_runs_that_alternate_are_planned_at_a_bounded_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar plans on its loop, for all tenants: a plan walks over the runs once, not once per place."""
    from kvstore.planning.loading import facts as inputs

    kinds = (Tier.DRAM, Tier.NVME, Tier.S3)
    runs = tuple(HeldRun(64, kinds[index % 3], 1e5) for index in range(1 << 14))
    tiers = {tier: nvme(1e-10)[Tier.NVME] for tier in kinds[1:]}
    facts = plain(token_count=(1 << 20) + 64, reusable_tokens=1 << 20, stocks=(Stock(runs),), tiers=tiers)
    seen, counted = [0], inputs.Stock._counted
    walked: list[int] = []
    begins = candidates._Pattern.__dict__["_begins"].func

    def count(stock: Stock, token: int) -> tuple[float, ...]:
        seen[0] += 1
        return counted(stock, token)

    def walk(pattern: object) -> list[int]:
        walked.append(1)
        return begins(pattern)

    monkeypatch.setattr(inputs.Stock, "_counted", count)
    monkeypatch.setattr(candidates._Pattern.__dict__["_begins"], "func", walk)
    plan = plan_loading(facts)
    assert 0 < plan.loaded_tokens <= 1 << 20
    assert plan.chosen.ttft_high_s < plan.prefill.ttft_s
    assert seen[0] <= 300
    assert len(walked) == 1


def test_neighbours_that_are_alike_are_one_run() -> None:
    one = HeldRun(64, Tier.DRAM, 1e5)
    assert merged_runs([one, one, HeldRun(0, Tier.S3, 1.0), one]) == (HeldRun(192, Tier.DRAM, 1e5),)
    assert merged_runs([one, replace(one, tier=Tier.NVME), one]) == (one, replace(one, tier=Tier.NVME), one)
