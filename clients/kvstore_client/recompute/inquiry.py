"""The inquiry: asks the sidecar and the gate which caches a prompt may reuse, and holds those found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

from kvstore.planning import Facts, Holding, Permit, StoredSegment
from kvstore.planning.loading import LoadPlan, Way
from kvstore.planning.loading.facts import IN_MEMORY
from kvstore.planning.permit import ALONE
from kvstore.planning.profile import Origin
from kvstore.spec import ChunkState, Exactness, ModelSpec
from kvstore_client.caches import Caches
from kvstore_client.loading.call import Asked, PrefillCall
from kvstore_client.loading.patience import prior_s, result_in_time, with_budget
from kvstore_client.loading.planner import ENGINE_WAYS, Planner
from kvstore_client.lookup.match import Match, SegmentMatch, chunk_matches, stored_places, unknown_chunks
from kvstore_client.prompt import Prompt
from kvstore_client.recompute.request import Request

Answer = TypeVar("Answer")
ANSWER_S_MIN = 1.0
"""The least seconds that the sidecar has for an answer: a client that is not connected yet connects first."""


@dataclass
class Held:
    """The chunks that an inquiry holds for the fetches after it. ``tickets``: one per model. ``call``: the partial
    prefill at the sidecar; None: it was not asked to plan. ``own``: the stored part of the model's own prefix, where
    it is weighed against other caches; None: it was cut to what is worth loading. ``is_silent``: the sidecar did not
    answer in time, so that nothing more is asked for this prompt: each further question would cost as much."""

    tickets: dict[ModelSpec, bytes] = field(default_factory=dict)
    call: PrefillCall | None = None
    own: Match | None = None
    is_silent: bool = False


@dataclass(frozen=True)
class _Own:
    """The stored part of the model's own prefix, from ``load_start`` on, as far as it is worth loading."""

    match: Match
    loading: LoadPlan | None = None
    load_start: int = 0


def ask(client: Caches, request: Request, held: Held, *, in_memory: bool = False) -> Facts:
    """Return the stored caches of the model itself, and of senders whose reuse a profile, or the caller's setting,
    permits. Senders without a permit are not looked up. ``held`` gets the tickets of what was found.
    ``in_memory``: look only at what is in memory now of the prefix and of documents. With segments and senders
    ``weighed`` says what of all this is worth loading."""
    receiver = request.runner.spec
    own = _in_memory(client, request, held) if in_memory else _planned(client, request, held)
    facts = Facts(
        receiver, int(request.tokens.size), request.reusable_token_count, _holding(request, own.match),
        setting=request.setting, loading=own.loading, load_start=own.load_start,
        is_unavailable=not own.match.is_answered,
    )  # fmt: skip
    if in_memory or not facts.allows_lossy:
        return facts
    asked = facts.own
    if any(segment.stored_token_count for segment in asked.segments):
        asked = replace(asked, permits=_permits(client, request, None, "position"))
    senders = []
    for sender in request.senders:
        told = Holding(sender, permits=_permits(client, request, sender, "sibling", "both"))
        if not told.is_refused:
            found = _holding(request, _lookup(client, request, sender, held))
            told = replace(found, sender=sender, permits=told.permits)
        senders.append(told)
    return replace(facts, own=asked, senders=tuple(senders))


def _lookup(client: Caches, request: Request, spec: ModelSpec, held: Held) -> Match:
    look = partial(
        client.lookup, spec, request.tokens, hold=True, extras=request.extras, segments=request.segments,
        preamble=request.preamble,
    )  # fmt: skip
    return _held(client, request, spec, held, look)


def _held(client: Caches, request: Request, spec: ModelSpec, held: Held, look: Callable[[], Match]) -> Match:
    """Return what a lookup finds, whose ticket ``held`` gets in the place of one that it had."""
    match = answer_in_time(client, request, held, look, lambda late: client.release_ticket(late.ticket))
    if match is None:
        return _unanswered(request, spec)
    try:
        if match.ticket:
            held.tickets[spec] = match.ticket
        else:
            held.tickets.pop(spec, None)
    except BaseException:  # an interrupt, while specs are compared: nobody else knows of the ticket
        client.release_ticket(match.ticket)
        raise
    return match


