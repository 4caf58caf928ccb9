"""Reads a bucket back: its objects, and what their headers say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvstore.chunk import (
    ChunkHeader,
    check_alone,
    is_newer_format,
    is_sealed,
    object_lengths,
    open_alone,
    parse_header,
    shown_header,
)
from kvstore.chunk.header import HEADER_BYTES_MAX
from kvstore.config import S3Settings
from kvstore.errors import DataLoss, Unavailable
from kvstore.seams import EnvelopeRing
from kvstore.tiers.pace import limit_s
from kvstore.tiers.s3.connection import S3Connection, together
from kvstore.tiers.s3.looking import Looked, first_bytes, modified_s
from kvstore.tiers.s3.objects import LOOK_S_MAX, REMOVE_S_MAX, VERSION, Result, bucket_of, finished, object_key
from kvstore.tiers.s3.refusals import ABSENT, CHANGED, ODD, RETRIED, UNCONDITIONAL, UNMATCHED, Refused, told

HEADER_BYTES = 16 << 10
"""Bytes of an object that are read first. A longer header is read again."""
HEADERS_AT_ONCE = 16
WHOLE_BYTES_MAX = 1 << 30
"""A larger object is examined by its header: reading it whole takes this memory."""
SEVERAL_BYTES_MAX = 64 << 20
"""Objects up to this size are read whole ``WHOLE_AT_ONCE`` at a time, larger ones one at a time."""
WHOLE_AT_ONCE = 4
EXAMINE_S_MAX = 600.0
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Pauses before a page of the list, or an object, is asked for again of a store that asks for fewer requests, or fails:
a scan takes hours, and would begin anew."""
_OF_A_LIST = ("Contents", "IsTruncated", "KeyCount", "Name", "NextContinuationToken")
"""Every store's list has some of these."""


class Listed(NamedTuple):
    """One object. ``modified_s``: wall seconds of its write."""

    storage_key: bytes
    etag: str
    byte_count: int
    modified_s: float


@dataclass(frozen=True)
class Examined:
    """The result of examining an object. ``header``: None where it is damaged itself, or was not read. Of a chunk in an
    envelope that was not opened it has only the fields that are shown. ``reason``: why the object is damaged; "newer":
    only a newer release can tell; "archived": its storage class gives no bytes; "gone": it was removed meanwhile;
    empty: it is right as far as it was checked. ``is_too_large``: it was to be read whole, and only its header was.
    ``is_unopened``: it was read whole, and could not be checked, because its envelope's key is missing."""

    listed: Listed
    header: ChunkHeader | None = None
    reason: str = ""
    is_too_large: bool = False
    is_unopened: bool = False


def pages(settings: S3Settings) -> Iterator[tuple[list[Listed], int]]:
    """Yield the chunks' objects, a page at a time, and the number of other objects among them. Blocking. Raises
    PermissionDenied, Unavailable."""
    token = before = ""
    while True:
        page = partial(_patient, partial(_page, settings, token))
        found, others, token = _finished(settings, "read", page, LOOK_S_MAX * 3)
        yield found, others
        if not token:
            return
        if token == before:
            raise Unavailable("tiers.s3: the store gives the same page of its list again and again: see its log")
        before = token


async def _page(settings: S3Settings, token: str, connection: S3Connection) -> tuple[list[Listed], int, str]:
    more = {"ContinuationToken": token} if token else {}
    answer = await connection.ask(
        lambda client: client.list_objects_v2(Prefix=f"{settings.prefix}/{VERSION}/", **bucket_of(settings), **more)
    )
    if answer.keys().isdisjoint(_OF_A_LIST):  # an empty list must not be taken from a page that is none
        raise Refused(ODD)
    found, rows = [], answer.get("Contents", [])
    for row in rows:
        key = storage_key_of(settings, told(row, "Key"))
        if key is not None:
            etag, size, modified = (told(row, part) for part in ("ETag", "Size", "LastModified"))
            found.append(Listed(key, etag, int(size), modified.timestamp()))
    following = answer.get("NextContinuationToken", "")
    if answer.get("IsTruncated") and not following:
        raise Unavailable("tiers.s3: the store ends its list in the middle: see its log")
    return found, len(rows) - len(found), following if answer.get("IsTruncated", True) else ""


def storage_key_of(settings: S3Settings, key: str) -> bytes | None:
    """Return the storage key of the chunk in this object; None: the object is none of ours."""
    try:
        found = bytes.fromhex(key.rpartition("/")[2])
    except ValueError:
        return None
    return found if len(found) == 32 and object_key(settings, found) == key else None


def examine(
    settings: S3Settings, listed: Sequence[Listed], *, whole: bool, ring: EnvelopeRing | None = None
) -> list[Examined]:
    """Examine these objects by their headers, or by all of their bytes. ``ring``: the keys that open envelopes, for the
    latter. Blocking. Raises PermissionDenied, Unavailable."""
    if not whole:
        return _finished(settings, "read", partial(_all, settings, listed, _by_header, HEADERS_AT_ONCE), EXAMINE_S_MAX)
    small = [each for each in listed if each.byte_count <= SEVERAL_BYTES_MAX]
    large = [each for each in listed if each.byte_count > SEVERAL_BYTES_MAX]
    examined = partial(_by_all_bytes, ring or EnvelopeRing())
    found: list[Examined] = []
    for several, at_once in ((small, WHOLE_AT_ONCE), *(([each], 1) for each in large)):
        deadline_s = limit_s(EXAMINE_S_MAX, sum(each.byte_count for each in several))
        found += _finished(settings, "read", partial(_all, settings, several, examined, at_once), deadline_s)
    return found


