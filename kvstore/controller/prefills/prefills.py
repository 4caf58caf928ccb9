"""Partial prefills of one tenant: begun, planned, ended."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.controller.fetches import Lookups, Tickets, namespaces_of
from kvstore.controller.parts import Parts
from kvstore.controller.prefills.engines import Engines
from kvstore.controller.prefills.records import PlanRecord, PlanState, PrefillEnd
from kvstore.controller.values import ChainQuery, LookupResult
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning import ANY_TERMS, Terms
from kvstore.planning.loading import ASSUMED, ComputeRate, LoadFacts, LoadPlan, TierFacts, TierRate, Way, plan_loading
from kvstore.planning.loading.compute import TOKENS_MAX, Prefill
from kvstore.planning.loading.facts import prompt_facts, slowest_tiers
from kvstore.planning.loading.outcome import MODES, PLANS_KEPT, SECONDS_MAX, PlanOutcome, is_sound_plan, judged
from kvstore.seams import Deadline
from kvstore.spec import ChunkState, ModelSpec, Tier


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt of ``token_count`` tokens. Tokens from ``reusable_tokens`` on are computed in any case.

    ``query``: the prompt's whole chunks. ``readers``: number of fetches by the plan's ticket, one per tensor-parallel
    rank. ``step_tokens``: tokens of one forward pass; 0: all at once. ``ways``: ways to load that the engine supports
    besides plain prefill. ``compute`` and ``link``: rates that the client measured; None: it measured none.
    ``terms``: the caller's deadline and class."""

    query: ChainQuery
    token_count: int
    reusable_tokens: int
    readers: int = 1
    step_tokens: int = 0
    ways: frozenset[Way] = frozenset()
    mode: str = "off"
    compute: ComputeRate | None = None
    link: TierRate | None = None
    terms: Terms = ANY_TERMS


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """A partial prefill that has begun. ``found``: the lookup of the prompt, with a ticket for the ``chunk_count``
    chunks from index ``chunk_first`` on, which are to be loaded. ``plan`` None: the client asked for none.
    ``token_count``: the prompt's. ``began_s``: the monotonic clock's time."""

    record: PlanRecord
    found: LookupResult
    chunk_first: int
    chunk_count: int
    token_count: int
    began_s: float

    @property
    def plan(self) -> LoadPlan | None:
        return self.record.plan


