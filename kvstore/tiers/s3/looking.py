"""Reads an object's first bytes, and finds out which chunks are probably there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from kvstore.chunk import ChunkLayout
from kvstore.config import S3Settings
from kvstore.seams.memory import Bytes
from kvstore.tiers.pace import limit_s
from kvstore.tiers.s3.bodies import pour
from kvstore.tiers.s3.connection import S3Connection, connection_to
from kvstore.tiers.s3.depth import are_there
from kvstore.tiers.s3.objects import LOOK_S_MAX, READ_S_MAX, finished, object_place
from kvstore.tiers.s3.refusals import (
    ABSENT,
    ARCHIVED,
    DENIED,
    NO_BUCKET,
    ODD,
    TOO_SHORT,
    WORDLESS,
    Refused,
    error_of,
    told,
)

ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
PARTIAL = 206
"""The HTTP status of an answer that is a range."""
RESTORED = 'ongoing-request="false"'
"""An archived object has its bytes again for a while."""


class Looked(NamedTuple):
    """The first bytes of an object, its ETag, and its length. ``is_ahead``: the bytes that follow were read, too.
    ``is_archived``: an object is there, and its storage class gives none of its bytes. ``modified_s``: wall seconds of
    its write, 0 where the answer does not tell."""

    data: bytes
    etag: str
    total_bytes: int
    is_ahead: bool = False
    is_archived: bool = False
    modified_s: float = 0.0


def look(settings: S3Settings, storage_key: bytes, byte_count: int, ahead: Sequence[Bytes] = ()) -> Looked | None:
    """Return the first ``byte_count`` bytes, fewer where the object is shorter; None: it is not there. ``ahead`` is
    filled with the bytes that follow, unless the object is shorter. Blocking. Raises PermissionDenied, perhaps because
    the object is not there; Unavailable."""
    work = partial(first_bytes, object_place(settings, storage_key), byte_count, ahead=ahead)
    deadline_s = limit_s(READ_S_MAX, sum(piece.size for piece in ahead)) if ahead else LOOK_S_MAX
    return finished(settings, "read", work, deadline_s)


async def first_bytes(
    place: dict[str, str], byte_count: int, connection: S3Connection, ahead: Sequence[Bytes] = ()
) -> Looked | None:
    """See ``look``. Raises Refused."""
    stop = byte_count + sum(piece.size for piece in ahead)

    async def request(client: Any) -> Looked:
        answer = await client.get_object(Range=f"bytes=0-{stop - 1}", **place)
        length = int(told(answer, "ContentLength"))
        is_ahead = bool(ahead) and length >= stop
        data = np.zeros(min(byte_count, length), np.uint8)
        async with answer["Body"] as body:
            await pour(body, [data, *ahead] if is_ahead else [data], client.meta.config.read_timeout)
        whole = answer.get("ContentRange", "").rpartition("/")[2]
        if not whole.isdecimal() and answer["ResponseMetadata"]["HTTPStatusCode"] == PARTIAL:
            raise Refused(ODD)  # else a part would be taken for the whole of a damaged object
        total_bytes = int(whole if whole.isdecimal() else length)
        return Looked(data.tobytes(), told(answer, "ETag"), total_bytes, is_ahead, modified_s=modified_s(answer))

    try:
        return await connection.ask(request)
    except Refused as refused:
        if refused.code in ABSENT:
            return None
        if refused.code == ARCHIVED:
            return Looked(b"", "", 0, is_archived=True)
        if refused.code not in TOO_SHORT:
            raise
    empty = await connection.ask(lambda client: client.head_object(**place))  # an empty object has no range
    return Looked(b"", told(empty, "ETag"), int(told(empty, "ContentLength")), modified_s=modified_s(empty))


def modified_s(answer: Mapping[str, Any]) -> float:
    """Return the wall seconds of an object's write; 0 where the answer does not tell."""
    return float(answer["LastModified"].timestamp()) if "LastModified" in answer else 0.0


class Probed(NamedTuple):
    """A flag per key, True when it is probably there, None when it is in an archive; the number of requests; whether
    reads were denied; and whether the answers prove that the bucket is there."""

    answers: list[bool | None]
    request_count: int
    is_denied: bool
    is_bucket_seen: bool


