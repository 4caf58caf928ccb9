"""The decision, over drawn facts: no token twice, nothing beyond what was found, nothing lossy that is not allowed, and
as much as an oracle finds by sets of tokens."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.planning import (
    Facts,
    Holding,
    Pair,
    Permit,
    Plan,
    Recompute,
    StoredCache,
    StoredE,
    StoredSegment,
    decide,
)
from kvstore.planning.permit import PROVENANCE
from kvstore.spec import MissReason, ModelSpec

LAYERS, TOKENS_MAX = 4, 40
KEPT = ModelSpec.dense(
    "ours", "a1" * 32, layer_count=LAYERS, kv_heads=2, head_dim=16, hidden_size=32, vocab_size=96, chunk_tokens=8
)
SENDERS = [replace(KEPT, model_id=name, weights_digest=digest * 32) for name, digest in (("one", "b2"), ("two", "c3"))]
LOSSY = [
    Recompute.reuse(), Recompute.cacheblend(1, 0.2), Recompute.cacheblend(2, 0.3), Recompute(1, 2, 0.3),
    Recompute(1, 1, 0.25, "product"), Recompute.droidspeak(0, 1), Recompute(2, 3),
]  # fmt: skip
SETTINGS = [*LOSSY, Recompute.full(LAYERS), Recompute(0, 0, 1.0)]


def permits_of(draw: Any, sender: ModelSpec | None) -> tuple[Permit, ...]:
    kinds = ("position",) if sender is None else ("sibling", "both")
    return tuple(
        Permit(Pair.of(KEPT, sender, kind, PROVENANCE[kind]), setting, "" if setting else f"no {kind}", "digest")
        for kind, setting in ((kind, draw(st.sampled_from([None, *LOSSY]))) for kind in kinds)
    )


@st.composite
def facts_of(draw: Any) -> Facts:
    """Segments are the prompt's, so that each model has some of the same ones. Most facts allow a lossy plan."""
    count, place, cuts = draw(st.sampled_from(range(TOKENS_MAX, 0, -1))), 0, []
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 12)), max_size=4)):
        if place + gap + size <= count:
            cuts.append((place + gap, place + gap + size))
            place += gap + size
    setting = draw(st.sampled_from([None, *LOSSY, None, *SETTINGS]))
    stood_at = draw(st.sampled_from([0, *(start for start, _ in cuts[:2])]))
    holdings = []
    for sender in (None, *SENDERS[: draw(st.sampled_from([1, 2, 0]))]):
        segments = [
            StoredSegment(start, stop, draw(st.sampled_from([stop - start, (stop - start) // 2, 0])), stood_at)
            for start, stop in cuts
        ]
        prefix = draw(st.sampled_from([count // part if part else 0 for part in (0, 4, 2, 1)]))
        holdings.append(Holding(sender, prefix, tuple(segments), () if setting else permits_of(draw, sender)))
    return Facts(
        replace(KEPT, keeps_e=draw(st.booleans())), count, count - draw(st.integers(1, min(count, 4))), holdings[0],
        tuple(holdings[1:]), setting, is_unavailable=draw(st.sampled_from([False] * 15 + [True])),
    )  # fmt: skip


def exact_tokens(facts: Facts) -> set[int]:
    """Of the model's own prefix, and of its own segment where that stands where it stood."""
    found = set(range(facts.own.prefix_token_count))
    for each in facts.own.segments:
        if each.token_start == each.stood_at:
            found |= set(range(each.token_start, each.token_start + each.stored_token_count))
    return found & set(range(facts.reusable_token_count))


def settled(facts: Facts, draw: Any) -> tuple[Facts, Plan]:
    """As whoever runs a plan does: E is asked for, and what is learned decides again."""
    plan = decide(facts)
    while unknown := facts.unknown(plan):
        told = [
            StoredE(
                cache,
                layer,
                draw(st.sampled_from(range(cache.token_stop - cache.token_start, -1, -1))),
                MissReason.COLD,
            )
            for cache, layer in unknown
        ]
        facts = replace(facts, hidden=(*facts.hidden, *told))
        plan = decide(facts)
    return facts, plan


@settings(max_examples=250, deadline=None)
@given(facts_of(), st.data())
def test_no_token_is_reused_twice_and_none_whose_logits_are_wanted(facts: Facts, data: st.DataObject) -> None:
    facts, plan = settled(facts, data.draw)
    assert plan.token_count == facts.token_count
    assert all(run.token_count > 0 for run in plan.runs)
    assert all(one.token_stop <= two.token_start for one, two in pairwise(plan.runs))
    assert not plan.runs or plan.runs[-1].token_stop <= facts.reusable_token_count
    assert plan == decide(facts)


@settings(max_examples=250, deadline=None)
@given(facts_of(), st.data())
def test_nothing_is_reused_beyond_what_was_found(facts: Facts, data: st.DataObject) -> None:
    facts, plan = settled(facts, data.draw)
    stored: dict[StoredCache, int] = {}
    for each in (facts.own, *facts.senders):
        stored[StoredCache(0, each.prefix_token_count, False, each.sender)] = each.prefix_token_count
        for segment in each.segments:
            cache = StoredCache(segment.token_start, segment.token_stop, True, each.sender, segment.stood_at)
            stored[cache] = segment.stored_token_count
    for run in plan.runs:
        assert 0 <= run.rows.start < run.rows.stop <= stored[run.cache]
        if run.hidden_layer is not None:
            known = facts.hidden_of(run.cache, run.hidden_layer)
            assert known is not None
            assert run.rows.stop <= known.token_count


@settings(max_examples=250, deadline=None)
@given(facts_of(), st.data())
def test_what_is_lossy_is_allowed_and_has_what_its_setting_needs(facts: Facts, data: st.DataObject) -> None:
    facts, plan = settled(facts, data.draw)
    exact = min(facts.own.prefix_token_count, facts.reusable_token_count)
    assert sum(run.token_count for run in plan.runs if not run.is_standalone and run.sender is None) == exact
    lossy = [run for run in plan.runs if not run.is_exact]
    setting = plan.recompute
    if setting is None:
        assert not lossy
        return
    assert lossy
    assert facts.allows_lossy
    if facts.setting:
        assert (setting, plan.permits) == (facts.setting, ())
    else:
        allowed = [permit.setting for permit in plan.permits]
        assert setting in allowed
        assert all(each is not None and setting.covers(each) for each in allowed)
        assert len(plan.permits) == len({run.sender for run in lossy})
    for run in lossy:
        assert set(run.layers) >= set(setting.loaded_layers(LAYERS))
        spec = run.sender or facts.receiver
        assert (run.hidden_layer == setting.first_layer) == (setting.needs_hidden and not spec.keeps_e)
        assert not (setting.needs_hidden and spec.keeps_e) or setting.first_layer in run.layers


def most(facts: Facts) -> int:
    """How many tokens behind what is exact may be reused at most, by sets of tokens. All E is there."""
    exact, limit = max(exact_tokens(facts), default=-1) + 1, facts.reusable_token_count

    def tokens(each: Holding, of_segments: bool) -> set[int]:
        parts = [(0, each.prefix_token_count)]
        if of_segments:
            parts = [(segment.token_start, segment.stored_token_count) for segment in each.segments]
        found = {token for start, count in parts for token in range(start, start + count)}
        return found & set(range(exact, limit))

    def setting_of(each: Holding) -> Recompute | None:
        kind = "position"
        if each.sender is not None:
            kind = "both" if tokens(each, True) - tokens(each, False) else "sibling"
        permit = each.permit(kind)
        return facts.setting or (permit.setting if permit else None)

    own = tokens(facts.own, True)
    best = len(own) if setting_of(facts.own) else 0
    for each in facts.senders:
        theirs, setting, ours = tokens(each, True) | tokens(each, False), setting_of(each), setting_of(facts.own)
        if setting and theirs:
            best = max(best, len(theirs))
            if own and ours and (setting.covers(ours) or ours.covers(setting)):
                best = max(best, len(own | theirs))
    return best if facts.allows_lossy else 0


@settings(max_examples=250, deadline=None)
@given(facts_of())
def test_as_much_is_reused_as_may_be(facts: Facts) -> None:
    """Where E is taken to be there. A sender no profile lets anything of through was not even looked up."""
    if facts.is_unavailable:
        facts = replace(facts, own=Holding(), senders=())
    assert decide(facts).reused_token_count == len(exact_tokens(facts)) + most(facts)


@settings(max_examples=250, deadline=None)
@given(facts_of())
def test_without_a_permit_or_a_setting_only_what_is_exact_is_reused(facts: Facts) -> None:
    def refused(each: Holding) -> Holding:
        return replace(each, permits=tuple(replace(permit, setting=None, reason="no") for permit in each.permits))

    strict = replace(facts, setting=None, own=refused(facts.own), senders=tuple(map(refused, facts.senders)))
    for forbidden in (strict, replace(facts, setting=Recompute.full(LAYERS))):
        plan = decide(forbidden)
        assert plan.recompute is None
        assert all(run.is_exact and run.sender is None for run in plan.runs)
        assert plan.reused_token_count == len(exact_tokens(forbidden))


OWN = Holding(None, 8)
SEGMENTS = (StoredSegment(10, 20, 10),)
BLEND, E_OF_ONE, OTHER = Recompute.cacheblend(1, 0.2), Recompute(1, 1, 0.3), Recompute(0, -1, 0.15, "product")


def holding(sender: ModelSpec | None, kind: str, setting: Recompute | None, *, prefix: int = 30) -> Holding:
    permit = Permit(Pair.of(KEPT, sender, kind, PROVENANCE[kind]), setting, "" if setting else f"no {kind}")
    return Holding(sender, prefix, SEGMENTS * (sender is None), (permit,))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(KEPT, 40, 39, OWN), ""),
        (Facts(KEPT, 40, 39, OWN, (Holding(SENDERS[0], 30),), Recompute.full(LAYERS)), ""),
        (Facts(KEPT, 40, 39, OWN, (Holding(SENDERS[0]),), BLEND), "nobody has anything behind the exact prefix"),
        (Facts(KEPT, 40, 39, Holding(), (), is_unavailable=True), "the sidecar is unavailable"),
        (Facts(KEPT, 40, 39, OWN, (holding(SENDERS[0], "sibling", None),)), "no sibling"),
        (Facts(KEPT, 40, 39, holding(None, "position", None, prefix=8)), "no position"),
        (
            Facts(KEPT, 40, 39, OWN, (Holding(SENDERS[0], 30),), E_OF_ONE,
                  (StoredE(StoredCache(0, 30, sender=SENDERS[0]), 1, 8, MissReason.EVICTED),)),
            "'one' has no E of layer 1: EVICTED",
        ),
    ],
)  # fmt: skip
def test_a_plan_of_less_says_why(facts: Facts, reason: str) -> None:
    plan = decide(facts)
    assert plan.reason == reason
    assert all(run.is_exact for run in plan.runs)


def test_a_profile_of_smaller_prompts_lets_nothing_through() -> None:
    own = holding(None, "position", BLEND, prefix=8)
    (permit,) = own.permits
    for most, allowed in (((40, 1), True), ((39, 1), False), ((40, 0), True), ((0, 1), True)):
        limited = replace(permit, token_count_max=most[0], run_count_max=most[1])
        plan = decide(Facts(KEPT, 40, 39, replace(own, permits=(limited,))))
        assert (plan.recompute is not None) == allowed
        assert ("40 tokens, the profile's at most 39" in plan.reason) == (not allowed)
    two = (StoredSegment(10, 20, 10), StoredSegment(20, 30, 10))
    limited = replace(permit, run_count_max=1)
    plan = decide(Facts(KEPT, 40, 39, replace(own, segments=two, permits=(limited,))))
    assert "2 reused runs, the profile's at most 1" in plan.reason
    assert all(run.is_exact for run in plan.runs)


def test_a_document_that_stands_where_it_was_computed_counts_among_those_of_a_profile() -> None:
    """Profiles count all documents of their prompts, and the first one is exact there, too."""
    permit = replace(holding(None, "position", BLEND).permits[0], run_count_max=2)
    three = tuple(StoredSegment(start, start + 10, 10, 5) for start in (5, 15, 25))
    for count, allowed in ((2, True), (3, False)):
        plan = decide(Facts(KEPT, 40, 39, Holding(None, 5, three[:count], (permit,))))
        assert len(plan.runs) == (1 + count if allowed else 2)
        assert ("3 reused runs, the profile's at most 2" in plan.reason) == (not allowed)


def test_settings_of_which_neither_covers_the_other_are_not_mixed() -> None:
    own, theirs = holding(None, "position", BLEND, prefix=8), holding(SENDERS[0], "sibling", OTHER, prefix=15)
    facts = Facts(KEPT, 40, 39, own, (theirs,))
    plan = decide(facts)
    assert (plan.recompute, plan.permits) == (BLEND, own.permits)
    assert plan.reason == "own segments are not mixed with the cache of 'one': neither setting covers the other"
    mixed = decide(replace(facts, senders=(holding(SENDERS[0], "sibling", BLEND, prefix=15),)))
    assert [(run.token_start, run.token_stop, run.sender) for run in mixed.runs] == [
        (0, 8, None), (8, 10, SENDERS[0]), (10, 20, None)
    ]  # fmt: skip
    assert (len(mixed.permits), mixed.reason) == (2, "")


def test_e_that_ends_early_cuts_its_runs_and_the_next_best_follows_where_there_is_none() -> None:
    senders = (Holding(SENDERS[0], 30), Holding(SENDERS[1], 20))
    facts = Facts(KEPT, 40, 39, OWN, senders, E_OF_ONE)
    cache = StoredCache(0, 30, sender=SENDERS[0])
    assert decide(facts).hidden == ((cache, 1),)
    short = decide(replace(facts, hidden=(StoredE(cache, 1, 12),)))
    assert [(run.token_start, run.token_stop, run.sender) for run in short.runs] == [(0, 8, None), (8, 12, SENDERS[0])]
    none = decide(replace(facts, hidden=(StoredE(cache, 1, 0),)))
    assert [(run.token_stop, run.sender) for run in none.runs] == [(8, None), (20, SENDERS[1])]
    assert none.reason == ""


def test_a_document_goes_before_both_runs_of_a_sibling_that_it_meets() -> None:
    """The sibling's prefix ends within the document, of which it has the rest, too."""
    document = StoredSegment(10, 20, 10, stood_at=1)
    facts = Facts(KEPT, 40, 39, Holding(None, 8, (document,)), (Holding(SENDERS[0], 15, (document,)),), BLEND)
    assert [(run.token_start, run.token_stop, run.sender) for run in decide(facts).runs] == [
        (0, 8, None), (8, 10, SENDERS[0]), (10, 20, None)
    ]  # fmt: skip


def test_facts_and_plans_are_values() -> None:
    facts = Facts(KEPT, 40, 39, OWN)
    for value, name in ((facts, "setting"), (decide(facts), "runs"), (decide(facts).runs[0], "layers")):
        with pytest.raises(FrozenInstanceError):
            setattr(value, name, None)
    assert hash(decide(facts)) == hash(decide(replace(facts)))