def _unanswered(request: Request, spec: ModelSpec) -> Match:
    return Match(0, unknown_chunks(spec.chunk_tokens, 0, int(request.tokens.size)), is_answered=False)


def plain_s(client: Caches, request: Request) -> float:
    """Return what a plain prefill takes; of an engine that has measured none, what a slow one would take."""
    runner, count = request.runner, int(request.tokens.size)
    return client.planner.prefill_s(runner.spec, count, 0) or prior_s(runner.spec, count, runner.device.type)


def answer_in_time(
    client: Caches, request: Request, held: Held, question: Callable[[], Answer], undo: Callable[[Answer], object]
) -> Answer | None:
    """Return the sidecar's answer. Where plans are carried out, one that stands still is not waited for much longer
    than a plain prefill takes, and once for a prompt: None, and ``undo`` gets an answer that comes later."""
    if client.planner.mode_under(request.terms) != "on":
        return question()
    if held.is_silent:
        return None
    answer = result_in_time(question, max(ANSWER_S_MIN, with_budget(plain_s(client, request))), undo)
    if answer is None:
        held.is_silent = True
        client.planner.given_up()
    return answer


def give_back(client: Caches, request: Request, held: Held, tickets: Sequence[bytes]) -> None:
    """Release tickets. Where plans are carried out a sidecar that stands still is not waited for: no answer depends on
    it."""

    def release() -> bool:
        for each in tickets:
            client.release_ticket(each)
        return True

    if client.planner.mode_under(request.terms) != "on":
        release()
    elif result_in_time(release, 0.0 if held.is_silent else ANSWER_S_MIN, lambda _: None) is None:
        held.is_silent = True


def end_s_max(client: Caches, request: Request, timeout_s: float) -> float:
    """Return the seconds for which transfers that were stopped are waited for: no answer depends on it, either."""
    return ANSWER_S_MIN if client.planner.mode_under(request.terms) == "on" else timeout_s


def _planned(client: Caches, request: Request, held: Held) -> _Own:
    """Return the model's own prefix, as far as it is worth loading: by the sidecar's plan, or by this client's where
    all of it shows in shared memory. With segments and senders all of it: the sidecar knows no plan of these."""
    if request.segments or request.senders:
        held.own = _lookup(client, request, request.runner.spec, held)
        return _Own(held.own)
    seen = client.peek(request.runner.spec, request.tokens, extras=request.extras)
    if seen is not None and all(each.tier in IN_MEMORY for each in seen.chunks if each.state is ChunkState.HIT):
        return _worth_loading(client, request, held)
    return _by_call(client, request, held) or _worth_loading(client, request, held)


def _by_call(client: Caches, request: Request, held: Held) -> _Own | None:
    """Return the prefix by the sidecar's plan; None: it makes none. While it is gone nothing is stored."""
    planner, spec, step = client.planner, request.runner.spec, request.runner.spec.chunk_tokens
    mode = planner.mode_under(request.terms)
    prompt = Prompt.of(spec, request.tokens, request.extras, Exactness.EXACT)
    with planner.or_miss():
        asked = Asked(request.reusable_token_count, 0, _ways(spec), mode, terms=request.terms)
        undo = partial(_take_back, client)
        begun = answer_in_time(client, request, held, partial(_begun, planner, prompt, asked), undo)
        if begun is None:
            return _Own(_unanswered(request, spec))
        held.call, match = begun
        if held.call is None:
            return None
        plan = held.call.plan
        if match is None:
            chunks = chunk_matches(held.call.answer.found.runs, step, 0, prompt.token_count)
            return _Own(Match(0, chunks), plan)  # the call's end releases whatever the sidecar holds
        if match.ticket:
            held.tickets[spec] = match.ticket
        first, count = held.call.answer.chunk_first, held.call.answer.chunk_count
        if count < held.call.answer.found.hit_count:
            match = replace(match, prefix_token_count=(first + count) * step)
        return _Own(match, plan, first * step)
    return _Own(_unanswered(request, spec))


_Begun: TypeAlias = tuple[PrefillCall | None, Match | None]


