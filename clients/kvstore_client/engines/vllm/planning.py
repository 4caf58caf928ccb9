"""Planning: decides once how much of a waiting prompt is loaded, and learns from the engine's steps and loads.

The thread that looked the prompt up makes the decision, because it may wait for the sidecar's rates; the engine's loop
reads it. Times of loads and steps are measured in the scheduler, which hears of a load's end with the results of a
step. So it knows bounds of a load's time; the wait for that step is no part of it, and is planned apart.
"""

from __future__ import annotations

import logging
import statistics
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvstore.keys import Extra, Tokens
from kvstore.planning.loading import BusyTime, HeldRun, LoadFacts, LoadPlan, Prefill, Prices, Stock, Way, plan_loading
from kvstore.planning.loading.facts import IN_MEMORY
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.seams import Clock
from kvstore.spec import ModelSpec
from kvstore_client.client import Client
from kvstore_client.engines.vllm.objects import ScheduledStep, scheduled_requests
from kvstore_client.engines.vllm.step import Load
from kvstore_client.loading.patience import patience_s
from kvstore_client.loading.planner import ENGINE_WAYS
from kvstore_client.loading.probe import measure_beside, probe
from kvstore_client.lookup.match import Match
from kvstore_client.prompt import PageHashes

GIVE_UP_S_MIN = 0.05
SUMMARY_S = 60.0
STEPS_MAX = 2
"""Steps in flight in an engine that schedules ahead."""
STEPS_SEEN = 8
"""Number of steps of which the usual time is the median."""
_log = logging.getLogger("kvstore.vllm")


@dataclass(frozen=True)
class Decision:
    """The decision for one waiting prompt, of which vLLM had the first ``computed`` tokens. ``facts`` and ``plan`` are
    of the tokens behind these. ``stop``: the end of the tokens to load; 0: load none. ``waiting``: the number of other
    waiting requests; ``made_s``: the monotonic clock's time."""

    computed: int
    facts: LoadFacts
    plan: LoadPlan
    stop: int
    waiting: int = 0
    made_s: float = 0.0

    @property
    def give_up_s(self) -> float:
        """Seconds after which a load is given up: it is later than in nine of ten cases, or than computing."""
        return max(GIVE_UP_S_MIN, patience_s(self.plan))

    def bytes_in_memory(self, stop: int) -> int:
        """Return the bytes that a load up to ``stop`` brings from the sidecar's memory; 0 where some lie in a lower
        tier."""
        stock = self.facts.stocks[0] if self.facts.stocks else Stock(())
        count = min(stop - self.computed, stock.token_count)
        sizes = {tier: stock.bytes_of(tier, 0, count) for tier in stock.tiers}
        is_whole = not any(size for tier, size in sizes.items() if tier not in IN_MEMORY)
        return int(sum(sizes.values())) if is_whole else 0


