"""Messages, decoded within their limits. The one place that holds messages to ``limits``: every door reads with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2, remote_pb2
from kvstore.v1alpha import admin_pb2
from kvstore.wire.limits import FIELD_LIMITS, MESSAGE_BYTES, PARTS_MAX, Limit

_SIZED = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


class _Rule(NamedTuple):
    """What is looked at in a field. ``has_inside``: in each of its items, too."""

    limit: Limit
    is_repeated: bool
    is_sized: bool
    has_inside: bool


def decode(kind: Any, data: bytes | memoryview) -> Any:
    """A message of ``kind``, whose fields are within their limits. Raises InvalidRequest naming the field and the
    limit, or for bytes that are no such message.

    Cost: the size before it is decoded, then a look at each field that is set; items of a list are looked at one by
    one only where they have lists or texts of their own.
    """
    name = kind.DESCRIPTOR.full_name
    most = MESSAGE_BYTES[name]
    if len(data) > most:
        raise InvalidRequest(f"{kind.DESCRIPTOR.name}: {len(data)} bytes, at most {most}", field=name, limit=most)
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"{kind.DESCRIPTOR.name}: the message cannot be decoded") from error
    check(message)
    return message


def check(message: Any) -> None:
    """Hold a decoded message to its fields' limits. Raises InvalidRequest."""
    for field, value in message.ListFields():
        rule = _RULES.get(field.full_name)
        if rule is None:
            continue
        limit = rule.limit
        if rule.is_repeated:
            if len(value) > limit.count:
                raise _beyond(field, len(value), "entries", limit.count)
            if rule.is_sized:
                longest = max(map(len, value))
                if longest > limit.size:
                    raise _beyond(field, longest, "bytes in one entry", limit.size)
            elif rule.has_inside:
                for each in value:
                    check(each)
        elif rule.is_sized:
            if len(value) > limit.size:
                raise _beyond(field, len(value), "bytes", limit.size)
        else:
            check(value)


def check_parts(chunk_count: int, part_count: int) -> None:
    """Each is within its limit and both together may not be. Raises InvalidRequest."""
    if chunk_count * part_count > PARTS_MAX:
        raise InvalidRequest(
            f"{chunk_count} digests with {part_count} parts each (hidden_layers): at most {PARTS_MAX} in one request",
            field="digests", limit=PARTS_MAX,
        )  # fmt: skip


def _beyond(field: Any, found: int, what: str, limit: int) -> InvalidRequest:
    name = f"{field.containing_type.name}.{field.name}"
    return InvalidRequest(f"{name}: {found} {what}, at most {limit}", field=name, limit=limit)


def _rules(kind: Any, rules: dict[str, _Rule]) -> bool:
    """Add the rules of a message's fields and of what they hold. Returns whether there is anything to look at."""
    has_rules = False
    for field in kind.fields:
        inner = field.message_type is not None and _rules(field.message_type, rules)
        is_sized = field.type in _SIZED
        if field.is_repeated or is_sized or inner:
            limit = FIELD_LIMITS[field.full_name] if field.is_repeated or is_sized else Limit()
            rules[field.full_name] = _Rule(limit, field.is_repeated, is_sized, inner)
            has_rules = True
    return has_rules


def _all_rules() -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    for module in (cache_pb2, remote_pb2, admin_pb2):
        for kind in module.DESCRIPTOR.message_types_by_name.values():
            if kind.full_name in MESSAGE_BYTES:
                _rules(kind, rules)
    return rules


_RULES = _all_rules()
