"""The hand-off's packets: what each may say, and how much of it.

Who asks for an operation that is not here, or says a value that is none of its field's, is refused by name. What a
packet says besides is not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvstore.errors import InvalidRequest, KVStoreError

PACKET_BYTES_MAX = 65536
REGIONS_MAX = 64
"""Regions per packet, each with its descriptor; the kernel's own limit is 253."""
COUNTED_MAX = 1 << 32
"""Of a counter in one packet: counters are 64 bits on the wire."""
NUMBER_MAX = (1 << 62) - 1
MESSAGE_CHARACTERS_MAX = 500
"""Refusals quote what was sent; this bounds how much of it goes back."""
COUNTED = ("lookup_calls", "lookup_hit_chunks", "lookup_miss_chunks", "fetch_calls", "fetch_miss_chunks")
"""What clients do without a call, by our counters' names."""


class Number(NamedTuple):
    """A whole number from 0."""

    most: int = NUMBER_MAX

    def allows(self, value: object) -> bool:
        return type(value) is int and 0 <= value <= self.most


class Text(NamedTuple):
    """At most so many characters."""

    most: int

    def allows(self, value: object) -> bool:
        return isinstance(value, str) and len(value) <= self.most


class Rows(NamedTuple):
    """A list of at most so many entries: short texts, or runs of two numbers."""

    most: int

    def allows(self, value: object) -> bool:
        return isinstance(value, list) and len(value) <= self.most


Shape = Number | Text | Rows

REQUESTS: Mapping[str, Mapping[str, Shape]] = {
    "hello": {"version": Number()},
    "regions": {"have": Number()},
    "staging": {"bytes": Number()},
    "staging_close": {"staging_id": Number()},
    "presence": {},
    "looked_up": {name: Number(COUNTED_MAX) for name in COUNTED},
}
REPLIES: Mapping[str, Mapping[str, Shape]] = {
    "welcome": {
        "session": Number(), "secret": Text(64), "server_pid": Number(), "generations_bytes": Number(),
        "regions": Rows(REGIONS_MAX), "offers": Rows(8),
    },
    "regions": {"regions": Rows(REGIONS_MAX)},
    "staging": {"staging_id": Number(), "bytes": Number()},
    "ok": {},
    "presence": {"bytes": Number(), "token_count_max": Number(), "tail_tokens_max": Number()},
    "error": {"status": Text(32), "message": Text(MESSAGE_CHARACTERS_MAX)},
}  # fmt: skip


def decode(packet: bytes) -> dict[str, Any]:
    """A request. Raises InvalidRequest for what is no JSON object: nobody knows where such a peer is."""
    try:
        request = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("hand-off packets are JSON objects") from error
    if not isinstance(request, dict):
        raise InvalidRequest("hand-off packets are JSON objects")
    return request


def operation_of(request: dict[str, Any]) -> str:
    """What is asked for. Raises InvalidRequest for what is none of our operations."""
    operation = request.get("op")
    if not isinstance(operation, str) or operation not in REQUESTS:
        raise InvalidRequest(f"unknown hand-off operation {operation!r:.40}")
    return operation


def number(request: dict[str, Any], name: str) -> int:
    """A field of a request. Raises InvalidRequest when it is no number within its limit."""
    shape, value = REQUESTS[request["op"]][name], request.get(name)
    if not shape.allows(value):
        raise InvalidRequest(f"{name} must be a whole number up to {shape.most}, not {value!r:.40}")
    return int(value)  # type: ignore[arg-type]  # it is one


def encode(reply: dict[str, Any]) -> bytes:
    """A reply, which says what its kind says and no more of it than it may."""
    shapes = REPLIES[reply["op"]]
    assert reply.keys() == {"op", *shapes}, reply["op"]
    assert all(shape.allows(reply[name]) for name, shape in shapes.items()), reply["op"]
    return json.dumps(reply).encode()


def refusal(error: KVStoreError) -> dict[str, Any]:
    return {"op": "error", "status": error.status, "message": error.message[:MESSAGE_CHARACTERS_MAX]}