def probe_objects(
    settings: S3Settings, storage_keys: Sequence[bytes], chains: Sequence[int], timeout_s: float, asks_bucket: bool
) -> Probed:
    """Ask which of these are probably there. ``asks_bucket``: where none is, ask whether the bucket is. Blocking.
    Raises DeadlineExceeded; Unavailable, also where there is no such bucket."""
    try:
        return connection_to(settings).run(partial(_probe, settings, storage_keys, chains, asks_bucket), timeout_s)
    except Refused as refused:
        raise error_of(refused, "read") from refused


async def _probe(
    settings: S3Settings, storage_keys: Sequence[bytes], chains: Sequence[int], asks_bucket: bool,
    connection: S3Connection,
) -> Probed:  # fmt: skip
    async def is_there(storage_key: bytes) -> bool | None:
        return await _is_there(object_place(settings, storage_key), connection)

    answers, count = await are_there(storage_keys, is_there, chains)
    is_seen = any(each is not False for each in answers)
    if asks_bucket and not is_seen:
        is_seen, count = await _is_bucket_told(object_place(settings, storage_keys[0]), connection), count + 1
    return Probed(answers, count, connection.hides and not any(answers), is_seen)


def ask_for_bucket(settings: S3Settings, storage_key: bytes) -> bool:
    """Ask as ``_is_bucket_told`` does. Blocking. Raises Unavailable."""
    return finished(settings, "read", partial(_is_bucket_told, object_place(settings, storage_key)), LOOK_S_MAX)


async def _is_bucket_told(place: dict[str, str], connection: S3Connection) -> bool:
    """Ask for the first byte of an object that is probably not there. Return False when the answer says nothing of the
    bucket, as while the endpoint is overloaded; True when it says nothing against it. That is a denial, too: whoever
    may not list is told no more. Raises Refused where there is no such bucket."""
    try:
        await connection.ask(partial(_first_byte, place), is_urgent=True)
    except Refused as refused:
        if refused.code == NO_BUCKET:
            raise
        return refused.code in ABSENT | TOO_SHORT | DENIED or refused.status == 403
    return True


async def _is_there(place: dict[str, str], connection: S3Connection) -> bool | None:
    """Return True when an object is there; None when it is in an archive, so that nothing may rest on it. Without the
    right to list, a request for an absent object is denied: a miss like any other. A login page has no ETag: Refused is
    raised for it, because operators' moves give up the node's copies where a HEAD finds an object."""
    try:
        answer = await connection.ask(lambda client: client.head_object(**place), is_urgent=True)
        told(answer, "ETag")
    except Refused as refused:
        if refused.code in ABSENT or (refused.code == "403" and connection.hides):
            return False
        if refused.code not in WORDLESS:
            raise
    else:
        return None if _is_archived(answer) else True
    try:  # a GET's refusal says why
        await connection.ask(partial(_first_byte, place), is_urgent=True)
    except Refused as refused:
        if refused.code in ABSENT | TOO_SHORT:
            return refused.code in TOO_SHORT
        if refused.code not in DENIED:
            raise
        connection.was_denied()
        return False
    return True


def _is_archived(answer: Mapping[str, Any]) -> bool:
    """Return True when a HEAD's answer says that a GET would give no bytes."""
    is_away = answer.get("StorageClass") in ARCHIVES or "ArchiveStatus" in answer
    return is_away and RESTORED not in str(answer.get("Restore", ""))


async def _first_byte(place: dict[str, str], client: Any) -> None:
    answer = await client.get_object(Range="bytes=0-0", **place)
    async with answer["Body"] as body:
        await body.read()


@dataclass(eq=False, slots=True)
class RawGuesses:
    """Guesses whether a chunk is raw: then its slabs are read with its header. A wrong guess costs a request. Models
    have encodings of their own, so each layout's last chunk tells; before it, the last of any. ``is_raw``: before all.
    """

    is_raw: bool
    _by_layout: WeakKeyDictionary[ChunkLayout, bool] = field(default_factory=WeakKeyDictionary)

    def of(self, layout: ChunkLayout) -> bool:
        """Return True when the next chunk with this layout is probably raw."""
        return self._by_layout.get(layout, self.is_raw)

    def saw(self, layout: ChunkLayout, *, is_raw: bool) -> None:
        """Count an opened chunk."""
        self.is_raw = self._by_layout[layout] = is_raw
