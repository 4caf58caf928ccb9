"""Opens what a ticket holds, without a call where the ticket says where that lies, and releases it."""

from __future__ import annotations

from functools import partial

from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.ticket import TICKET_BYTES, TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName
from kvstore_client.planes.prefix import Prefix
from kvstore_client.store.writer import COMMIT_S_MAX


def open_held(context: Context, wanted: Wanted, held: TicketFields) -> Prefix:
    """Open the prefix that a ticket holds. A store that was committed meanwhile is opened like any other prefix."""
    if held.places and not held.is_store:  # first: where places serve, not even the model needs a call
        placed = context.connection.session().open_placed(wanted, held)
        if placed is not None:
            return placed
    session, name = context.ready(held.spec)
    ask = partial(open_prefix, session, wanted, ChainName(name, held.exactness, 0), held.digests)
    if not held.is_store:
        return ask(context.timeout_s, held.ticket)
    try:
        return ask(COMMIT_S_MAX, held.ticket)
    except InvalidRequest:
        return ask(context.timeout_s)


def release(context: Context, ticket: bytes | None) -> None:
    """Release what a ticket holds. ``ticket``: the match's, or the sidecar's own; unknown tickets are ignored."""
    if not ticket:
        return
    identity = ticket if len(ticket) == TICKET_BYTES else TicketFields(ticket).ticket
    with context.or_miss():
        session = context.connection.session()
        request = pb.ReleaseRequest(tickets=[identity])
        session.give_back(partial(session.call, session.cache.Release, request, context.timeout_s))