class RequestPlanner:
    """The planner of one scheduler. ``mode``: as ``connect(planning=...)``. ``step_tokens``: the most tokens that vLLM
    computes in a step. ``is_layerwise``: loads run beside the step that computes behind them. ``times_steps``: steps
    are measured also where nothing is planned. Steps of all requests are measured together, adapters included: they
    have one shape."""

    def __init__(
        self, client: Client, spec: ModelSpec, clock: Clock, *, step_tokens: int, is_layerwise: bool,
        times_steps: bool = False,
    ) -> None:  # fmt: skip
        self._client = client
        self._spec = spec
        self._clock = clock
        self._step_tokens = step_tokens
        self._is_layerwise = is_layerwise
        self._times_steps = times_steps
        self._steps = deque[_Running](maxlen=STEPS_MAX)
        self._number = 0
        self._ended_s = 0.0
        self._begun_s = deque[float](maxlen=STEPS_MAX + 1)
        self._took_s = deque[float](maxlen=STEPS_SEEN)
        self._loading: dict[str, tuple[float, int]] = {}
        self._planned: dict[str, Decision] = {}
        self._told_s = clock.monotonic()
        self._saved_s = 0.0
        self.counts = Counter[str]()
        """Decisions by their way, and loads that failed or were given up."""

    @property
    def mode(self) -> str:
        return self._client.planner.mode

    # ------------------------------------------------------------ decisions

    def decide(self, match: Match, token_count: int, computed: int, waiting: int) -> Decision | None:
        """Decide how much of a prompt to load. ``match``: what is stored; ``waiting``: the number of other waiting
        requests, each of which every second of the engine delays. None: nothing is planned. May wait for the sidecar's
        rates. Called on a thread of its own."""
        if self.mode == "off" or match.prefix_token_count <= computed:
            return None
        whole, chunk = match.prefix_token_count, self._spec.chunk_tokens
        given = self._client.planner.facts(
            self._spec, match, token_count, token_count - 1, self._step_tokens, ENGINE_WAYS
        )
        facts = replace(
            behind(given, computed), unit_tokens=chunk, prices=Prices(compute=float(waiting)),
            link=replace(given.link, latency_s=given.link.latency_s + self._wait_s),
            layer_count=given.layer_count if self._is_layerwise else 1,
        )  # fmt: skip
        plan = plan_loading(facts)
        stop = whole
        if plan.chosen.way is not Way.LOAD and plan.is_measured:
            stop = (computed + plan.chosen.load_stop) // chunk * chunk if plan.loaded_tokens else 0
        decision = Decision(computed, facts, plan, stop, waiting, self._clock.monotonic())
        self._count(plan)
        _log.info(
            "kvstore: %d of %d stored tokens %s: %s", stop, whole,
            "are loaded" if self.mode == "on" else "would be loaded", plan,
        )  # fmt: skip
        return decision

    @property
    def _wait_s(self) -> float:
        """The time for which a load that has landed waits on average: half of a step, while the engine works."""
        took_s = tuple(self._took_s)
        return statistics.median(took_s) / 2 if took_s and self._steps and not self._is_layerwise else 0.0

    def _count(self, plan: LoadPlan) -> None:
        """Count a decision, and log a summary once in a while, as a warning: vLLM shows no lower level of other
        loggers."""
        self.counts[plan.chosen.way] += 1
        loads = [each.ttft_s for each in plan.candidates if each.way is Way.LOAD]
        if plan.is_measured and loads:
            self._saved_s += loads[0] - plan.chosen.ttft_s
        now = self._clock.monotonic()
        if now - self._told_s >= SUMMARY_S:
            self._told_s = now
            _log.warning(
                "kvstore: planning is %s: %s; by what was measured, first tokens come %.3f s sooner in all than if all "
                "that is stored were loaded",
                self.mode, ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items())), self._saved_s,
            )  # fmt: skip

    def look(
        self, spec: ModelSpec, prompt: Tokens | PageHashes, extras: Sequence[Extra], decision: Decision, stored: int
    ) -> None:  # fmt: skip
        """Begin to measure the load that a decision left out of the ``stored`` tokens, if it is time, and the way from
        memory where loads do not measure it: before the first of them, and layerwise. ``prompt``: its tokens, or the
        engine's own hashes. Never raises, and waits for nothing."""
        measures_link = self._is_layerwise or not self._client.planner.is_link_measured
        if self.mode == "on" and (decision.stop < stored or measures_link):
            look = partial(probe, self._client, spec, prompt, decision.stop, extras=extras, measures_link=measures_link)
            measure_beside(self._client, look)

    def computing_s(self, start: int, stop: int) -> float:
        """Return the seconds in which the engine computes these tokens of a prompt; 0: nothing was measured."""
        return self._client.planner.prefill_s(self._spec, stop - start, self._step_tokens, start)

    def wait_s_max(self, start: int, stop: int, most_s: float) -> float:
        """Return how long a prompt may wait for these tokens of it: ``most_s``, and where plans are carried out no
        longer than the engine computes them, as far as that was measured."""
        computing_s = self.computing_s(start, stop)
        return min(most_s, computing_s) if self.mode == "on" and computing_s else most_s

    # ------------------------------------------------------------ what loads take

    def handed(self, load: Load, decision: Decision | None) -> Load:
        """Note that the workers get this load. Returns it with its give-up time, where plans are carried out."""
        if decision is None:
            return load
        if not self._is_layerwise:
            self._loading[load.request_id] = self._clock.monotonic(), decision.bytes_in_memory(load.stop)
        if self.mode != "on" or not decision.plan.is_measured:
            return load
        return replace(load, give_up_s=decision.give_up_s)

    def landed(self, request_ids: Iterable[str], failed: Collection[str]) -> None:
        """Learn from the loads of these requests, which have ended; ``failed``: those of them that failed."""
        now = self._clock.monotonic()
        # The report of the step before came after that step had begun, and did not name these requests.
        heard_s = self._begun_s[0] if len(self._begun_s) > STEPS_MAX else 0.0
        for name in request_ids:
            begun_s, byte_count = self._loading.pop(name, (now, 0))
            has_failed, least_s = name in failed, max(0.0, heard_s - begun_s)
            self.counts["failed"] += has_failed
            if has_failed:
                self._tell(name, None, is_given_up=True)
            if byte_count and has_failed:
                self._client.planner.landed(BusyTime(byte_count, least_s, is_cut=True))
            elif byte_count:
                self._client.planner.landed_between(byte_count, least_s, now - begun_s)

    def follow(self, request_id: str, decision: Decision) -> None:
        """Measure the request's time from its decision to the first token."""
        self._planned[request_id] = decision

    def forget(self, request_id: str) -> None:
        """Drop the load, and the plan, of a request that is gone."""
        self._loading.pop(request_id, None)
        self._tell(request_id, None)

    def _tell(self, request_id: str, ttft_s: float | None, *, is_given_up: bool = False) -> None:
        """Report a request's plan, once. Behind other requests its time is the queue's, and not the plan's."""
        decision = self._planned.pop(request_id, None)
        if decision is None:
            return
        age_s = self._clock.monotonic() - decision.made_s
        took_s = None if decision.waiting else ttft_s
        stored = sum(stock.token_count for stock in decision.facts.stocks[:1])
        told = PlanOutcome(decision.plan, self.mode, stored, took_s, is_given_up=is_given_up, age_s=age_s)
        self._client.planner.planned(self._spec, self._step_tokens, told)

    # ------------------------------------------------------------ what steps take

    def step_begins(self, output: ScheduledStep, *, loads: bool, mends: bool = False) -> int:
        """Note that vLLM has scheduled a step. Its time says nothing of computing alone where it ``mends`` a prompt,
        or, layerwise, ``loads`` as it goes. Returns the step's number, which the workers report with its results; 0:
        it is not measured."""
        now = self._clock.monotonic()
        self._begun_s.append(now)
        if self.mode == "off" and not self._times_steps:
            return 0
        self._number += 1
        if output.num_scheduled_tokens:
            is_measured = not (mends or (loads and self._is_layerwise))
            self._steps.append(_Running.of(output, self._number, now, is_measured=is_measured))
        return self._number

    def step_ended(self, number: int = 0) -> None:
        """Learn from a step, whose results have come; ``number``: 0 where the workers told none, for the oldest. Two
        may be in flight: the second begins when the first ends. A step that computes nothing has results, too, where a
        load has ended in it: the step behind it goes on then."""
        while number and self._steps and self._steps[0].number < number:
            self._steps.popleft()
        if not self._steps or self._steps[0].number > number > 0:
            return
        done, now = self._steps.popleft(), self._clock.monotonic()
        took_s, self._ended_s = now - max(done.begun_s, self._ended_s), now
        self._took_s.append(took_s)
        for name, stop in done.stops.items():
            planned = self._planned.get(name)
            if planned is not None and stop >= planned.computed + planned.facts.token_count:
                self._tell(name, now - planned.made_s)
        if done.is_measured and done.has_prefill:
            prefill = Prefill(done.new_tokens, done.context_tokens, took_s)
            self._client.planner.computed(self._spec, self._step_tokens, prefill)


