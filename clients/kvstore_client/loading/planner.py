"""One client's planner: its own measurements, the sidecar's rates, and the plans made from them."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import NamedTuple

from kvstore.errors import Exhausted, InvalidRequest, KVStoreError
from kvstore.keys import fingerprint
from kvstore.planning import ANY_TERMS, Terms
from kvstore.planning.loading import (
    ASSUMED,
    BusyTime,
    BusyTimes,
    ComputeRate,
    LoadFacts,
    LoadPlan,
    Operations,
    Prefill,
    Prefills,
    TierFacts,
    TierRate,
    Way,
    plan_loading,
)
from kvstore.planning.loading.facts import IN_MEMORY, prompt_facts, slowest_tiers
from kvstore.planning.loading.outcome import MODES, PlanOutcome
from kvstore.planning.loading.rates import SLOWEST, is_probe_due, probe_count
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ChunkState, ModelSpec, Tier
from kvstore.v1alpha import admin_pb2
from kvstore.wire.plans import compute_from_message, outcome_to_message, prefill_to_message
from kvstore_client.connection import Miss
from kvstore_client.context import Context
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.forks import in_children
from kvstore_client.loading.call import Asked, PrefillCall, begin, match_of_call
from kvstore_client.lookup.match import ChunkMatch, Match, stored_places
from kvstore_client.prompt import Prompt

ENGINE_WAYS = frozenset({Way.PREFILL, Way.LOAD, Way.FIRST})
"""The plans that engines can carry out. None begins to load in the middle: an engine computes nothing before the tokens
that it has."""
RATES_AGE_S_MAX = 1.0
"""Seconds for which the sidecar's rates of its tiers are used."""
RATES_WAIT_S = 1.0
"""The most seconds that a plan waits for the sidecar's rates."""
LOOK_S_MIN = 1.0
"""The least seconds between two looks of partial prefills at tiers that their plans left out."""
TELLING = 1.25
"""Bounds of a measured time are as good as the time itself when the upper one is at most this many times the
lower."""
GIVEN_UP = "loads_given_up"
TOLD_S_MIN = 10.0
"""The least seconds between two reports of prefills to the sidecar."""
TOLD_MAX, TOLD_ENGINES_MAX = 32, 8
"""The most prefills of an engine, and engines, in one report: the newest."""
ENGINES_MAX = 64
"""The most engines whose prefills the planner remembers: those that computed last."""


class Probe(NamedTuple):
    """A fetch to measure a tier: a prompt's first ``token_stop`` tokens. ``Tier.DRAM`` measures the way from memory."""

    token_stop: int
    tier: Tier


