"""The decision which tokens of a prompt are reused, and with which setting. Pure: the same facts make the same plan."""

from __future__ import annotations

from dataclasses import replace

from kvstore.planning.facts import Facts
from kvstore.planning.offers import Choice, OfferedRun, choices_of, exact_runs, offers_of
from kvstore.planning.plan import Plan, PlannedRun, StoredCache
from kvstore.planning.setting import Recompute

NOTHING = "nobody has anything behind the exact prefix"


def decide(facts: Facts) -> Plan:
    """Return the plan that these facts lead to. It reuses exact runs first: the model's prefix, and a segment that
    stands where it was computed. None of their tokens is computed again. Behind them it takes the best choice that the
    caller or a profile allows and that has stored tokens. Tokens whose logits are wanted are always computed.

    A plan may need E of which the facts say nothing (``Plan.hidden``). The caller fetches that E first. When it is
    missing, the caller adds that to the facts and decides again.
    """
    layers = facts.receiver.slab_layers
    exact = tuple(PlannedRun(run.start, run.stop - run.start, layers, run.cache) for run in exact_runs(facts))
    plan = Plan(facts.token_count, exact, loading=facts.loading)
    if facts.is_unavailable:
        return replace(plan, reason="the sidecar is unavailable")
    if not facts.allows_lossy or not (facts.senders or facts.own.segments):
        return plan
    reason = next((each.permits[0].reason for each in facts.senders if each.is_refused and each.permits[0].reason), "")
    unmixed = ""
    for choice in choices_of(facts.setting, offers_of(facts), facts.receiver.layer_count):
        if choice.setting is None:
            reason, unmixed = choice.reason, unmixed or choice.reason * (len(choice.offers) > 1)
            continue
        taken = _with_choice(facts, plan, choice, choice.setting)
        if taken is not None:
            return replace(taken, reason=unmixed)
        reason = _without_e(facts, choice.offers[0].runs[0].cache, choice.setting.first_layer)
    return replace(plan, reason=reason or NOTHING)


def _with_choice(facts: Facts, plan: Plan, choice: Choice, setting: Recompute) -> Plan | None:
    """Return the plan with the stored runs of a choice; None when there is none, because its E is missing."""
    found = [(offer, _run(facts, offered, setting)) for offer in choice.offers for offered in offer.runs]
    taken = [(offer, run) for offer, run in found if run is not None]
    if not taken:
        return None
    runs = sorted((*plan.runs, *(run for _, run in taken)), key=lambda run: run.token_start)
    permits = dict.fromkeys(offer.permit for offer, _ in taken if offer.permit is not None)
    is_lossy = not all(run.is_exact for run in runs)
    return replace(plan, runs=tuple(runs), recompute=setting if is_lossy else None, permits=tuple(permits))


def _run(facts: Facts, offered: OfferedRun, setting: Recompute) -> PlannedRun | None:
    """Return the part of an offered run that is fetched. Where E is needed, the run ends where its E ends; None when E
    ends before the run begins."""
    spec, first, hidden_layer = offered.cache.sender or facts.receiver, setting.first_layer, None
    layers = spec.slab_layers if offered.is_exact else setting.loaded_layers(spec.layer_count)
    if setting.needs_hidden and not offered.is_exact:
        if spec.keeps_e:
            layers = tuple(sorted({*layers, first}))
        else:
            hidden_layer = first
            known = facts.hidden_of(offered.cache, first)
            if known is not None:
                offered = replace(offered, stop=min(offered.stop, offered.cache.token_start + known.token_count))
    if offered.stop <= offered.start:
        return None
    return PlannedRun(offered.start, offered.stop - offered.start, layers, offered.cache, hidden_layer)


def _without_e(facts: Facts, cache: StoredCache, layer: int) -> str:
    known = facts.hidden_of(cache, layer)
    assert known is not None, "a choice is left because of what is known of its E"
    return f"{(cache.sender or facts.receiver).model_id!r} has no E of layer {layer}: {known.reason.name}"
