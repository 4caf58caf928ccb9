"""What a ticket holds: opens it, and releases it."""

from __future__ import annotations

from functools import partial

from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.ticket import TICKET_BYTES, TicketFields
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.prefix import Prefix
from kvstore_client.planes.session import ClientSession
from kvstore_client.store.writer import COMMIT_S_MAX


def open_held(session: ClientSession, wanted: Wanted, name: bytes, held: TicketFields, timeout_s: float) -> Prefix:
    """Open the prefix that a ticket holds. A store that was committed meanwhile is opened like any other prefix."""
    if held.is_store:
        try:
            return open_prefix(session, wanted, name, held.digests, held.exactness, COMMIT_S_MAX, held.ticket)
        except InvalidRequest:
            return open_prefix(session, wanted, name, held.digests, held.exactness, timeout_s)
    placed = session.open_placed(wanted, held) if held.places else None
    return placed or open_prefix(session, wanted, name, held.digests, held.exactness, timeout_s, held.ticket)


def release(context: Context, ticket: bytes | None) -> None:
    """Release what a ticket holds. ``ticket``: the match's, or the sidecar's own; unknown tickets are ignored."""
    if not ticket:
        return
    identity = ticket if len(ticket) == TICKET_BYTES else TicketFields(ticket).ticket
    with context.or_miss():
        session = context.connection.session()
        request = pb.ReleaseRequest(tickets=[identity])
        session.give_back(partial(session.call, session.cache.Release, request, context.timeout_s))
