"""Reads and writes messages with cache bytes by hand: protobuf would copy the bytes once more on each side.

The last field of such a message is ``data`` (number 15); protobuf encodes the small fields before it. The writer joins
the runs, from where they lie, into the one string that gRPC takes: that is its only copy. The reader returns a view of
the string that gRPC gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes
from kvstore.wire.bounds import decode
from kvstore.wire.limits import RUNS_MAX

ALIGNMENT = 64
PADDING_TAG = 14 << 3 | 2
DATA_TAG = 15 << 3 | 2
FIELD_COUNT_MAX = RUNS_MAX + 64
"""Fields before the data: they are walked one by one."""
_LENGTH_DELIMITED, _VARINT = 2, 0
Message = TypeVar("Message")


def data_message(fields: Any, runs: Sequence[Bytes]) -> bytes:
    """Return one message with ``fields`` (a protobuf message without its data) and, as data, the bytes of ``runs`` back
    to back."""
    prefix = data_prefix(fields, sum(run.size for run in runs))
    return b"".join((prefix, *(run.data for run in runs)))


def data_prefix(fields: Any, byte_count: int) -> bytes:
    """Return the part of a message before its data, padded to a multiple of 64 bytes. ``byte_count``: of the data."""
    head, tail = fields.SerializeToString(), bytes((DATA_TAG,)) + _varint(byte_count)
    gap = -(len(head) + 2 + len(tail)) % ALIGNMENT
    return b"".join((head, bytes((PADDING_TAG, gap)), bytes(gap), tail))


def split_message(kind: type[Message], message: bytes) -> tuple[Message, Bytes]:
    """Return the fields before ``data``, checked against their limits, and a view of ``data``. Raises InvalidRequest
    for bytes that are no such message."""
    place = field_count = 0
    try:
        while place < len(message) and message[place] != DATA_TAG:
            field_count += 1
            if field_count > FIELD_COUNT_MAX:
                raise InvalidRequest(f"a message with data has at most {FIELD_COUNT_MAX} fields before it")
            tag, place = _read_varint(message, place)
            size, after = _read_varint(message, place)
            place = after + (size if tag & 7 == _LENGTH_DELIMITED else 0)
            if tag & 7 not in (_VARINT, _LENGTH_DELIMITED):
                raise ValueError(tag)
        fields: Message = decode(kind, memoryview(message)[:place])
        if place == len(message):
            return fields, np.empty(0, np.uint8)
        size, place = _read_varint(message, place + 1)
    except (IndexError, ValueError) as error:
        raise InvalidRequest("the message cannot be decoded") from error
    if place + size != len(message):
        raise InvalidRequest("the message's data must be its last field, and whole")
    return fields, np.frombuffer(message, np.uint8, size, place)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, place: int) -> tuple[int, int]:
    """Return (value, place after it)."""
    value = shift = 0
    while True:
        byte = message[place]
        value |= (byte & 127) << shift
        place += 1
        if byte < 128:
            return value, place
        shift += 7
        if shift > 63:
            raise ValueError("a varint has at most ten bytes")
