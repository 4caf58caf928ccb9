"""Converts plans of partial prefills, and the rates that they rest on, to messages and back."""

from __future__ import annotations

import math
from collections.abc import Collection

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute, RequestClass
from kvstore.planning.loading import Candidate, ComputeRate, LoadPlan, Prefill, TierRate, Way
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.v1alpha import admin_pb2
from kvstore.v1alpha import prefill_pb2 as pb

MODE_NUMBERS = {"off": pb.PLANNING_MODE_OFF, "observe": pb.PLANNING_MODE_OBSERVE, "on": pb.PLANNING_MODE_ON}
WAY_NUMBERS = {
    Way.PREFILL: pb.WAY_PREFILL, Way.LOAD: pb.WAY_LOAD, Way.FIRST: pb.WAY_FIRST, Way.MEET: pb.WAY_MEET,
    Way.BLEND: pb.WAY_BLEND,
}  # fmt: skip
CLASS_NUMBERS = {
    RequestClass.INTERACTIVE: pb.REQUEST_CLASS_INTERACTIVE, RequestClass.BATCH: pb.REQUEST_CLASS_BATCH
}  # fmt: skip
CLASSES = {number: each for each, number in CLASS_NUMBERS.items()}
"""The wire's number -> the class. Of a class that is missing, somebody waits."""
MODES = {pb.PLANNING_MODE_UNSPECIFIED: "off", **{number: mode for mode, number in MODE_NUMBERS.items()}}
WAYS = {number: way for way, number in WAY_NUMBERS.items()}
"""The wire's number -> the way. Ways that only a later release knows are missing."""
ANY_WAY = frozenset(Way)
UNKNOWN_WAY = "the chosen way is one that this release does not know, or did not ask for: it computes everything"
_PREFILL = Candidate(Way.PREFILL, "", 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def compute_to_message(rate: ComputeRate) -> pb.ComputeRate:
    """Return the rate as a message."""
    return pb.ComputeRate(
        pass_seconds=rate.pass_s, token_seconds=rate.token_s, pair_seconds=rate.pair_s, load=rate.load,
        caution=rate.caution, sample_count=rate.sample_count, most_tokens=rate.most_tokens,
    )  # fmt: skip


def compute_from_message(message: pb.ComputeRate) -> ComputeRate:
    """Return the rate in a message. The caller must check that it is sound."""
    return ComputeRate(
        message.pass_seconds, message.token_seconds, message.pair_seconds, message.load, message.caution,
        message.sample_count, message.most_tokens,
    )  # fmt: skip


def link_to_message(rate: TierRate) -> pb.LinkRate:
    """Return the rate of the link from the sidecar's memory to an engine as a message."""
    return pb.LinkRate(
        latency_seconds=rate.latency_s, byte_seconds=rate.byte_s, caution=rate.caution, sample_count=rate.sample_count,
        least_bytes=rate.least_bytes,
    )  # fmt: skip


def link_from_message(message: pb.LinkRate) -> TierRate:
    """Return the rate in a message. The caller must check that it is sound."""
    return TierRate(
        message.latency_seconds, message.byte_seconds, message.caution, message.sample_count, message.least_bytes
    )


def prefill_to_message(done: Prefill) -> pb.MeasuredPrefill:
    """Return a measured prefill as a message."""
    return pb.MeasuredPrefill(
        new_tokens=done.new_tokens, context_tokens=done.context_tokens, seconds=done.seconds, passes=done.passes
    )


def prefill_from_message(message: pb.MeasuredPrefill) -> Prefill:
    """Return the measured prefill in a message. The caller must check that it is sound."""
    return Prefill(message.new_tokens, message.context_tokens, message.seconds, message.passes)


def plan_to_message(plan: LoadPlan) -> pb.LoadPlan:
    """Return the plan as a message."""
    return pb.LoadPlan(
        token_count=plan.token_count, candidates=map(_candidate_to_message, plan.candidates),
        chosen=plan.candidates.index(plan.chosen), why=plan.why, is_measured=plan.is_measured,
        deadline_seconds=plan.deadline_s if math.isfinite(plan.deadline_s) else None,
    )  # fmt: skip


def plan_from_message(message: pb.LoadPlan, ways: Collection[Way] = ANY_WAY) -> LoadPlan:
    """Return the plan in a message. A chosen way that is none of ``ways``, or that this release does not know, becomes
    a plain prefill whose time means nothing."""
    known = tuple(_candidate_from_message(each) for each in message.candidates if each.way in WAYS)
    if not known or known[0].way is not Way.PREFILL:
        known = (_PREFILL, *known)
    given = next(iter(message.candidates[message.chosen :]), None)
    chosen, why, is_measured = known[0], UNKNOWN_WAY, False
    if given is not None and WAYS.get(given.way) in ways:
        chosen, why, is_measured = _candidate_from_message(given), message.why, message.is_measured
    return LoadPlan(message.token_count, chosen, known, why, is_measured=is_measured, deadline_s=deadline_of(message))


def outcome_to_message(fingerprint: bytes, step_tokens: int, outcome: PlanOutcome) -> admin_pb2.PlannedPrompt:
    """Return an outcome as a message. ``fingerprint``: the model's."""
    message = admin_pb2.PlannedPrompt(
        fingerprint=fingerprint, step_tokens=step_tokens, mode=MODE_NUMBERS[outcome.mode],
        plan=plan_to_message(outcome.plan), stored_token_count=outcome.stored_tokens, age_seconds=outcome.age_s,
    )  # fmt: skip
    if outcome.ttft_s is not None or outcome.is_given_up:
        end = pb.EndPrefill(ttft_seconds=outcome.ttft_s, wait_seconds=outcome.wait_s, is_given_up=outcome.is_given_up)
        message.end.MergeFrom(end)
    return message


def outcome_from_message(message: admin_pb2.PlannedPrompt) -> PlanOutcome:
    """Return the outcome in a message. The receiver must check that its numbers are sound."""
    end = message.end
    return PlanOutcome(
        plan_from_message(message.plan), MODES.get(message.mode, ""), message.stored_token_count,
        end.ttft_seconds if message.HasField("end") else None, end.wait_seconds, end.is_given_up, message.age_seconds,
    )  # fmt: skip


def deadline_of(message: pb.LoadPlan | pb.BeginPrefill) -> float:
    """Return the deadline in a message, in seconds; infinite where there is none, or no number."""
    given = message.deadline_seconds if message.HasField("deadline_seconds") else math.inf
    return math.inf if math.isnan(given) else given


def _candidate_to_message(each: Candidate) -> pb.Candidate:
    return pb.Candidate(
        way=WAY_NUMBERS[each.way], form=each.form, load_start=each.load_start, load_stop=each.load_stop,
        ttft_seconds=each.ttft_s, ttft_high_seconds=each.ttft_high_s, front_seconds=each.front_s,
        load_seconds=each.load_s, compute_seconds=each.compute_s, tier_seconds=each.tier_s, cost=each.cost,
        refused=each.refused, setting=_setting_to_message(each.setting),
    )  # fmt: skip


def _candidate_from_message(message: pb.Candidate) -> Candidate:
    return Candidate(
        WAYS[message.way], message.form, message.load_start, message.load_stop, message.ttft_seconds,
        message.ttft_high_seconds, message.front_seconds, message.load_seconds, message.compute_seconds,
        message.tier_seconds, message.cost, _setting_of(message), message.refused,
    )  # fmt: skip


def _setting_to_message(setting: Recompute | None) -> pb.RecomputeSetting | None:
    if setting is None:
        return None
    return pb.RecomputeSetting(
        first_layer=setting.first_layer, last_layer=setting.last_layer, ratio=setting.ratio, selector=setting.selector,
        metric=setting.metric, gradual=setting.gradual,
    )  # fmt: skip


def _setting_of(message: pb.Candidate) -> Recompute | None:
    """Return a blend's setting; None where it has none, or one that this release does not know."""
    told = message.setting
    if not message.HasField("setting"):
        return None
    try:
        return Recompute(told.first_layer, told.last_layer, told.ratio, told.selector, told.metric, told.gradual)
    except InvalidRequest:
        return None