class Planner:
    """``mode``: "off" loads all that is stored; "observe" plans as well, but still loads all; "on" carries out the
    plan. Safe to share between threads."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.clock = context.clock
        self.timeout_s = context.timeout_s
        self._mode = "off"
        self._lock = threading.Lock()
        self._link = BusyTimes()
        self._prefills: dict[tuple[ModelSpec, int], Prefills] = {}
        self._tiers: dict[Tier, TierFacts] = {}
        self._looked_s = -math.inf
        self._asked_s = -math.inf
        self._probed_s: dict[Tier, float] = {}
        self._engines: dict[tuple[bytes, int], ComputeRate] = {}
        self._untold: dict[tuple[ModelSpec, int], list[Prefill]] = {}
        self._outcomes: list[tuple[ModelSpec, int, PlanOutcome, float]] = []
        self._told_s = context.clock.monotonic()
        in_children(self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    @property
    def mode(self) -> str:
        return self._mode

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in MODES:
            raise InvalidRequest(f"the planner's mode {mode!r:.40} must be one of {', '.join(MODES)}")
        self._mode = mode

    def mode_under(self, terms: Terms) -> str:
        """Return the mode for a request under these terms: nothing is planned for one that may not depend on
        measurements."""
        return "off" if terms.is_deterministic else self._mode

    # ------------------------------------------------------------ what is measured

    def landed(self, took: BusyTime) -> None:
        """Learn how long bytes of the sidecar's memory took to come, or had not come."""
        with self._lock:
            self._link = self._link.observed(took)

    def landed_between(self, byte_count: int, least_s: float, most_s: float) -> None:
        """Learn from a move out of the sidecar's memory that took between ``least_s`` and ``most_s``. Bounds that lie
        far apart, with the expected time between them, tell nothing."""
        with self._lock:
            expected_s = (self._link.rate or ASSUMED[Tier.DRAM]).seconds(byte_count)
            if least_s <= expected_s <= most_s and most_s > TELLING * least_s:
                return
            took_s = most_s if expected_s > most_s else (least_s + most_s) / 2
            self._link = self._link.observed(BusyTime(byte_count, took_s))

    @property
    def is_link_measured(self) -> bool:
        """False while the way from the sidecar's memory has an assumed rate."""
        with self._lock:
            return self._link.rate is not None

    def given_up(self) -> None:
        """Count a load that was given up, so that the prompt is computed."""
        with self._lock:
            self._context.count(GIVEN_UP)

    def computed(self, spec: ModelSpec, step_tokens: int, prefill: Prefill, *, is_told: bool = False) -> None:
        """Learn the time of a prefill by an engine that computes ``step_tokens`` at a time, 0: all at once. Impossible
        times are left out. Where plans are made the sidecar hears of it within a while, unless it ``is_told``."""
        if not prefill.is_sound:
            return
        key = spec, step_tokens
        with self._lock:
            known = self._prefills.pop(key, None) or Prefills(Operations.of(spec).pair_share)
            self._prefills[key] = known.observed(prefill)
            if len(self._prefills) > ENGINES_MAX:  # a model in training has new weights each time
                del self._prefills[next(iter(self._prefills))]
            if is_told or self.mode == "off":
                return
            self._untold[key] = [*self._untold.pop(key, ()), prefill][-TOLD_MAX:]
            while len(self._untold) > TOLD_ENGINES_MAX:
                del self._untold[next(iter(self._untold))]
        self._tell_soon()

    def planned(self, spec: ModelSpec, step_tokens: int, outcome: PlanOutcome) -> None:
        """Have the sidecar hear within a while of a plan that it did not make, and of what came of it."""
        with self._lock:
            made_s = self.clock.monotonic() - outcome.age_s
            self._outcomes = [*self._outcomes, (spec, step_tokens, outcome, made_s)][-TOLD_MAX:]
        self._tell_soon()

    def _tell_soon(self) -> None:
        """Begin a report, if it is time for one."""
        with self._lock:
            now = self.clock.monotonic()
            if now - self._told_s < TOLD_S_MIN:
                return
            self._told_s, untold, self._untold = now, self._untold, {}
            outcomes, self._outcomes = self._outcomes, []
        with suppress(KVStoreError):  # no thread can be had: the next report is another one
            start_thread(partial(self._tell, untold, outcomes), "kvstore-told")

    def _tell(
        self, untold: Mapping[tuple[ModelSpec, int], Sequence[Prefill]],
        outcomes: Iterable[tuple[ModelSpec, int, PlanOutcome, float]],
    ) -> None:  # fmt: skip
        """Report prefills to the sidecar, for other engines and for the next start, and plans, for operators. Blocks;
        never raises."""
        with suppress(KVStoreError), self._context.or_miss():
            computed, planned = admin_pb2.StatsRequest(), admin_pb2.StatsRequest()
            for (spec, step_tokens), done in untold.items():
                session, name = self._context.ready(spec)
                computed.computed.add(
                    fingerprint=name, step_tokens=step_tokens, prefills=map(prefill_to_message, done)
                )  # fmt: skip
            for spec, step_tokens, outcome, made_s in outcomes:
                session, name = self._context.ready(spec)
                age_s = self.clock.monotonic() - made_s
                planned.planned.append(outcome_to_message(name, step_tokens, replace(outcome, age_s=age_s)))
            session = self._context.connection.session()
            for request in (computed, planned):  # an older sidecar refuses long requests, and knows no plans
                if request.ByteSize():
                    session.call(session.admin.Stats, request, self.timeout_s)

    # ------------------------------------------------------------ plans

    def plan(
        self, spec: ModelSpec, match: Match, token_count: int, reusable_tokens: int, step_tokens: int,
        ways: frozenset[Way] = ENGINE_WAYS, terms: Terms = ANY_TERMS,
    ) -> LoadPlan:  # fmt: skip
        """Return the plan for a prompt of ``token_count`` tokens. ``match``: what is stored of it; tokens from
        ``reusable_tokens`` on are computed in any case. ``terms``: the caller's deadline and class.
        Asks the sidecar for the rates of the tiers that have the
        prompt, at most once a second."""
        return plan_loading(self.facts(spec, match, token_count, reusable_tokens, step_tokens, ways, terms))

    def prefill_s(
        self, spec: ModelSpec, token_count: int, step_tokens: int, context_tokens: int = 0
    ) -> float:  # fmt: skip
        """Return the seconds of a plain prefill behind ``context_tokens``; 0: none was measured."""
        with self._lock:
            known = self._prefills.get((spec, step_tokens))
        return known.rate.seconds(token_count, context_tokens, step_tokens) if known is not None else 0.0

    def or_miss(self) -> Miss:
        """See ``Connection.or_miss``."""
        return self._context.or_miss()

    def begin(self, prompt: Prompt, asked: Asked) -> PrefillCall | None:
        """Begin a partial prefill, planned by the sidecar with this client's measurements. None: it plans none, as
        ``loading.call.begin`` says, or holds, or streams, no more: a lookup needs neither. Raises the typed error of a
        call that fails."""
        with self._lock:
            prefills = self._prefills.get((prompt.spec, asked.step_tokens)) or Prefills(0.0)
            link = self._link.rate
        try:
            return begin(self._context, prompt, asked, prefills.rate, link)
        except Exhausted:
            return None

    def found(self, prompt: Prompt, call: PrefillCall) -> Match:
        """See ``loading.call.match_of_call``."""
        return match_of_call(self._context, prompt, call)

    def facts(
        self, spec: ModelSpec, match: Match, token_count: int, reusable_tokens: int, step_tokens: int,
        ways: frozenset[Way], terms: Terms = ANY_TERMS, others: Collection[Tier] = (),
    ) -> LoadFacts:  # fmt: skip
        """Return the facts that ``plan`` uses, for callers that change some of them. ``others``: see
        ``prompt_facts``."""
        stored, began_s = stored_places(match.chunks, match.prefix_token_count), self.clock.monotonic()
        asked = {*others, *(tier for _, tier in stored)}
        with self._lock:
            own = self._prefills.get((spec, step_tokens))
        if asked and (own is None or not asked.issubset(IN_MEMORY)):
            self._ask()
        with self._lock:
            told = self._engines.get((fingerprint(spec, spec.kind), step_tokens)) if own is None else None
            compute = own.rate if own is not None else told or ComputeRate()
            link, tiers = self._link.rate or ASSUMED[Tier.DRAM], dict(self._tiers)
        terms = terms.after(self.clock.monotonic() - began_s)  # the sidecar may have taken long to tell its rates
        return prompt_facts(
            spec, stored, token_count=token_count, reusable_tokens=reusable_tokens, compute=compute, link=link,
            tiers=tiers, step_tokens=step_tokens, ways=ways, terms=terms, others=others,
        )  # fmt: skip

    def probe(
        self, spec: ModelSpec, chunks: Sequence[ChunkMatch], loaded_tokens: int, *, measures_link: bool = False
    ) -> Probe | None:
        """Return a fetch that measures a tier whose chunks a prompt's plan left out, or the way from memory where it
        loads nothing. Otherwise nobody would learn that they are fast again. ``measures_link``: measure the way from
        memory also where the plan loads from there, for loads whose time the caller does not learn. None: nothing to
        measure now."""
        tried: set[Tier] = set()
        for number, chunk in enumerate(chunks):
            if chunk.state is not ChunkState.HIT:
                break
            tier = Tier.DRAM if chunk.tier in IN_MEMORY else chunk.tier
            is_loaded = chunk.token_start < loaded_tokens and not (tier is Tier.DRAM and measures_link)
            if is_loaded or (tier is Tier.DRAM and chunk.token_start) or tier in tried:
                continue
            tried.add(tier)
            count = self._due(tier, Wanted.of(spec, None, None, (), False).byte_count(spec.chunk_tokens))
            if count:
                return Probe(_stop_of_tier(chunks[number : number + count]), tier)
        return None

    def may_look(self) -> bool:
        """Return True when it is time to look at the tiers that plans left out; the time until the next look begins
        then."""
        with self._lock:
            now = self.clock.monotonic()
            is_time = now - self._looked_s >= LOOK_S_MIN
            if is_time:
                self._looked_s = now
        return is_time

    def _due(self, tier: Tier, chunk_bytes: int) -> int:
        """Return by how many chunks a tier is to be measured now; 0: it is not time. The time until the next
        measurement begins then."""
        with self._lock:
            now = self.clock.monotonic()
            told = self._tiers.get(tier)
            known = self._link.rate if tier is Tier.DRAM else told.rate if told is not None else None
            rate = known or ASSUMED.get(tier, SLOWEST)
            count = probe_count(rate)
            if not is_probe_due(rate, count * chunk_bytes, now - self._probed_s.get(tier, -math.inf)):
                return 0
            self._probed_s[tier] = now
        return count

    def _ask(self) -> None:
        """Ask for the sidecar's rates. While it is gone, or cannot tell them, its last rates hold: a plan is made
        without."""
        with self._lock:
            now = self.clock.monotonic()
            if now - self._asked_s < RATES_AGE_S_MAX:
                return
            self._asked_s = now
        with suppress(KVStoreError), self._context.or_miss():
            session = self._context.connection.session()
            stats = session.call(session.admin.Stats, admin_pb2.StatsRequest(), min(self.timeout_s, RATES_WAIT_S))
            with self._lock:
                self._tiers = told_facts(stats.rates)
                self._engines = told_engines(stats.engines)


