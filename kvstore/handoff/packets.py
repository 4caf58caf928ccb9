"""Converts messages to packets and back. Unknown fields of a packet are ignored."""

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
    """The packet is no JSON object. The peer is disconnected, because its later packets cannot be understood either."""


class FieldPlace(NamedTuple):
    """A field of a message (``field``), and its place in the packet (``name``)."""

    field: str
    name: str
    shape: Shape
    default: Any


def _places(kind: type[Question | Answer]) -> tuple[FieldPlace, ...]:
    hints = get_type_hints(kind, include_extras=True)
    shapes: dict[str, Shape] = {each.name: hints[each.name].__metadata__[0] for each in fields(kind)}
    return tuple(
        FieldPlace(each.name, shapes[each.name].wire or each.name, shapes[each.name], each.default)
        for each in fields(kind)
    )


QUESTIONS: Mapping[str, type[Question]] = {kind.op: kind for kind in get_args(Question)}
ANSWERS: Mapping[str, type[Answer]] = {kind.op: kind for kind in get_args(Answer)}
PLACES: Mapping[type[Any], tuple[FieldPlace, ...]] = {
    kind: _places(kind) for kind in (*get_args(Question), *get_args(Answer))
}
"""The fields of each message, in the order in which its packet has them."""


def encode(message: Question | Answer) -> bytes:
    """Return the message as a packet. Fields that have their defaults are left out."""
    packet: dict[str, Any] = {"op": message.op}
    for place in PLACES[type(message)]:
        value = getattr(message, place.field)
        assert place.shape.allows(value), place.name
        if value != place.default:
            packet[place.name] = value
    return json.dumps(packet).encode()


def decode_question(packet: bytes) -> Question:
    """Return the question in a client's packet. Raises NoPacket; InvalidRequest for an unknown or bad question."""
    return _decode(packet, QUESTIONS)


def decode_answer(packet: bytes) -> Answer:
    """Return the answer in a server's packet. Raises Unavailable for a packet that is no answer of a known release."""
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


def _value(place: FieldPlace, value: Any) -> Any:
    if place.shape.allows(value):
        return _frozen(value)
    if place.default is MISSING:
        raise InvalidRequest(f"{place.name} is {value!r:.40}, but must be {place.shape.wanted}")
    return place.default


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