def delete_objects(settings: S3Settings, listed: Sequence[Listed]) -> list[bool]:
    """Delete these objects. Returns False for each that was stored anew since it was examined: it stays. An object that
    is not there is deleted. Blocking. Raises PermissionDenied, Unavailable."""
    return _finished(settings, "remove", partial(_all, settings, listed, _removed, HEADERS_AT_ONCE), REMOVE_S_MAX)


def _finished(
    settings: S3Settings, action: str, work: Callable[[S3Connection], Coroutine[Any, Any, Result]], deadline_s: float
) -> Result:
    """As ``finished``, with time for the pauses of ``_patient``."""
    return finished(settings, action, work, deadline_s + sum(PAUSES_S))


async def _patient(
    work: Callable[[S3Connection], Coroutine[Any, Any, Result]], connection: S3Connection
) -> Result:  # fmt: skip
    """Do something again after a pause while the store is busy."""
    for pause_s in PAUSES_S:
        try:
            return await work(connection)
        except Refused as refused:
            if refused.code not in RETRIED:
                raise
        await asyncio.sleep(pause_s)
    return await work(connection)


async def _all(
    settings: S3Settings, listed: Sequence[Listed], work: Callable[..., Coroutine[Any, Any, Result]], at_once: int,
    connection: S3Connection,
) -> list[Result]:  # fmt: skip
    """Do the same with each object. What is done again is one object's, not that of all."""
    return await together((_patient(partial(work, settings, each), connection) for each in listed), at_once)


async def _removed(settings: S3Settings, each: Listed, connection: S3Connection) -> bool:
    """Look at the object once more, and delete it on condition that it is still that one. A store may pass over the
    condition, refuse it, or find no ETag that matches, whatever is there: where the object is still the same after a
    refusal, delete it without one. Leave one alone that another node writes at this moment."""
    place = _place(settings, each)
    for condition in ({"IfMatch": each.etag}, {}):
        try:
            if await _is_renewed(place, each, connection):
                return False
            await connection.ask(partial(_delete, {**place, **condition}))
        except Refused as refused:
            if refused.code in ABSENT:
                return True
            if refused.code in CHANGED - UNMATCHED:
                return False
            if refused.code not in UNMATCHED | UNCONDITIONAL:
                raise
        else:
            return True
    return False


async def _delete(place: dict[str, str], client: Any) -> None:
    await client.delete_object(**place)


async def _is_renewed(place: dict[str, str], each: Listed, connection: S3Connection) -> bool:
    answer = await connection.ask(lambda client: client.head_object(**place))
    is_same = told(answer, "ETag").strip('"') == each.etag.strip('"')
    return not is_same or modified_s(answer) > each.modified_s


async def _by_header(settings: S3Settings, each: Listed, connection: S3Connection) -> Examined:
    return _examined(each, await _header(settings, each, connection), _judged)


async def _by_all_bytes(ring: EnvelopeRing, settings: S3Settings, each: Listed, connection: S3Connection) -> Examined:
    """Judge the object here, so that its bytes are free before the next one is read."""
    if each.byte_count > WHOLE_BYTES_MAX:
        return replace(await _by_header(settings, each, connection), is_too_large=True)
    return _examined(each, await _whole(settings, each, connection), partial(_judged_whole, ring))


def _place(settings: S3Settings, each: Listed) -> dict[str, str]:
    return {"Key": object_key(settings, each.storage_key), **bucket_of(settings)}


async def _header(settings: S3Settings, each: Listed, connection: S3Connection) -> Looked | None:
    looked = await first_bytes(_place(settings, each), HEADER_BYTES, connection)
    if looked is None or len(looked.data) < HEADER_BYTES:
        return looked
    wanted = min(object_lengths(looked.data)[0], looked.total_bytes)
    if not HEADER_BYTES < wanted <= HEADER_BYTES_MAX:  # no header is longer: it is damaged
        return looked
    return await first_bytes(_place(settings, each), wanted, connection)


async def _whole(settings: S3Settings, each: Listed, connection: S3Connection) -> Looked | None:
    return await first_bytes(_place(settings, each), max(1, each.byte_count), connection)


def _examined(each: Listed, looked: Looked | None, judged: Callable[[Looked], ChunkHeader | None]) -> Examined:
    """``judged`` returns None for an object that it cannot open. An object that was written anew since it was listed is
    no older than that: a deletion by age leaves it alone."""
    if looked is None:
        return Examined(each, reason="gone")
    each = each._replace(etag=looked.etag or each.etag, modified_s=max(each.modified_s, looked.modified_s))
    if looked.is_archived:
        return Examined(each, reason="archived")
    if is_newer_format(looked.data) and not is_sealed(looked.data):
        return Examined(each, reason="newer")
    header: ChunkHeader | None = None
    try:
        shown = _judged(looked)
        if shown.storage_key != each.storage_key:
            raise DataLoss("another chunk lies where this one should", reason="header")
        header = shown
        opened = judged(looked)
    except DataLoss as error:
        return Examined(each, header, reason=str(error.fields.get("reason", error.message)))
    return Examined(each, opened or header, is_unopened=opened is None)


def _judged(looked: Looked) -> ChunkHeader:
    header = shown_header(looked.data) if is_sealed(looked.data) else parse_header(looked.data)
    if sum(object_lengths(looked.data)) != looked.total_bytes:
        raise DataLoss("the object is not as long as the chunk", reason="truncated")
    return header


def _judged_whole(ring: EnvelopeRing, looked: Looked) -> ChunkHeader | None:
    data = np.frombuffer(looked.data, np.uint8)
    return open_alone(data, ring) if is_sealed(looked.data) else check_alone(data)
