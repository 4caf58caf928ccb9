"""Messages to packets and back. What a packet says besides its message's fields is not read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.handoff.messages import Answer, Question, Shape

PACKET_BYTES_MAX = 65536
Message = TypeVar("Message", Question, Answer)


class NoPacket(InvalidRequest):
    """It is no JSON object: what else comes from such a peer cannot be understood either."""


class Place(NamedTuple):
    """A field of a message, as its packet has it."""

    field: str
    name: str
    shape: Shape
    default: Any


def _places(kind: type[Question | Answer]) -> tuple[Place, ...]:
    hints = get_type_hints(kind, include_extras=True)
    shapes: dict[str, Shape] = {each.name: hints[each.name].__metadata__[0] for each in fields(kind)}
    return tuple(
        Place(each.name, shapes[each.name].wire or each.name, shapes[each.name], each.default) for each in fields(kind)
    )


QUESTIONS: Mapping[str, type[Question]] = {kind.op: kind for kind in get_args(Question)}
ANSWERS: Mapping[str, type[Answer]] = {kind.op: kind for kind in get_args(Answer)}
PLACES: Mapping[type[Any], tuple[Place, ...]] = {
    kind: _places(kind) for kind in (*get_args(Question), *get_args(Answer))
}
"""The fields of each message, in the order in which its packet has them."""


def encode(message: Question | Answer) -> bytes:
    """A packet. Only what differs from a default is said."""
    packet: dict[str, Any] = {"op": message.op}
    for place in PLACES[type(message)]:
        value = getattr(message, place.field)
        assert place.shape.allows(value), place.name
        if value != place.default:
            packet[place.name] = value
    return json.dumps(packet).encode()


def decode_question(packet: bytes) -> Question:
    """Parse a client's packet. Raises NoPacket, and InvalidRequest for what is none of our questions."""
    return _decode(packet, QUESTIONS)


def decode_answer(packet: bytes) -> Answer:
    """Parse a server's packet. Raises Unavailable for what is no answer of any release so far."""
    try:
        return _decode(packet, ANSWERS)
    except InvalidRequest as error:
        raise Unavailable(f"this is no sidecar, or one of another release: {error.message}") from error


def _decode(packet: bytes, kinds: Mapping[str, type[Message]]) -> Message:
    try:
        said = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise NoPacket("hand-off packets are JSON objects") from error
    if not isinstance(said, dict):
        raise NoPacket("hand-off packets are JSON objects")
    operation = said.get("op")
    if not isinstance(operation, str) or operation not in kinds:
        raise InvalidRequest(f"unknown hand-off operation {operation!r:.40}")
    kind = kinds[operation]
    return kind(*(_value(place, said.get(place.name)) for place in PLACES[kind]))


def _value(place: Place, value: Any) -> Any:
    if place.shape.allows(value):
        return _frozen(value)
    if place.default is MISSING:
        raise InvalidRequest(f"{place.name} is {value!r:.40}, but must be {place.shape.wanted}")
    return place.default


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