def _begun(planner: Planner, prompt: Prompt, asked: Asked) -> _Begun:
    """Begin a partial prefill, and return it with what it found. No call: the sidecar makes none. No match: nothing of
    it is loaded."""
    call = planner.begin(prompt, asked)
    if call is None:
        return None, None
    plan, mode = call.plan, asked.mode
    if mode == "on" and plan is not None and plan.chosen.way is Way.PREFILL:
        return call, None
    try:
        return call, planner.found(prompt, call)
    except BaseException:
        call.close()  # nobody else knows of it
        raise


def _take_back(client: Caches, begun: _Begun) -> None:
    """Give back what came too late."""
    call, match = begun
    if call is not None:
        call.close()
    if match is not None:
        client.release_ticket(match.ticket)


def _ways(spec: ModelSpec) -> frozenset[Way]:
    """Return the plans that this library's pass over the layers can carry out. K and V that are projected from E have
    to begin the prompt."""
    return ENGINE_WAYS if spec.keeps_e else ENGINE_WAYS | {Way.MEET}


def _worth_loading(client: Caches, request: Request, held: Held) -> _Own:
    """Return the prefix by this client's plan; all of it where planning is off."""
    planner, spec, tokens = client.planner, request.runner.spec, request.tokens
    match, mode = _lookup(client, request, spec, held), planner.mode_under(request.terms)
    if mode == "off" or not match or request.extras:
        return _Own(match)
    plan = planner.plan(spec, match, int(tokens.size), request.reusable_token_count, 0, terms=request.terms)
    whole = min(match.prefix_token_count, request.reusable_token_count) // spec.chunk_tokens * spec.chunk_tokens
    stop = plan.chosen.load_stop
    if mode == "observe" or stop >= whole:
        return _Own(match, plan)
    return _Own(prefix_cut(client, request, held, match, stop), plan)


def _in_memory(client: Caches, request: Request, held: Held) -> _Own:
    """Return the prefix that is in the sidecar's memory now, and the documents of which all that is stored is there."""
    match = _lookup(client, request, request.runner.spec, held)
    match = replace(match, segments=tuple(filter(_lies_in_memory, match.segments)))
    stop = 0
    for chunk in match.chunks:
        if chunk.state is not ChunkState.HIT or chunk.tier not in IN_MEMORY:
            break
        stop = chunk.token_stop
    return _Own(match if stop >= match.prefix_token_count else prefix_cut(client, request, held, match, stop))


def _lies_in_memory(segment: SegmentMatch) -> bool:
    return all(chunk.tier in IN_MEMORY for chunk in segment.chunks if chunk.state is ChunkState.HIT)


def prefix_cut(client: Caches, request: Request, held: Held, match: Match, stop: int) -> Match:
    """Hold the first ``stop`` tokens instead of all that was found."""
    spec, ticket = request.runner.spec, held.tickets.get(request.runner.spec)
    if not stop:
        if ticket:
            give_back(client, request, held, [ticket])
        held.tickets.pop(spec, None)
        return replace(match, prefix_token_count=0, ticket=None)

    def look() -> Match:
        client.release_ticket(ticket)
        return client.lookup(spec, request.tokens[:stop], hold=True, extras=request.extras)

    return _held(client, request, spec, held, look)


def _holding(request: Request, match: Match) -> Holding:
    stood_at = int(request.preamble.size)
    segments = [
        StoredSegment(
            segment.token_start, segment.token_stop, segment.standalone_token_count, stood_at,
            tuple(stored_places(segment.chunks, segment.token_start + segment.standalone_token_count)),
        )
        for segment in match.segments
    ]  # fmt: skip
    places = tuple(stored_places(match.chunks, match.prefix_token_count))
    return Holding(None, match.prefix_token_count, tuple(segments), places=places)


def _permits(client: Caches, request: Request, sender: ModelSpec | None, *reuses: str) -> tuple[Permit, ...]:
    """Return the gate's permits; none where the caller gave the setting."""
    if request.setting is not None:
        return ()
    behind = Origin.PREAMBLE if request.preamble.size else None
    return tuple(
        client.gate.permit(
            request.runner.spec, sender, reuse, behind if reuse in ALONE else None, floor=request.terms.quality
        )
        for reuse in reuses
    )
