"""Lookups: by a call, or in shared memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import Exhausted
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.fetch.held import release
from kvstore_client.fetch.ticket import pack_ticket
from kvstore_client.lookup.match import Match, chunk_matches, unknown_chunks
from kvstore_client.lookup.presence import LookupAnswer
from kvstore_client.lookup.tails import first_held, longest_tail, peeked_tail
from kvstore_client.prompt import Prompt
from kvstore_client.segments.known import KnownSegments
from kvstore_client.segments.runs import matched


def peek(context: Context, prompt: Prompt, *, hold: bool) -> Match | None:
    """See ``Client.peek``."""
    if not prompt.digests:
        return Match(0, ())
    session, name = context.connection.at_hand(prompt.spec) or (None, b"")
    if session is None or session.presence is None:
        return None
    seen = session.presence.answer([prompt.chain(name, prompt.digests)], int(hold))
    if seen is None:
        return None
    step, count = prompt.spec.chunk_tokens, prompt.token_count
    prefix = min(seen.hit_count * step, count)
    tail = peeked_tail(session.presence, name, prompt, prefix, seen)
    if tail is None or (hold and prefix + tail[0]):
        return None
    return Match(prefix + tail[0], chunk_matches(seen.runs, step, 0, count))


def look_up(
    context: Context, prompt: Prompt, readers: int, cut: Sequence[tuple[range, Prompt]], known: KnownSegments
) -> Match:  # fmt: skip
    """See ``Client.lookup``. ``readers`` 0: nothing is held; ``cut``: the prompt's segments."""
    if not prompt.digests:
        return Match(0, ())
    with context.or_miss():
        return _look_up(context, prompt, readers, cut, known)
    chunks = unknown_chunks(prompt.spec.chunk_tokens, 0, prompt.token_count)
    return Match(0, chunks, segments=matched(cut, (), 0, known), is_answered=False)


def _look_up(
    context: Context, prompt: Prompt, readers: int, cut: Sequence[tuple[range, Prompt]], known: KnownSegments
) -> Match:  # fmt: skip
    step, count = prompt.spec.chunk_tokens, prompt.token_count
    reply = _ask(context, prompt, readers, [each for _, each in cut])
    prefix, held = with_tail(context, prompt, reply, readers)
    try:
        chunks = chunk_matches(reply.runs, step, 0, count)
        return Match(prefix, chunks, held, matched(cut, reply.segments, prefix, known))
    except BaseException:  # an interrupt, for one: nobody else knows of the ticket
        release(context, held)
        raise


def with_tail(
    context: Context, prompt: Prompt, found: pb.LookupResponse | LookupAnswer, readers: int
) -> tuple[int, bytes | None]:
    """Return the tokens found, and a ticket for all of them where there are ``readers``. Beyond the whole chunks, they
    include the partial chunk behind these where a stored one matches the prompt. Releases the ticket that the new one
    replaces, and both when it raises. What shared memory showed has no ticket yet: one call gets it where the partial
    chunk matches."""
    hits, ticket, places = found.hit_count, found.ticket, found.places
    digests, longer = prompt.digests[:hits], None
    prefix = _token_count(prompt, hits)
    try:
        tail = longest_tail(
            prompt, prefix, hits, found,
            lambda names: first_held(*context.ready(prompt.spec), prompt, (), context.timeout_s, names),
        )  # fmt: skip
        longer = _call(context, prompt, [*digests, tail[1]], readers) if tail and readers else None
    except BaseException as error:
        if not (hits and readers) or not isinstance(error, Exhausted):
            release(context, ticket)  # nobody else knows of it
            raise
        tail = None  # the limit may have room for the whole chunks, or for one ticket, not for two at a time
    if tail and longer:
        if longer.hit_count > hits:
            release(context, ticket)
            ticket, digests, places = longer.ticket, [*digests, tail[1]], longer.places
        else:
            release(context, longer.ticket)
            tail = None
    if hits and readers and not ticket:
        whole = _call(context, prompt, digests, readers)
        ticket, digests, places = whole.ticket, digests[: whole.hit_count], whole.places
        prefix = _token_count(prompt, whole.hit_count)
    prefix += tail[0] if tail else 0
    try:
        return prefix, pack_ticket(ticket, prompt.spec, digests, prompt.exactness, prefix, places) if ticket else None
    except BaseException:
        release(context, ticket)
        raise


def _token_count(prompt: Prompt, hit_count: int) -> int:
    return min(hit_count * prompt.spec.chunk_tokens, prompt.token_count)


def _ask(
    context: Context, prompt: Prompt, readers: int, segments: Sequence[Prompt]
) -> pb.LookupResponse | LookupAnswer:  # fmt: skip
    session, name = context.ready(prompt.spec)
    if session.presence is not None:
        chains = [each.chain(name, each.digests) for each in (prompt, *segments)]
        seen = session.presence.answer(chains, readers)
        if seen is not None:
            if readers and seen.hit_count:  # the call that holds the hits counts them, and nothing else
                hits = sum(each.hit_count for each in seen.segments)
                chunks = sum(len(each.digests) for each in chains) - seen.hit_count
                session.presence.count(lookup_hit_chunks=hits, lookup_miss_chunks=chunks - hits)
            return seen
    return _call(context, prompt, prompt.digests, readers, segments)


def _call(
    context: Context, prompt: Prompt, digests: Sequence[bytes], readers: int, segments: Sequence[Prompt] = ()
) -> pb.LookupResponse:  # fmt: skip
    session, name = context.ready(prompt.spec)
    query = prompt.query(name, digests)
    queries = [each.query(name, each.digests) for each in segments]
    request = pb.LookupRequest(
        query=query, hold=readers > 0, readers=readers, segments=queries,
        with_places=readers > 0 and session.maps_chunks,
    )  # fmt: skip
    reply: pb.LookupResponse = session.call(session.cache.Lookup, request, context.timeout_s)
    return reply
