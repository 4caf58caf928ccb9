"""The inquiry: what is there of a prompt, asked of the sidecar and of the gate. What is found is held."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvstore.planning import Facts, Holding, Permit, StoredSegment
from kvstore.planning.loading import LoadPlan
from kvstore.planning.permit import ALONE
from kvstore.planning.profile import Origin
from kvstore.spec import MissReason, ModelSpec
from kvstore_client.lookup.match import Match
from kvstore_client.recompute.request import Request

if TYPE_CHECKING:
    from kvstore_client.client import Client


def ask(client: Client, request: Request, tickets: dict[ModelSpec, bytes]) -> Facts:
    """What the model itself has, and the senders of which a profile, or the caller's setting, lets anything through.
    Senders are not asked where nothing of theirs may be reused. ``tickets`` gets those of what was found, by model."""
    receiver = request.runner.spec
    match, loading = _worth_loading(client, request, _lookup(client, request, receiver, tickets), tickets)
    facts = Facts(
        receiver, int(request.tokens.size), request.reusable_token_count, _holding(request, match),
        setting=request.setting, loading=loading,
        is_unavailable=any(chunk.reason is MissReason.UNAVAILABLE for chunk in match.chunks[:1]),
    )  # fmt: skip
    if not facts.allows_lossy:
        return facts
    own = facts.own
    if any(segment.stored_token_count for segment in own.segments):
        own = replace(own, permits=_permits(client, request, None, "position"))
    senders = []
    for sender in request.senders:
        asked = Holding(sender, permits=_permits(client, request, sender, "sibling", "both"))
        if not asked.is_refused:
            found = _holding(request, _lookup(client, request, sender, tickets))
            asked = replace(found, sender=sender, permits=asked.permits)
        senders.append(asked)
    return replace(facts, own=own, senders=tuple(senders))


def _lookup(client: Client, request: Request, spec: ModelSpec, tickets: dict[ModelSpec, bytes]) -> Match:
    match = client.lookup(
        spec, request.tokens, hold=True, extras=request.extras, segments=request.segments, preamble=request.preamble
    )  # fmt: skip
    if match.ticket:
        tickets[spec] = match.ticket
    return match


def _worth_loading(
    client: Client, request: Request, match: Match, tickets: dict[ModelSpec, bytes]
) -> tuple[Match, LoadPlan | None]:
    """Of the model's own prefix as much as is loaded sooner than computed, by the client's planner; all of it where
    that is off, and where something may be reused behind it."""
    planner, spec, tokens = client.planner, request.runner.spec, request.tokens
    if planner.mode == "off" or not match or request.segments or request.senders or request.extras:
        return match, None
    plan = planner.plan(spec, match, int(tokens.size), request.reusable_token_count, 0)
    whole = min(match.prefix_token_count, request.reusable_token_count) // spec.chunk_tokens * spec.chunk_tokens
    stop = plan.chosen.load_stop
    if planner.mode == "observe" or stop >= whole:
        return match, plan
    client.release_ticket(tickets.pop(spec, None))
    if not stop:
        return replace(match, prefix_token_count=0, ticket=None), plan
    again = client.lookup(spec, tokens[:stop], hold=True)
    if again.ticket:
        tickets[spec] = again.ticket
    return again, plan


def _holding(request: Request, match: Match) -> Holding:
    stood_at = int(request.preamble.size)
    segments = [
        StoredSegment(segment.token_start, segment.token_stop, segment.standalone_token_count, stood_at)
        for segment in match.segments
    ]
    return Holding(None, match.prefix_token_count, tuple(segments))


def _permits(client: Client, request: Request, sender: ModelSpec | None, *reuses: str) -> tuple[Permit, ...]:
    """None where the caller gave the setting."""
    if request.setting is not None:
        return ()
    behind = Origin.PREAMBLE if request.preamble.size else None
    return tuple(
        client.gate.permit(request.runner.spec, sender, reuse, behind if reuse in ALONE else None) for reuse in reuses
    )
