"""Partial prefill: fetches and reuses the stored caches of a prompt, as far as the setting allows, and computes the
rest. Three steps: look up stored caches (facts), decide (a plan), and act on the plan.

A prompt's exact prefix comes first and is never touched. Where it loads slowly its front may be computed meanwhile.
Behind it segments may follow that were computed alone, and elsewhere a sibling's cache of the same tokens. E of the
transition layer is asked for before anything else is fetched, since only that tells if it is stored; the pass waits for
it where it needs it. Anything that does not come is computed: the answer says so.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvstore.errors import DataLoss, DeadlineExceeded, Exhausted, Unavailable
from kvstore.planning import Plan, Recompute
from kvstore.planning.loading import LoadPlan, Prefill, Way
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.seams import Clock
from kvstore.spec import Exactness
from kvstore_client.caches import Caches
from kvstore_client.fetch.transfer import without_frames
from kvstore_client.loading.call import PrefillCall
from kvstore_client.loading.patience import Patience
from kvstore_client.recompute.arrivals import Arrivals, PlanePairs
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.inquiry import ask, plain_s
from kvstore_client.recompute.racing import Race, RacedRun
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.result import PartialPrefill, Recomputed, Timeline
from kvstore_client.recompute.runs import InPlace, Run
from kvstore_client.recompute.sources import FetchedRun
from kvstore_client.recompute.weighing import begin_probes, settled, weighed

_log = logging.getLogger("kvstore.client")
LOST = (DataLoss, DeadlineExceeded, Exhausted, Unavailable)


def partial_prefill(client: Caches, request: Request, timeout_s: float, clock: Clock) -> PartialPrefill:
    """See ``Client.partial_prefill``."""
    started_s = clock.monotonic()
    prompt = _Prompt(client, request, timeout_s, clock)
    try:
        plan, result, prepared_s = prompt.reused()
        lossy_by = () if result.exactness is Exactness.EXACT else plan.permits
        due = [client.gate.is_due(permit) for permit in lossy_by]  # ask for each permit once per request
        if any(due):
            lossy = result.logits[-1].clone()
            del result  # one cache at a time
            result = _computed(request, (), None, clock)
            told = [client.gate.checked(permit, result.logits[-1], lossy) for permit in lossy_by]
            plan = Plan(len(request.tokens), reason="; ".join(dict.fromkeys(told)))
        took = prompt.plain(plan, result)
        if took is not None:
            client.planner.computed(request.runner.spec, 0, took, is_told=prompt.is_called)
        timeline = replace(result.timeline, total_s=clock.monotonic() - started_s, prepare_s=prepared_s - started_s)
        prompt.tell(timeline, took, is_checked=any(due))
        return PartialPrefill(plan=plan, **{**vars(result), "timeline": timeline})
    finally:
        prompt.close()


class _Prompt:
    """One prompt on its way: reused as planned, or after a failure with the rest that is left; and the report to the
    sidecar in the end. ``_front``: tokens whose cache is in ``_planes`` and stays, even if the load behind them fails.
    ``_took``: the time of computing them, if it was in one piece."""

    def __init__(self, client: Caches, request: Request, timeout_s: float, clock: Clock) -> None:
        self._client, self._request, self._timeout_s, self._clock = client, request, timeout_s, clock
        self._call: PrefillCall | None = None
        self._began_s = clock.monotonic()
        self._loading: LoadPlan | None = None
        self._is_given_up = self._is_late = self._is_silent = False
        self._front = 0
        self._took: Prefill | None = None
        self._planes: PlanePairs | None = None
        self._race: Race | None = None

    def reused(self) -> tuple[Plan, Recomputed, float]:
        """Reuse what the plan names, compute the rest, and return (plan, result, when computing began)."""
        try:
            return self._attempted()
        except LOST as error:
            self._is_given_up = True
            reason = error.message
            without_frames(error)
        # Only here, outside of ``except``: the error's frames are gone, and with them the spoiled cache.
        if self._front:
            return self._from_front(reason)
        self._planes = None
        if self._is_late and not self._is_silent and self._client.plane == "local":
            try:
                plan, result, prepared_s = self._attempted(in_memory=True)
                why = f"{reason}: only what memory had was reused"
                return replace(plan, reason=why), result, prepared_s
            except LOST as error:
                reason = error.message
                without_frames(error)
            self._planes = None
        if self._request.reused_min:
            raise DataLoss(reason)
        reason = f"{reason}: the prompt was computed in full"
        _log.warning("kvstore: %s", reason)
        prepared_s = self._clock.monotonic()
        plan = Plan(len(self._request.tokens), reason=reason)
        return plan, _computed(self._request, (), None, self._clock), prepared_s

    def _attempted(self, *, in_memory: bool = False) -> tuple[Plan, Recomputed, float]:
        client, request, clock = self._client, self._request, self._clock
        arrivals, began_s = Arrivals(client, request, self._timeout_s), clock.monotonic()
        try:
            facts = ask(client, request, arrivals.held, in_memory=in_memory)
            self._call = self._call or arrivals.held.call
            request = replace(request, terms=request.terms.after(clock.monotonic() - self._began_s))
            found = weighed(client, request, facts, arrivals.held)
            while unknown := found.facts.unknown(found.plan):
                facts = replace(facts, hidden=(*facts.hidden, *(arrivals.fetch_e(*each) for each in unknown)))
                found = weighed(client, request, facts, arrivals.held)
            plan = settled(client, request, found, arrivals.held)
            if plan.reused_token_count < request.reused_min:
                raise DataLoss(f"{plan.reused_token_count} of {request.reused_min} tokens to reuse are stored now")
            self._loading = self._loading or plan.loading
            runs, self._planes = arrivals.run(plan)
            prepared_s = clock.monotonic()
            front = plan.front_token_count
            with Patience(
                client,
                plan.loading,
                began_s,
                lambda: self._front >= front and arrivals.is_waiting,
                arrivals.stop,
                plain_s(client, request) if plan.runs else 0.0,
            ) as patience:
                try:
                    runs = self._with_front(plan, runs) if front else self._raced(plan, runs)
                    result = _computed(request, runs, self._planes, clock, plan.recompute)
                except DataLoss as error:
                    if self._race is not None and self._race.has_won:
                        client.planner.given_up()
                    self._is_late = patience.is_spent
                    if self._is_late:
                        raise DeadlineExceeded("loading took longer than a plain prefill") from error
                    raise
        except BaseException:
            self._call = self._call or arrivals.held.call
            if not arrivals.close():  # a copy may still write to the front's memory
                self._front = 0
            self._is_silent = arrivals.held.is_silent
            if self._race is not None and self._race.token_count:
                self._front, self._planes = self._race.token_count, self._race.planes
            raise
        self._planes = self._race = None  # the next step may need memory for another cache
        for took in arrivals.measured():
            client.planner.landed(took)
        if not in_memory:
            begin_probes(client, request, plan, arrivals.held.own)
        return plan, result, prepared_s

    def _with_front(self, plan: Plan, runs: list[Run]) -> list[Run]:
        """Compute the tokens before the loaded ones. Afterwards both are one run that begins the prompt; its front
        needs no wait."""
        front = plan.front_token_count
        assert self._planes is not None, "the runs land in them"
        planes = [(k[:, :front], v[:, :front]) for k, v in self._planes]
        tokens = self._request.tokens[:front].astype("int64")
        done = recompute(self._request.runner, tokens, (), Recompute.reuse(), kv=planes, clock=self._clock)
        self._front, self._took = front, Prefill(front, 0, done.timeline.suffix_s)
        return [replace(runs[0], token_start=0, token_count=runs[0].token_stop, rotated_from=0), *runs[1:]]

    def _raced(self, plan: Plan, runs: list[Run]) -> list[Run]:
        """For an exact prefix and nothing else, planned and measured: compute it meanwhile, in case the load is
        late."""
        loading, source = plan.loading, runs[0].source if len(runs) == 1 else None
        if self._client.planner.mode != "on" or loading is None or not loading.is_measured:
            return runs
        if loading.chosen.way is Way.BLEND:
            return runs
        if not isinstance(source, FetchedRun) or not runs[0].is_exact or runs[0].token_start:
            return runs
        self._race = Race(self._request, plan, self._clock)
        return [replace(runs[0], source=RacedRun(source, self._race))]

    def _from_front(self, reason: str) -> tuple[Plan, Recomputed, float]:
        """Compute the rest of a prompt whose front was computed, after its load failed."""
        reason = f"{reason}: what was to come was computed"
        _log.warning("kvstore: %s", reason)
        prepared_s = self._clock.monotonic()
        runs = [Run(0, self._front, InPlace(), is_exact=True)]
        result = _computed(self._request, runs, self._planes, self._clock)
        self._planes = self._race = None
        result = replace(result, share=1.0)  # the front was computed, too
        return Plan(len(self._request.tokens), reason=reason), result, prepared_s

    def plain(self, plan: Plan, result: Recomputed) -> Prefill | None:
        """Return the plain prefill that was computed: the front, if any; else the tokens behind the reused ones. None
        where its time tells nothing of a plain prefill."""
        if self._front or plan.recompute is not None or result.exactness is not Exactness.EXACT:
            return self._took
        reused = plan.reused_token_count
        return Prefill(plan.token_count - reused, reused, result.timeline.suffix_s)

    @property
    def is_called(self) -> bool:
        """True when the sidecar hears of the outcome with the call's end."""
        return self._call is not None

    def tell(self, timeline: Timeline, took: Prefill | None, *, is_checked: bool) -> None:
        """Report the plan's outcome to the sidecar, also where this client made the plan. ``is_checked``: a full
        prefill followed the reuse, so that the time says nothing of the plan."""
        waited_s = timeline.load_s + timeline.prepare_s
        if self._call is not None:
            self._call.end(timeline.total_s, waited_s, is_given_up=self._is_given_up, computed=took)
            self._call = None
        elif self._loading is not None:
            self._tell_own(self._loading, None if is_checked else timeline.total_s, waited_s)

    def _tell_own(self, plan: LoadPlan, ttft_s: float | None, waited_s: float) -> None:
        planner, stored = self._client.planner, max(each.load_stop for each in plan.candidates)
        age_s, mode = self._clock.monotonic() - self._began_s, planner.mode_under(self._request.terms)
        outcome = PlanOutcome(plan, mode, stored, ttft_s, waited_s, self._is_given_up, age_s)
        planner.planned(self._request.runner.spec, 0, outcome)

    def close(self) -> None:
        """Give back what the sidecar holds for a plan without a result. Idempotent."""
        if self._call is not None:
            self._call.close()
            self._call = None


def _computed(
    request: Request, runs: Sequence[Run], kv: Any, clock: Clock, chosen: Recompute | None = None
) -> Recomputed:
    """Compute the prompt over these runs. ``chosen``: the plan's setting, None where only exact runs are reused."""
    setting = request.setting or chosen or Recompute.reuse()
    tokens = request.tokens.astype("int64")
    return recompute(request.runner, tokens, runs, setting, logit_count=request.logit_count, kv=kv, clock=clock)
