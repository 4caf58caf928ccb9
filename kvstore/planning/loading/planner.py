"""The choice among candidates: the cheapest whose 90th percentile is no slower than a plain prefill."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.planning.loading.candidates import candidates_of
from kvstore.planning.loading.facts import LoadFacts
from kvstore.planning.loading.timeline import Candidate, Way

ENGINE = "this engine cannot do it"
UNKNOWN = "no prefill of this model was measured yet: all that is stored is loaded, as without a planner"
NOTHING = "nothing of the prompt is stored"
OVERDUE = "the deadline has passed: no load is worth waiting for"


@dataclass(frozen=True)
class LoadPlan:
    """The way that was chosen for a prompt. ``chosen`` is one of the ``candidates``; plain prefill is the first of
    them. ``why``: the reason in words. ``is_measured``: false while the engine's speed is unknown; its seconds are then
    0 and mean nothing. ``deadline_s``: seconds within which the first token is wanted."""

    token_count: int
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    why: str
    is_measured: bool = True
    deadline_s: float = math.inf

    @property
    def prefill(self) -> Candidate:
        """The candidate that computes everything."""
        return self.candidates[0]

    @property
    def is_in_time(self) -> bool:
        """True when the first token comes within the deadline in nine of ten cases, as far as is known."""
        return self.deadline_s > 0.0 and (not self.is_measured or self.chosen.ttft_high_s <= self.deadline_s)

    @property
    def loaded_tokens(self) -> int:
        return self.chosen.loaded_tokens

    def __str__(self) -> str:
        return f"{self.chosen.way}: {self.why}"


def plan_loading(facts: LoadFacts) -> LoadPlan:
    """Choose the cheapest candidate that the engine supports and whose 90th percentile is no later than prefill's mean.
    Where some of them keep the deadline in nine of ten cases, it is one of these; after the deadline, plain prefill.
    Cost: a fraction of a millisecond, even for 512 chunks."""
    found = tuple(candidates_of(facts))
    if facts.deadline_s <= 0.0:
        is_known = facts.compute.is_known
        return LoadPlan(facts.token_count, found[0], found, OVERDUE, is_measured=is_known, deadline_s=facts.deadline_s)
    if not facts.compute.is_known:
        return _unmeasured(facts, found)
    judged = tuple(replace(each, refused=_refusal(facts, each, found[0])) for each in found)
    able = [each for each in judged if not each.refused]
    in_time = [each for each in able if each.ttft_high_s <= facts.deadline_s]
    chosen = min(in_time or able, key=lambda each: each.cost)
    why = _why(facts, chosen, judged)
    if not in_time:
        why += f"; no way is sure to keep the deadline of {facts.deadline_s * 1e3:,.1f} ms"
    return LoadPlan(facts.token_count, chosen, judged, why, deadline_s=facts.deadline_s)


def _unmeasured(facts: LoadFacts, found: Sequence[Candidate]) -> LoadPlan:
    """Choose the longest load: without a measured prefill, candidates cannot be compared."""
    loads = [each for each in found if each.way in (Way.LOAD, Way.BLEND) and each.way in facts.ways]
    chosen = max(loads, key=lambda each: each.loaded_tokens, default=found[0])
    why = UNKNOWN if loads else f"what is stored could be loaded, but {ENGINE}" if found[1:] else _nothing(facts)
    return LoadPlan(facts.token_count, chosen, tuple(found), why, is_measured=False, deadline_s=facts.deadline_s)


def _refusal(facts: LoadFacts, candidate: Candidate, prefill: Candidate) -> str:
    if candidate.way is Way.PREFILL:
        return ""
    if candidate.way not in facts.ways:
        return ENGINE
    if candidate.ttft_high_s > prefill.ttft_s:
        return (
            f"{candidate.ttft_high_s * 1e3:,.1f} ms in one case of ten, a plain prefill {prefill.ttft_s * 1e3:,.1f} ms"
        )
    return ""


def _why(facts: LoadFacts, chosen: Candidate, judged: Sequence[Candidate]) -> str:
    prefill, others = judged[0], judged[1:]
    if chosen.way is Way.PREFILL:
        return _why_prefill(chosen, others) if others else _nothing(facts)
    said = f"{chosen.ttft_s * 1e3:,.1f} ms to the first token, {1 - chosen.ttft_s / prefill.ttft_s:.0%} less than a "
    said += "plain prefill"
    better = [each for each in others if each.refused == ENGINE and each.cost < chosen.cost]
    if better:
        best = min(better, key=lambda each: each.cost)
        said += f"; {best.way} would take {best.ttft_s * 1e3:,.1f} ms, but {ENGINE}"
    return said


def _nothing(facts: LoadFacts) -> str:
    """Return the reason of a plan that can load nothing: nothing is stored, or less than a load takes."""
    if any(stock.token_count for stock in facts.stocks):
        return f"what can be loaded of it is less than the least load, {facts.unit_tokens:,} tokens"
    return NOTHING


def _why_prefill(prefill: Candidate, others: Sequence[Candidate]) -> str:
    able = [each for each in others if each.refused != ENGINE]
    best = min(able or others, key=lambda each: each.ttft_high_s)
    if not able:
        return f"{best.way} would take {best.ttft_s * 1e3:,.1f} ms, but {ENGINE}"
    if best.refused:
        return f"{best.way} would take {best.refused}"
    return f"{best.way} might miss the deadline" if best.cost < prefill.cost else f"{best.way} would cost more"
