"""Partial prefill: what the sidecar has of a prompt is fetched and reused, as far as the setting allows, the rest is
computed. Three steps: ask what is there (facts), decide (a plan), and act on the plan.

A prompt's exact prefix comes first and is never touched. Behind it segments may follow that were computed alone, and a
sibling's cache of the same tokens where there are none of these. E of the transition layer is asked for before anything
else is fetched, since only that tells whether it is there, and waited for where it is needed. Whatever does not come is
computed: the answer says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, Unavailable
from kvstore.planning import Plan, Recompute, decide
from kvstore.planning.loading import Prefill
from kvstore.seams import Clock
from kvstore.spec import Exactness
from kvstore_client.fetch.transfer import without_frames
from kvstore_client.loading.patience import Patience
from kvstore_client.loading.probe import begin_probe
from kvstore_client.recompute.arrivals import Arrivals
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.inquiry import ask
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.result import PartialPrefill, Recomputed
from kvstore_client.recompute.runs import Run

if TYPE_CHECKING:
    from kvstore_client.client import Client

_log = logging.getLogger("kvstore.client")
LOST = (DataLoss, DeadlineExceeded, Exhausted, Unavailable)


def partial_prefill(client: Client, request: Request, timeout_s: float, clock: Clock) -> PartialPrefill:
    """See ``Client.partial_prefill``."""
    started_s = clock.monotonic()
    plan, result, prepared_s = _reused(client, request, timeout_s, clock)
    lossy_by = () if result.exactness is Exactness.EXACT else plan.permits
    due = [client.gate.is_due(permit) for permit in lossy_by]  # each is asked once per request
    if any(due):
        lossy = result.logits[-1].clone()
        del result  # one cache at a time
        result = _computed(request, (), None, clock)
        told = [client.gate.checked(permit, result.logits[-1], lossy) for permit in lossy_by]
        plan = Plan(len(request.tokens), reason="; ".join(dict.fromkeys(told)))
    if plan.recompute is None and result.exactness is Exactness.EXACT:  # a plain prefill behind what was reused
        reused = plan.reused_token_count
        took = Prefill(len(request.tokens) - reused, reused, result.timeline.suffix_s)
        client.planner.computed(request.runner.spec, 0, took)
    timeline = replace(result.timeline, total_s=clock.monotonic() - started_s, prepare_s=prepared_s - started_s)
    return PartialPrefill(plan=plan, **{**vars(result), "timeline": timeline})


def _reused(client: Client, request: Request, timeout_s: float, clock: Clock) -> tuple[Plan, Recomputed, float]:
    """The prompt with what is there of it, and when computing began."""
    try:
        return _attempted(client, request, timeout_s, clock)
    except LOST as error:
        _log.warning("kvstore: %s; computing the prompt in full", error.message)
        reason = f"{error.message}: the prompt was computed in full"
        without_frames(error)
    # Only now: the spoiled cache is gone with the error's frames, and there is one at a time.
    prepared_s = clock.monotonic()
    return Plan(len(request.tokens), reason=reason), _computed(request, (), None, clock), prepared_s


def _attempted(client: Client, request: Request, timeout_s: float, clock: Clock) -> tuple[Plan, Recomputed, float]:
    arrivals, began_s = Arrivals(client, request, timeout_s), clock.monotonic()
    try:
        facts = ask(client, request, arrivals.tickets)
        plan = decide(facts)
        while unknown := facts.unknown(plan):
            facts = replace(facts, hidden=(*facts.hidden, *(arrivals.fetch_e(*each) for each in unknown)))
            plan = decide(facts)
        runs, planes = arrivals.run(plan)
        prepared_s = clock.monotonic()
        with Patience(client, plan.loading, began_s, lambda: arrivals.is_waiting, arrivals.stop) as patience:
            try:
                result = _computed(request, runs, planes, clock, plan.recompute)
            except DataLoss as error:
                if patience.is_spent:
                    raise DeadlineExceeded("loading took longer than a plain prefill") from error
                raise
    except BaseException:
        arrivals.close()
        raise
    for took in arrivals.measured():
        client.planner.landed(took.byte_count, took.busy_s)
    _probe(client, request, plan)
    return plan, result, prepared_s


def _probe(client: Client, request: Request, plan: Plan) -> None:
    """Begin to measure, beside the caller, a tier whose chunks a plan left in the sidecar."""
    loading = plan.loading
    if client.planner.mode == "on" and loading is not None:
        stored = max(each.load_stop for each in loading.candidates)
        if loading.chosen.load_stop < stored:
            begin_probe(client, request.runner.spec, request.tokens, loading.chosen.load_stop)


def _computed(
    request: Request, runs: Sequence[Run], kv: Any, clock: Clock, chosen: Recompute | None = None
) -> Recomputed:
    """``chosen``: the setting of the plan, None where nothing but exact runs is reused."""
    setting = request.setting or chosen or Recompute.reuse()
    tokens = request.tokens.astype("int64")
    return recompute(request.runner, tokens, runs, setting, logit_count=request.logit_count, kv=kv, clock=clock)
