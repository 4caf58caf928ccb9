"""Decodes messages within their limits. This is the one place that enforces ``limits``: every door decodes with it."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kvstore.errors import InvalidRequest
from kvstore.v1 import cache_pb2, remote_pb2
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.limits import FIELD_LIMITS, MESSAGE_BYTES, PARTS_MAX, Limit

_SIZED = (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING)


class _Rules(NamedTuple):
    """The checks of one kind of message. Both lists begin with the tightest limit.

    A field cannot be longer than its message, and a list cannot have more entries than its message has bytes. So most
    fields of a message of usual length need no check. That matters: each look at a field costs time, and a look at
    4 KiB of digests copies them.
    """

    fields: list[tuple[int, str, int, int]]
    """For each field with a limit: the longest message (bytes) in which it cannot exceed its limit, its name, its
    limit's count and size."""
    inside: list[tuple[int, str, bool, _Rules]]
    """For each field that holds messages: the same length, its name, whether it is a list, and the messages' rules."""

    @property
    def room(self) -> int:
        """Bytes of the longest message in which no field can exceed its limit."""
        return min(each[0] for each in (*self.fields, *self.inside))


def decode(kind: Any, data: bytes | memoryview) -> Any:
    """Return a message of ``kind`` whose fields are within their limits. Raises InvalidRequest naming the field and the
    limit, or for bytes that are no such message.

    Cost: a check of the size before decoding, then a look at each field that could exceed its limit in a message of
    that size. Items of a list are looked at one by one only where they have such fields of their own.
    """
    most, rules = _KINDS[kind]
    if len(data) > most:
        name = kind.DESCRIPTOR
        raise InvalidRequest(f"{name.name}: {len(data)} bytes, at most {most}", field=name.full_name, limit=most)
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise InvalidRequest(f"{kind.DESCRIPTOR.name}: the message cannot be decoded") from error
    _check(message, rules, len(data))
    return message


def _check(message: Any, rules: _Rules, byte_count: int) -> None:
    """Check the fields of a message. ``byte_count``: bytes of the whole message that it is part of. Raises
    InvalidRequest."""
    for room, name, count, size in rules.fields:
        if byte_count <= room:
            break
        value = getattr(message, name)
        found = len(value)
        if not count:
            if found > size:
                raise _beyond(message, name, found, "bytes", size)
        elif found:
            if found > count:
                raise _beyond(message, name, found, "entries", count)
            if size and (longest := max(map(len, value))) > size:
                raise _beyond(message, name, longest, "bytes in one entry", size)
    for room, name, is_list, inner in rules.inside:
        if byte_count <= room:
            break
        if is_list:
            entries = getattr(message, name)
            if entries:  # a loop over an empty list takes longer than this check
                for each in entries:
                    _check(each, inner, byte_count)
        elif message.HasField(name):
            _check(getattr(message, name), inner, byte_count)


def check_parts(chunk_count: int, part_count: int) -> None:
    """Check the number of chunks times parts of a request, whose factors are within their limits already. Raises
    InvalidRequest."""
    if chunk_count * part_count > PARTS_MAX:
        raise InvalidRequest(
            f"{chunk_count} digests with {part_count} parts each (hidden_layers): at most {PARTS_MAX} in one request",
            field="digests", limit=PARTS_MAX,
        )  # fmt: skip


def _beyond(message: Any, field: str, found: int, what: str, limit: int) -> InvalidRequest:
    name = f"{message.DESCRIPTOR.name}.{field}"
    return InvalidRequest(f"{name}: {found} {what}, at most {limit}", field=name, limit=limit)


def _rules(kind: Any) -> _Rules:
    """Return the rules of a message's fields and of the messages in them."""
    rules = _Rules([], [])
    for field in kind.fields:
        if field.is_repeated or field.type in _SIZED:
            limit = FIELD_LIMITS[field.full_name]
            rules.fields.append((_room(field, limit), field.name, limit.count, limit.size))
        if field.message_type is not None:
            inner = _rules(field.message_type)
            if inner.fields or inner.inside:
                rules.inside.append((inner.room, field.name, field.is_repeated, inner))
    rules.fields.sort(key=itemgetter(0))
    rules.inside.sort(key=itemgetter(0))
    return rules


def _room(field: Any, limit: Limit) -> int:
    """Return the bytes of the longest message in which the field cannot exceed its limit, even if it fills all of
    it."""
    has_lengths = field.type in _SIZED or field.message_type is not None
    entries_bytes = limit.count * (2 if has_lengths else 1)  # an empty entry is a tag and a length, a number one byte
    return min(each for each in (entries_bytes, limit.size) if each)


def _kinds() -> Iterator[tuple[Any, tuple[int, _Rules]]]:
    for module in (cache_pb2, remote_pb2, admin_pb2, prefill_pb2):
        for kind in module.DESCRIPTOR.message_types_by_name.values():
            if kind.full_name in MESSAGE_BYTES:
                yield GetMessageClass(kind), (MESSAGE_BYTES[kind.full_name], _rules(kind))


_KINDS = dict(_kinds())
"""Message class -> the bytes that it may have, and its rules; for every message that is decoded."""
