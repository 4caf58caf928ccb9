"""Tickets, by which other processes fetch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from kvstore.errors import InvalidRequest
from kvstore.keys import DIGEST_BYTES
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_from_message, spec_to_message
from kvstore.wire.bounds import decode
from kvstore_client.prompt import EXACTNESSES

TICKET_BYTES = 16


@lru_cache(maxsize=64)
def packed_spec(spec: ModelSpec) -> pb.ModelSpec:
    """Return the spec as a message, for tickets; do not change it. It is kept, as those that tickets bring are: to
    convert and to check 30 layers takes as long as to copy two of them."""
    return spec_to_message(spec)


@lru_cache(maxsize=64)
def _unpacked(spec: bytes) -> ModelSpec:
    """Return the spec that a ticket brings. Raises InvalidRequest naming the field that is wrong."""
    return spec_from_message(pb.ModelSpec.FromString(spec))


def pack_ticket(
    ticket: bytes, spec: ModelSpec, digests: list[bytes], exactness: int, token_count: int,
    places: Iterable[pb.ResidentChunk] = (),
) -> bytes:  # fmt: skip
    """Return all that another process needs to fetch by this ticket, as one run of bytes."""
    return pb.HeldPrefix(
        ticket=ticket, spec=packed_spec(spec), digests=b"".join(digests), token_count=token_count, places=places,
        exactness=exactness,  # type: ignore[arg-type]  # the wire's number
    ).SerializeToString()  # fmt: skip


class TicketFields:
    """A ticket, decoded: of a match with hold=True, or of a writer (``is_store``), which has the same fields and more.
    Raises InvalidRequest when the bytes are no ticket."""

    def __init__(self, ticket: bytes) -> None:
        wrong = "ticket must be the bytes of a ticket: a writer's, or that of a match with hold=True"
        try:
            held, store = decode(pb.HeldPrefix, ticket), decode(pb.SharedStore, ticket)
        except Exception as error:
            raise InvalidRequest(wrong) from error
        self.exactness = int(held.exactness)
        is_known = self.exactness in EXACTNESSES and len(held.digests) % DIGEST_BYTES == 0
        if not held.ticket or not held.token_count or not is_known:
            raise InvalidRequest(wrong)
        self.ticket = held.ticket
        self.spec = _unpacked(held.spec.SerializeToString())
        run = held.digests
        self.digests = [run[start : start + DIGEST_BYTES] for start in range(0, len(run), DIGEST_BYTES)]
        self.places = held.places
        self.token_count = int(held.token_count)
        self.hidden_layers = tuple(store.hidden_layers)
        self.shards = int(store.shards)
        self.is_store = self.shards > 0