@dataclass(frozen=True)
class _Running:
    """A step in flight: ``new_tokens`` of all its requests, each behind ``context_tokens`` on average. ``stops``: the
    tokens of each request that are computed when it ends."""

    number: int
    begun_s: float
    new_tokens: int
    context_tokens: int
    has_prefill: bool
    is_measured: bool
    stops: Mapping[str, int]

    @staticmethod
    def of(output: ScheduledStep, number: int, now: float, *, is_measured: bool) -> _Running:
        counts = output.num_scheduled_tokens
        contexts = {name: computed for name, _, _, computed in scheduled_requests(output)}
        total = sum(counts.values())
        pairs = sum(count * (contexts.get(name, 0) + count / 2) for name, count in counts.items())
        context = max(0, round(pairs / total - total / 2)) if total else 0
        has_prefill = any(count > 1 for count in counts.values())
        stops = {name: contexts.get(name, 0) + count for name, count in counts.items()}
        return _Running(number, now, total, context, has_prefill, is_measured, stops)


def behind(facts: LoadFacts, computed: int) -> LoadFacts:
    """Return the facts of the tokens behind the first ``computed`` ones, which the engine has: each later token attends
    to these, too."""
    rate = facts.compute
    stocks = tuple(replace(stock, runs=_later(stock, computed)) for stock in facts.stocks)
    return replace(
        facts, token_count=facts.token_count - computed, reusable_tokens=facts.reusable_tokens - computed,
        compute=replace(rate, token_s=rate.token_s + rate.pair_s * computed),
        stocks=tuple(stock for stock in stocks if stock.runs),
    )  # fmt: skip


def _later(stock: Stock, start: int) -> tuple[HeldRun, ...]:
    return tuple(
        replace(run, token_count=min(run.token_count, stop - start))
        for run, stop in zip(stock.runs, stock.starts[1:], strict=True)
        if stop > start
    )
