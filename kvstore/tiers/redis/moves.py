"""Jobs of byte movers: a chunk's fields between memory and a server. Blocking; each job ends by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvstore.chunk import FIXED_HEADER_BYTES, ChunkHeader, ChunkLayout, Making, StoredSlabs
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes, cut, joined
from kvstore.tiers.redis.access import Server
from kvstore.tiers.redis.line import Line, Sent, on_line
from kvstore.tiers.redis.names import HEADER_FIELD, FieldRead, field_name, fields_of
from kvstore.tiers.redis.packed import command

IN_FLIGHT_COUNT = 2
"""Fields on one line at a time: one on its way, one being made. More only fill the server's memory."""
NEAR_READ_COUNT = 1
"""Fields that are read at a time from a server on this machine, which has those of other lines to send meanwhile. With
two its replies no longer fit into the processor's cache with what movers check there: a tenth slower."""
UNFINISHED_MS = 300_000
"""A write that is not committed by then expires by itself."""
JOB_S_MAX = 20.0
"""No job takes more seconds than this and than the time for its bytes (``limit_s``)."""
Field = tuple[bytes, Sequence[Bytes]]
"""A name, and the memory whose bytes are written there."""


class Written(NamedTuple):
    """A copy's first bytes, which tell it from any other copy, and how many fields and bytes it has."""

    head: bytes
    field_count: int
    byte_count: int


class PartRead(NamedTuple):
    """One read of slabs, whose bytes are those of ``fields``, one after the other."""

    fields: Sequence[FieldRead]
    slabs: StoredSlabs


def read_parts(server: Server, key: bytes, parts: Sequence[PartRead], until_s: float) -> list[bool]:
    """Read parts of one chunk. Returns a flag per part: True when all its strips are right. Raises DataLoss where the
    fields are not there, or are other ones. The bytes are checked while they are in the processor's cache, and a server
    on another machine meanwhile sends the next field."""

    def read(line: Line) -> list[bool]:
        ahead = iter([field.name for part in parts for field in part.fields])
        return [_read_part(line, key, part, ahead) for part in parts]

    return on_line(server, until_s, read)


def _read_part(line: Line, key: bytes, part: PartRead, ahead: Iterator[bytes]) -> bool:
    """Read one part. ``ahead``: the names of fields that are yet to be asked for."""
    room = part.slabs.room()
    targets = cut(room, [field.take for field in part.fields])
    asking = [command(b"ASKING")] if line.server.is_asked else []
    reply_count = 1 + len(asking)
    at_once = NEAR_READ_COUNT if line.server.is_near else IN_FLIGHT_COUNT
    for field, target in zip(part.fields, targets, strict=True):
        for name in islice(ahead, at_once - line.awaited // reply_count):
            line.send([*asking, command(b"HGET", key, name)], reply_count)
        if asking:
            line.reply()
        _take(line, field, target)
    return part.slabs.are_right(room)


def _take(line: Line, field: FieldRead, target: Iterable[Bytes]) -> None:
    if not line.bulk(field.byte_count):
        raise DataLoss("a part of the chunk is gone", reason="gone")
    _drop(line, field.skip)
    for each in target:
        line.fill(each)
    _drop(line, field.byte_count - field.skip - field.take)
    line.end()


def _drop(line: Line, byte_count: int) -> None:
    if byte_count:
        line.fill(np.empty(byte_count, np.uint8))


def write_copy(server: Server, key: bytes, making: Making, pieces: Sequence[Bytes], until_s: float) -> Written:
    """Make a copy of a raw chunk, and write it. An unfinished write expires by itself after a while."""
    header, made = making.made(pieces)
    fields = _fields_with(header, making.layout, made)
    expire = command(b"PEXPIRE", key, b"%d" % UNFINISHED_MS)

    def write(line: Line) -> None:
        for number, (name, memory) in enumerate(fields):
            line.send([*_put(key, name, memory), expire], 2)
            if number + 1 >= IN_FLIGHT_COUNT:
                _heard(line)
        while line.awaited:
            _heard(line)

    on_line(server, until_s, write)
    return Written(made[0][:FIXED_HEADER_BYTES].tobytes(), len(fields), sum(each.size for each in made))


def _fields_with(header: ChunkHeader, layout: ChunkLayout, pieces: Sequence[Bytes]) -> list[Field]:
    """Return the fields of a copy: its packed header, then its body, which is laid out as ``header`` says."""
    spans = fields_of(layout, header.stored)
    parts = cut(joined(pieces[1:]), [span.stop - span.start for span in spans])
    names = [field_name(header.write_id, number, header.stored) for number in range(len(spans))]
    return [(HEADER_FIELD, pieces[:1]), *zip(names, parts, strict=True)]


def _put(key: bytes, name: bytes, memory: Sequence[Bytes]) -> list[Sent]:
    size = sum(each.size for each in memory)
    head = b"*4\r\n$4\r\nHSET\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(name), name, size)
    return [head, *memory, b"\r\n"]


def _heard(line: Line) -> None:
    """Read the two replies for one field: it was written, and its expiry was set."""
    line.reply()
    line.reply()
