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
    """Return the spec as a message, for tickets; do not change it. It is kept, as ``unpacked_spec`` keeps specs: to
    convert and to check 30 layers takes as long as to copy two of them."""
    return spec_to_message(spec)


def unpacked_spec(message: pb.ModelSpec) -> ModelSpec:
    """Return the spec that a ticket brings. Raises InvalidRequest naming the field that is wrong."""
    return _unpacked(message.SerializeToString())


@lru_cache(maxsize=64)
def _unpacked(spec: bytes) -> ModelSpec:
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


def split_digests(digests: bytes) -> list[bytes]:
    """Split digests that travelled as one run."""
    return [digests[start : start + DIGEST_BYTES] for start in range(0, len(digests), DIGEST_BYTES)]


class TicketFields:
    """A ticket, decoded: of a match with hold=True, or of a writer (``is_store``), which has the same fields and more.
    Raises InvalidRequest when the bytes are no ticket."""

    def __init__(self, ticket: bytes) -> None:
        try:
            message = decode(pb.HeldPrefix, ticket)
        except Exception as error:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries") from error
        if not message.ticket or not message.token_count or len(message.digests) % DIGEST_BYTES:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries")
        self.ticket = message.ticket
        self.spec = unpacked_spec(message.spec)
        self.digests = split_digests(message.digests)
        self.exactness = int(message.exactness)
        if self.exactness not in EXACTNESSES:
            raise InvalidRequest("ticket must be the bytes that a match with hold=True carries")
        self.is_store = pb.SharedStore.FromString(ticket).shards > 0
        self.places = message.places
        self.token_count = int(message.token_count)
