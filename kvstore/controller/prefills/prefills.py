"""Partial prefills of one tenant: begun, planned, ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstore.controller.fetches import Lookups, Tickets, namespaces_of
from kvstore.controller.parts import Parts
from kvstore.controller.prefills.engines import EngineRate, Engines
from kvstore.controller.prefills.records import MODES, PlanRecord, PlanState, PrefillEnd, Records
from kvstore.controller.values import ChainQuery, LookupResult
from kvstore.errors import Exhausted, InvalidRequest
from kvstore.planning.loading import ASSUMED, ComputeRate, LoadFacts, LoadPlan, TierFacts, TierRate, Way, plan_loading
from kvstore.planning.loading.facts import prompt_facts, slowest_tiers
from kvstore.seams import Deadline
from kvstore.spec import ChunkState, ModelSpec, Tier

SECONDS_MAX = 3600.0
"""No partial prefill lasts longer: what a client says of a longer one is not believed."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """A prompt of ``token_count`` tokens, of which those from ``reusable_tokens`` on are computed in any case.

    ``query``: its whole chunks. ``readers``: how many fetch by the plan's ticket, as tensor-parallel ranks do.
    ``step_tokens``: rows of one forward pass, 0: all at once. ``ways``: what the engine can do besides plain prefill.
    ``compute`` and ``link``: what the client measured; None: nothing."""

    query: ChainQuery
    token_count: int
    reusable_tokens: int
    readers: int = 1
    step_tokens: int = 0
    ways: frozenset[Way] = frozenset()
    mode: str = "off"
    compute: ComputeRate | None = None
    link: TierRate | None = None


@dataclass(frozen=True, slots=True)
class PlannedPrefill:
    """``found``: what is stored of the prompt, with a ticket for those of its chunks that are to be loaded: so many
    (``chunk_count``) from number ``chunk_first`` on. ``plan`` None: none was asked for."""

    record: PlanRecord
    found: LookupResult
    chunk_first: int
    chunk_count: int
    began_s: float

    @property
    def plan(self) -> LoadPlan | None:
        return self.record.plan


class PartialPrefills:
    """Plans with what the service knows: where chunks lie now, how fast tiers are, what waits for them."""

    def __init__(self, parts: Parts, lookups: Lookups, tickets: Tickets) -> None:
        self._parts = parts
        self._lookups = lookups
        self._tickets = tickets
        self._engines = Engines(parts.catalog)
        self._records = Records()

    async def begin(self, request: PrefillRequest, deadline: Deadline) -> PlannedPrefill:
        """Look a prompt up, plan it, and hold what the plan loads. Raises InvalidRequest for what does not fit
        together; Exhausted past a limit. ``end`` it, or ``drop`` it."""
        began_s = self._parts.clock.monotonic()
        spec = self._parts.catalog.model(request.query.fingerprint).spec
        self._check(request, spec)
        self._parts.counters.add("lookup_calls")
        found = await self._lookups.lookup_wide(request.query, request.readers, deadline)
        try:
            pauses = self._parts.long_work.begin()
            plan = None if request.mode == "off" else plan_loading(self._facts(request, spec, found))
            await pauses.between()  # what was found is held
            first, count, found = self._cut(request, spec, found, plan)
        except BaseException:
            self._tickets.release(found.ticket)
            raise
        record = PlanRecord(
            self._records.number(), self._parts.clock.wall(), request.query.fingerprint, spec.model_id,
            request.step_tokens, request.mode, plan, found.hit_count * spec.chunk_tokens,
        )  # fmt: skip
        self._records.keep(record)
        self._parts.counters.add("partial_prefills")
        return PlannedPrefill(record, found, first, count, began_s)

    def end(self, planned: PlannedPrefill, end: PrefillEnd) -> None:
        """Take note of what a client measured, as far as it can be, and give its ticket back."""
        self.drop(planned)
        record, took_s = planned.record, self._parts.clock.monotonic() - planned.began_s
        if not (0 <= end.wait_s <= SECONDS_MAX and 0 <= end.ttft_s <= SECONDS_MAX):
            return
        record.state = PlanState.GIVEN_UP if end.is_given_up else PlanState.DONE
        computed = end.computed
        if computed is not None and not (computed.is_sound and computed.seconds <= took_s):
            computed = None  # it says that more time went by than did
        record.end = replace(end, computed=computed)
        if computed is not None:
            self._engines.computed(record.fingerprint, record.step_tokens, computed)
            self._parts.served.learn(record.fingerprint, self._engines.rate(record.fingerprint, record.step_tokens))
        self._count(record, end)

    def drop(self, planned: PlannedPrefill) -> None:
        """Give a prefill's ticket back: it has ended, or its client is gone. Idempotent."""
        self._tickets.release(planned.found.ticket)
        if planned.record.state is PlanState.ON_ITS_WAY:
            planned.record.state = PlanState.GONE

    def records(self, count: int) -> Sequence[PlanRecord]:
        """The last ones, the newest first; ``count`` 0: all that are kept."""
        return self._records.last(count)

    @property
    def engine_rates(self) -> tuple[EngineRate, ...]:
        """The compute rates of all engines that reported prefills."""
        return self._engines.rates

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
        if request.query.hidden_only or request.query.hidden_layers:
            raise InvalidRequest("a partial prefill is of the attention cache: leave out hidden_layers")

    def _facts(self, request: PrefillRequest, spec: ModelSpec, found: LookupResult) -> LoadFacts:
        tiers = ((each.kind, TierFacts(each.rate, float(each.queued_bytes))) for each in self._parts.meters.tiers)
        ways = request.ways | {Way.PREFILL}
        if self._parts.movement.shared_tiers.tiers and self._here(request.query, found) < found.hit_count:
            ways -= {Way.MEET}  # what hangs on chunks that only others have cannot be brought without these
        known = self._engines.rate(request.query.fingerprint, request.step_tokens)
        return prompt_facts(
            spec, _stored(found, spec.chunk_tokens), token_count=request.token_count,
            reusable_tokens=request.reusable_tokens, compute=request.compute or known,
            link=request.link or ASSUMED[Tier.DRAM], tiers=slowest_tiers(tiers), step_tokens=request.step_tokens,
            ways=ways,
        )  # fmt: skip

    def _here(self, query: ChainQuery, found: LookupResult) -> int:
        """Return the number of found chunks that the node holds itself."""
        spaces = namespaces_of(self._parts.catalog, query)
        return self._parts.catalog.walk(spaces, query.digests[: found.hit_count]).hit_count

    def _cut(
        self, request: PrefillRequest, spec: ModelSpec, found: LookupResult, plan: LoadPlan | None
    ) -> tuple[int, int, LookupResult]:
        """Return the chunks to load: the index of the first one, their number, and a ticket for them instead of one for
        all."""
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

    def _count(self, record: PlanRecord, end: PrefillEnd) -> None:
        add, plan = self._parts.counters.add, record.plan
        if end.is_given_up:
            add("partial_prefills_given_up")
            return
        if plan is None:
            return
        saved_s = plan.prefill.ttft_s - end.ttft_s
        if plan.is_measured and plan.loaded_tokens and saved_s > 0:
            add("partial_prefill_saved_milliseconds", int(saved_s * 1e3))


def _stored(found: LookupResult, chunk_tokens: int) -> Iterator[tuple[int, Tier]]:
    """Runs of tokens of the prefix, and the tier of each."""
    left = found.hit_count
    for run in found.runs:
        count = min(run.chunk_count, left)
        if not count or run.state is not ChunkState.HIT:
            return
        yield count * chunk_tokens, run.tier
        left -= count