class PartialPrefills:
    """Plans partial prefills from the service's knowledge: the chunks' tiers, and the tiers' speeds and queues."""

    def __init__(self, parts: Parts, lookups: Lookups, tickets: Tickets) -> None:
        self._parts = parts
        self._lookups = lookups
        self._tickets = tickets
        self.engines = Engines(parts.catalog, parts.served)
        self._records: deque[PlanRecord] = deque(maxlen=PLANS_KEPT)
        self._numbers = itertools.count(1)

    async def begin(self, request: PrefillRequest, deadline: Deadline) -> PlannedPrefill:
        """Look a prompt up, plan its prefill, and hold the chunks that the plan loads. Raises InvalidRequest for a
        request that contradicts itself; Exhausted past a limit. The caller must ``end`` or ``drop`` the result."""
        with self._parts.catalog.use(request.query.fingerprint):
            return await self._begin(request, deadline)

    async def _begin(self, request: PrefillRequest, deadline: Deadline) -> PlannedPrefill:
        began_s = self._parts.clock.monotonic()
        spec = self._parts.catalog.model(request.query.fingerprint).spec
        self._check(request, spec)
        self._parts.counters.add("lookup_calls")
        found = await self._lookups.lookup_wide(request.query, request.readers, deadline)
        try:
            pauses = self._parts.long_work.begin()
            request = replace(request, terms=request.terms.after(self._parts.clock.monotonic() - began_s))
            plan = None if request.mode == "off" else plan_loading(self._facts(request, spec, found))
            await pauses.between()  # the ticket holds the found chunks meanwhile
            first, count, found = self._cut(request, spec, found, plan)
        except BaseException:
            self._tickets.release(found.ticket)
            raise
        record = PlanRecord(
            next(self._numbers), self._parts.clock.wall(), request.query.fingerprint, spec.model_id,
            request.step_tokens, request.mode, plan, found.hit_count * spec.chunk_tokens,
        )  # fmt: skip
        self._records.append(record)
        self._parts.counters.add("partial_prefills")
        return PlannedPrefill(record, found, first, count, request.token_count, began_s)

    def end(self, planned: PlannedPrefill, end: PrefillEnd) -> None:
        """Release the prefill's ticket, and take note of the client's measurements where they are plausible."""
        self.drop(planned)
        record, took_s = planned.record, self._parts.clock.monotonic() - planned.began_s
        if not (0 <= end.wait_s <= SECONDS_MAX and 0 <= end.ttft_s <= SECONDS_MAX):
            return
        record.state = PlanState.GIVEN_UP if end.is_given_up else PlanState.DONE
        computed = end.computed
        if computed is not None and not (computed.is_sound and _is_possible(computed, planned.token_count, took_s)):
            computed = None
        record.end = replace(end, computed=computed)
        if computed is not None:
            self.engines.computed(record.fingerprint, record.step_tokens, computed)
        self._count(record, end)

    def drop(self, planned: PlannedPrefill) -> None:
        """Release a prefill's ticket: the prefill has ended, or its client is gone. Idempotent."""
        self._tickets.release(planned.found.ticket)
        if planned.record.state is PlanState.ON_ITS_WAY:
            planned.record.state = PlanState.GONE

    def records(self, count: int) -> Sequence[PlanRecord]:
        """Return the last ``count`` records, the newest first; 0: all that are kept."""
        found = list(self._records)[::-1]
        return found[:count] if count else found

    def _check(self, request: PrefillRequest, spec: ModelSpec) -> None:
        most = self._parts.limits.token_count_max
        if request.mode not in MODES:
            raise InvalidRequest(f"mode {request.mode!r:.40} is none of {', '.join(MODES)}")
        if request.token_count > most:
            raise Exhausted(f"{request.token_count} tokens in one request: raise limits.token_count_max ({most})")
        if not 0 <= request.reusable_tokens <= request.token_count:
            raise InvalidRequest(
                f"reusable_token_count {request.reusable_tokens} must be in 0..{request.token_count}, the prompt's"
            )
        if len(request.query.digests) * spec.chunk_tokens > request.token_count:
            raise InvalidRequest(
                f"{len(request.query.digests)} digests name more than the prompt's {request.token_count} tokens: only "
                f"whole chunks of {spec.chunk_tokens} are planned"
            )
        if request.step_tokens > TOKENS_MAX:
            raise InvalidRequest(f"step_tokens {request.step_tokens} must be at most {TOKENS_MAX}")
        if request.query.hidden_only or request.query.hidden_layers:
            raise InvalidRequest("a partial prefill is of the attention cache: leave out hidden_layers")
        if not spec.layers:
            raise InvalidRequest(f"a partial prefill is of a model: {spec.model_id!r} keeps opaque values")

    def _facts(self, request: PrefillRequest, spec: ModelSpec, found: LookupResult) -> LoadFacts:
        tiers = ((each.kind, TierFacts(each.rate, float(each.queued_bytes))) for each in self._parts.meters.tiers)
        ways = request.ways | {Way.PREFILL}
        if self._parts.movement.shared_tiers.tiers and self._here(request.query, found) < found.hit_count:
            ways -= {Way.MEET}  # chunks after a part that only shared tiers have cannot be brought without that part
        known = self.engines.rate(request.query.fingerprint, request.step_tokens)
        return prompt_facts(
            spec, _stored(found, spec.chunk_tokens), token_count=request.token_count,
            reusable_tokens=request.reusable_tokens, compute=request.compute or known,
            link=request.link or ASSUMED[Tier.DRAM], tiers=slowest_tiers(tiers), step_tokens=request.step_tokens,
            ways=ways, terms=request.terms,
        )  # fmt: skip

    def _here(self, query: ChainQuery, found: LookupResult) -> int:
        """Count the leading found chunks that the node has itself."""
        spaces = namespaces_of(self._parts.catalog, query)
        return self._parts.catalog.walk(spaces, query.digests[: found.hit_count]).hit_count

    def _cut(
        self, request: PrefillRequest, spec: ModelSpec, found: LookupResult, plan: LoadPlan | None
    ) -> tuple[int, int, LookupResult]:
        """Cut the ticket to the chunks that the plan loads. Return the first chunk's index, the number of chunks, and
        the lookup with the new ticket."""
        if plan is None or request.mode != "on":
            return 0, found.hit_count, found
        first = -(-plan.chosen.load_start // spec.chunk_tokens)
        stop = min(plan.chosen.load_stop // spec.chunk_tokens, found.hit_count)
        if not first and stop == request.reusable_tokens // spec.chunk_tokens:
            stop = found.hit_count  # a chunk that is computed in any case costs nothing to hold
        if (first, stop) == (0, found.hit_count):
            return first, stop, found
        self._tickets.release(found.ticket)
        if stop <= first:
            return 0, 0, found._replace(ticket=b"", ticket_s=0.0)
        part = request.query._replace(digests=request.query.digests[first:stop])
        held = self._lookups.held(part, request.readers)
        return first, stop - first, found._replace(ticket=held.ticket, ticket_s=held.ticket_s)

    def told(self, fingerprint: bytes, step_tokens: int, outcome: PlanOutcome) -> None:
        """Record the plan of an engine that plans by itself. One of a model that is not registered here, or with
        numbers that no plan has, is ignored."""
        is_sound = outcome.mode in MODES and is_sound_plan(outcome.plan) and 0.0 <= outcome.age_s <= SECONDS_MAX
        if fingerprint not in self._parts.catalog.models or step_tokens > TOKENS_MAX or not is_sound:
            return
        record = PlanRecord(
            next(self._numbers), self._parts.clock.wall() - outcome.age_s, fingerprint,
            self._parts.catalog.models[fingerprint].spec.model_id, step_tokens, outcome.mode, outcome.plan,
            outcome.stored_tokens, PlanState.GIVEN_UP if outcome.is_given_up else PlanState.PLANNED,
        )  # fmt: skip
        self._records.append(record)
        self._parts.counters.add("partial_prefills")
        end = PrefillEnd(outcome.ttft_s or 0.0, outcome.wait_s, outcome.is_given_up)
        if outcome.ttft_s is not None and not outcome.is_given_up:
            if not (0 <= end.ttft_s <= SECONDS_MAX and 0 <= end.wait_s <= SECONDS_MAX):
                return
            record.state, record.end = PlanState.DONE, end
        self._count(record, end)

    def _count(self, record: PlanRecord, end: PrefillEnd) -> None:
        add, plan = self._parts.counters.add, record.plan
        if end.is_given_up:
            add("partial_prefills_given_up")
            return
        if plan is None or plan.prefill.ttft_s > SECONDS_MAX:
            return  # the client's rates are of no engine
        saved_s = plan.prefill.ttft_s - end.ttft_s
        if plan.is_measured and plan.loaded_tokens and saved_s > 0 and record.end is not None:
            add("partial_prefill_saved_milliseconds", int(saved_s * 1e3))
        found = judged(plan, record.mode, end.ttft_s)
        if found is None:
            return
        add("plans_compared")
        add("plans_within_15_percent", int(found.is_within(0.15)))
        add("plans_within_50_percent", int(found.is_within(0.5)))
        add("plan_error_milliseconds", round(found.error_s * 1e3))
        add("plan_foretold_milliseconds", round(found.planned_s * 1e3))
        add("plan_regret_milliseconds", round(found.regret_s * 1e3))
        add("plan_missed_milliseconds", round(found.missed_s * 1e3))


def _is_possible(computed: Prefill, token_count: int, took_s: float) -> bool:
    """Return False for a prefill of more tokens than the prompt has, or of more time than has passed."""
    return computed.new_tokens + computed.context_tokens <= token_count and computed.seconds <= took_s


def _stored(found: LookupResult, chunk_tokens: int) -> Iterator[tuple[int, Tier]]:
    """Give the token count and the tier of each run of the prefix."""
    left = found.hit_count
    for run in found.runs:
        count = min(run.chunk_count, left)
        if not count or run.state is not ChunkState.HIT:
            return
        yield count * chunk_tokens, run.tier
        left -= count
