"""Weighing: the choice which of a prompt's documents and siblings' caches are worth their load, by the cost model of
exact prefixes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from kvstore.errors import DataLoss
from kvstore.planning import Facts, Plan, decide
from kvstore.planning.blends import BlendOffer, blend_offers, exact_part, tiers_of
from kvstore.planning.loading import LoadPlan, Way, plan_loading
from kvstore_client.caches import Caches
from kvstore_client.loading.planner import ENGINE_WAYS
from kvstore_client.loading.probe import measure_beside, probe, probe_segment
from kvstore_client.lookup.match import Match
from kvstore_client.recompute.inquiry import Held, prefix_cut
from kvstore_client.recompute.request import Request

WAYS = ENGINE_WAYS | {Way.BLEND}


@dataclass(frozen=True)
class Weighed:
    """The reused part of a prompt: the ``facts`` of just that, and their ``plan``."""

    facts: Facts
    plan: Plan


def weighed(client: Caches, request: Request, facts: Facts, held: Held) -> Weighed:
    """Return the fastest plan of a prompt with segments or senders: all of them reused, some, none, or a plain prefill.
    All that is stored is reused where nothing is planned, and where no prefill was measured."""
    whole, mode = decide(facts), client.planner.mode_under(request.terms)
    if held.own is None or facts.is_unavailable or mode == "off" or request.extras:
        return Weighed(facts, whole)
    loads = client.planner.facts(
        facts.receiver, held.own, facts.token_count, facts.reusable_token_count, 0, WAYS, request.terms, tiers_of(facts)
    )  # fmt: skip
    offers = blend_offers(facts, loads.tiers)
    loading = plan_loading(replace(loads, blends=tuple(each.blend for each in offers)))
    if mode == "observe":
        return Weighed(replace(facts, loading=loading), replace(whole, loading=loading))
    taken = _taken(facts, offers, loading)
    plan = decide(taken)
    reason = f"not all of it was worth its load: {loading.why}" if offers and taken.own != facts.own else ""
    if loading.chosen.way is not Way.BLEND and offers:
        reason = f"documents and siblings were not worth their load: {loading.why}"
    return Weighed(taken, replace(plan, reason=reason or whole.reason))


def _taken(facts: Facts, offers: list[BlendOffer], loading: LoadPlan) -> Facts:
    """Return the facts of what the chosen candidate reuses. Blends are the last candidates, in the order of offers."""
    blends = loading.candidates[len(loading.candidates) - len(offers) :]
    for offer, candidate in zip(offers, blends, strict=True):
        if candidate is loading.chosen:
            return replace(offer.facts, loading=loading)
    unit, whole = facts.receiver.chunk_tokens, min(facts.own.prefix_token_count, facts.reusable_token_count)
    stop = loading.chosen.load_stop
    count = facts.own.prefix_token_count if stop >= whole // unit * unit and stop else stop
    return replace(exact_part(facts, count), loading=loading)


def settled(client: Caches, request: Request, found: Weighed, held: Held) -> Plan:
    """Hold no more of the model's own prefix than is reused, and return the plan of what is still there. Raises
    DataLoss where less of it is, and the sibling's tokens behind it would need E that nobody asked for."""
    count = found.facts.own.prefix_token_count
    if held.own is None or count >= held.own.prefix_token_count:
        return found.plan
    again: Match = prefix_cut(client, request, held, held.own, count)
    if again.prefix_token_count >= count:
        return found.plan
    own = replace(found.facts.own, prefix_token_count=again.prefix_token_count)
    facts = replace(found.facts, own=own)
    plan = decide(facts)
    if facts.unknown(plan):
        raise DataLoss("a chunk of the prompt's own prefix was lost since it was looked up")
    return replace(plan, reason=found.plan.reason)


def begin_probes(client: Caches, request: Request, plan: Plan, own: Match | None) -> None:
    """Begin to measure, beside the caller, a tier whose chunks a plan left in the sidecar. ``own``: what was found of
    a prompt with segments or senders; None: it has neither."""
    loading, spec = plan.loading, request.runner.spec
    if client.planner.mode != "on" or loading is None:
        return
    loaded = loading.chosen.load_stop
    if loading.chosen.way is Way.BLEND:
        loaded = sum(run.token_count for run in plan.runs if run.is_exact and not run.is_standalone)
    if loaded < max(each.load_stop for each in loading.candidates if each.way is not Way.BLEND):
        measure_beside(client, partial(probe, client, spec, request.tokens, loaded, extras=request.extras))
        return
    if own is None or not any(each.way is Way.BLEND for each in loading.candidates):
        return
    taken = {(run.sender, run.is_standalone, run.cache.token_start) for run in plan.runs}
    for segment in own.segments:
        if segment.standalone_token_count and (None, True, segment.token_start) not in taken:
            measure_beside(client, partial(probe_segment, client, spec, request.tokens, segment, request.preamble))
            return
    for sender in request.senders:
        if not any(run.sender == sender for run in plan.runs):
            measure_beside(client, partial(probe, client, sender, request.tokens, 0))
            return