def _stop_of_tier(chunks: Sequence[ChunkMatch]) -> int:
    """Return the token at which the chunks end that lie in the first one's tier."""
    first = chunks[0]
    stored = takewhile(lambda each: (each.state, each.tier) == (first.state, first.tier), chunks)
    return max(each.token_stop for each in stored)


def told_engines(engines: Iterable[admin_pb2.EngineRate]) -> dict[tuple[bytes, int], ComputeRate]:
    """Return what engines told the sidecar of their speeds. Impossible rates are left out."""
    rates = {(each.fingerprint, each.step_tokens): compute_from_message(each.rate) for each in engines}
    return {key: rate for key, rate in rates.items() if rate.is_known and rate.is_sound}


def told_facts(rates: Iterable[admin_pb2.TierRate]) -> dict[Tier, TierFacts]:
    """Return the sidecar's facts of its tiers. Impossible rates, such as NaN, are left out: those tiers get assumed
    rates."""
    told = []
    for each in rates:
        byte_s = 1.0 / each.bytes_per_second if each.bytes_per_second else math.inf
        rate = TierRate(each.latency_seconds, byte_s, each.caution, each.sample_count, each.least_bytes)
        if rate.is_sound:
            told.append((Tier(each.kind), TierFacts(rate, float(each.queued_bytes))))
    return slowest_tiers(told)
