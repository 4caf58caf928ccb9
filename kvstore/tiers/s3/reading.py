"""An opened chunk in an object: runs of its slabs are read into memory, each verified before a caller sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import is_not
from typing import Any, Protocol

from kvstore.chunk import ChunkHeader, ChunkLayout, StoredSlabs, slab_range, wrong_slabs
from kvstore.config import S3Settings
from kvstore.errors import DataLoss
from kvstore.seams.memory import Bytes
from kvstore.tiers.contract import Buffer, host_memory
from kvstore.tiers.pace import limit_s
from kvstore.tiers.s3.bodies import pour, ranges_of
from kvstore.tiers.s3.connection import S3Connection, together
from kvstore.tiers.s3.objects import READ_S_MAX, finished, object_place
from kvstore.tiers.s3.refusals import ABSENT, CHANGED, ODD, Refused, told


class ObjectReader(Protocol):
    """The tier as an open chunk sees it."""

    async def run_read(self, byte_count: int, function: Callable[..., Any], *args: object) -> Any:
        """Run a function on a lane of the tier's. Raises as in the contract."""

    async def run_check(self, function: Callable[..., Any], *args: object) -> Any:
        """Run a function on a lane that makes no request."""

    def was_read(self, byte_count: int) -> None: ...

    def was_damaged(self, storage_key: bytes, etag: str) -> None: ...


class S3Chunk:
    """An open chunk: a name, and the ETag that each of its ranges must have. ``ahead``: memory that the leading slabs
    were read into with the header, and that is not checked yet."""

    def __init__(
        self, owner: ObjectReader, settings: S3Settings, header: ChunkHeader, layout: ChunkLayout, etag: str,
        ahead: Sequence[Bytes] = (),
    ) -> None:  # fmt: skip
        self.header = header
        self._owner = owner
        self._settings = settings
        self._layout = layout
        self._etag = etag
        self._ahead = ahead

    async def read(self, slabs: range, target: Sequence[Buffer]) -> None:
        """See ``StoredChunk.read``."""
        memory = host_memory(target)
        stored = StoredSlabs.of(self.header, self._layout, slabs, memory)
        if self._takes_ahead(slabs, memory):
            self._settle(slabs, await self._owner.run_check(settle_ahead, stored))
        else:
            await self._fetch(slabs, stored)

    async def check(self, slabs: range) -> None:
        """As ``read``, without handing out the bytes. One range after the other: a whole chunk at once would take its
        bytes of a mover's memory, and a thread and connections from readers for as long as all of it takes."""
        for part in parts_of(self._layout, slabs, self._settings.range_bytes):
            await self._fetch(part, StoredSlabs.of(self.header, self._layout, part))

    async def _fetch(self, slabs: range, stored: StoredSlabs) -> None:
        place = (self._settings, self.header.storage_key, self._etag)
        offset = self.header.bytes_before(self._layout)
        offset += slab_range(self.header, self._layout, slabs.start, slabs.stop)[0]
        self._settle(slabs, await self._owner.run_read(stored.byte_count, read_object, *place, offset, stored))

    def _takes_ahead(self, slabs: range, memory: Sequence[Bytes]) -> bool:
        """Return True when these slabs were read with the header into this memory. Only once, because an envelope is
        opened in its place: a second read fetches them anew."""
        ahead = self._ahead
        if slabs.start or len(ahead) != len(memory) or any(map(is_not, ahead, memory)):
            return False
        self._ahead = ()
        return True

    def _settle(self, slabs: range, is_good: bool) -> None:
        if not is_good:
            self._owner.was_damaged(self.header.storage_key, self._etag)
            raise wrong_slabs(slabs, "of the object")
        self._owner.was_read(sum(self._layout.slabs[slab].byte_count for slab in slabs))

    def close(self) -> None:
        """Do nothing: an open object holds no resources."""


def parts_of(layout: ChunkLayout, slabs: range, byte_count: int) -> Iterator[range]:
    """Yield these slabs in order, as many at a time as have ``byte_count`` bytes, and one at least."""
    start, size = slabs.start, 0
    for slab in slabs:
        size += layout.slabs[slab].byte_count
        if size > byte_count and slab > start:
            yield range(start, slab)
            start, size = slab, layout.slabs[slab].byte_count
    yield range(start, slabs.stop)


def read_object(settings: S3Settings, storage_key: bytes, etag: str, offset: int, stored: StoredSlabs) -> bool:
    """Read slabs, which begin at ``offset`` of the object. Returns True when all strips are right. Blocking. Raises
    DataLoss where another object is there now, or none; Unavailable."""
    room = stored.room()
    _fill(settings, storage_key, etag, offset, room)
    return stored.are_right(room)


def settle_ahead(stored: StoredSlabs) -> bool:
    """As ``read_object``, of slabs that were read into their target with the header. Blocking."""
    return stored.are_right(stored.target)


def _fill(settings: S3Settings, storage_key: bytes, etag: str, offset: int, target: Sequence[Bytes]) -> None:
    place = object_place(settings, storage_key)
    deadline_s = limit_s(READ_S_MAX, sum(piece.size for piece in target))
    finished(settings, "read", partial(_fill_all, settings, place, etag, offset, target), deadline_s)


async def _fill_all(
    settings: S3Settings,
    place: dict[str, str],
    etag: str,
    offset: int,
    target: Sequence[Bytes],
    connection: S3Connection,
) -> None:
    requests = []
    for pieces in ranges_of(target, settings.range_bytes):
        requests.append(connection.ask(partial(_fill_range, place, etag, offset, pieces)))
        offset += sum(piece.size for piece in pieces)
    try:
        await together(requests, settings.reader_count)
    except Refused as refused:
        if refused.code in ABSENT:
            raise DataLoss("the object is gone", reason="absent") from refused
        if refused.code in CHANGED:
            raise DataLoss("another object lies there by now", reason="replaced") from refused
        raise


async def _fill_range(place: dict[str, str], etag: str, start: int, pieces: Sequence[Bytes], client: Any) -> None:
    stop = start + sum(piece.size for piece in pieces)
    answer = await client.get_object(Range=f"bytes={start}-{stop - 1}", IfMatch=etag, **place)
    async with answer["Body"] as body:
        if told(answer, "ETag") != etag:  # the store ignores conditions
            raise Refused("PreconditionFailed", 412)
        if int(told(answer, "ContentLength")) != stop - start:
            if "ContentRange" not in answer:  # the whole object: the range was lost on the way
                raise Refused(ODD)
            raise DataLoss("the object ends before the chunk does", reason="truncated")
        await pour(body, pieces, client.meta.config.read_timeout)
