"""Writes chunks into objects, and removes objects."""

from __future__ import annotations

import asyncio
import base64
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from kvstore.chunk import Making
from kvstore.config import S3Settings
from kvstore.errors import PermissionDenied, Unavailable
from kvstore.seams.memory import Bytes, joined
from kvstore.tiers.pace import limit_s
from kvstore.tiers.s3.bodies import Body, ranges_of
from kvstore.tiers.s3.connection import S3Connection, together
from kvstore.tiers.s3.depth import HEAD_COUNT_MAX
from kvstore.tiers.s3.objects import REMOVE_S_MAX, WRITE_S_MAX, encryption_of, finished, object_place
from kvstore.tiers.s3.refusals import ABSENT, CHANGED, UNCONDITIONAL, Refused, told

MULTIPART_BYTES = 64 << 20
PART_BYTES = 16 << 20
PART_COUNT_MAX = 9000
PARTS_AT_ONCE = 4
ABORT_S_MAX = 5.0
UploadPart = tuple[Sequence[Bytes], str]
"""Memory, and its CRC32 in base64."""
Condition = Mapping[str, str]
"""The condition on the object that is there: IfNoneMatch "*", IfMatch with an ETag, or nothing."""


def write_object(
    settings: S3Settings, storage_key: bytes, making: Making, pieces: Sequence[Bytes], condition: Condition
) -> int:
    """Make a copy of a raw chunk, and put it there. Returns its bytes; 0: the condition does not hold, so another node
    put one there meanwhile. Blocking. Raises PermissionDenied, Exhausted, Unavailable."""
    runs = joined(making.made(pieces)[1])
    total = sum(run.size for run in runs)
    part_bytes = max(PART_BYTES, -(-total // PART_COUNT_MAX))
    parts = [runs] if total <= MULTIPART_BYTES else ranges_of(runs, part_bytes)
    bodies: list[UploadPart] = [(part, _crc32(part)) for part in parts]
    put = _put_whole if len(parts) == 1 else _put_parts
    work = partial(_put, put, settings, object_place(settings, storage_key), bodies, condition)
    return total if finished(settings, "write", work, limit_s(WRITE_S_MAX, total)) else 0


def condition_of(replaced: str, refused: str) -> Condition:
    """Return the condition for replacing the object with the ETag ``replaced``; empty: for a new object. ``refused``:
    the ETag that the store has just refused as not there. Where both are the same, the store never finds a match
    (Ceph's gateway compares the quotes, too): then damage is overwritten without a condition."""
    if not replaced:
        return {"IfNoneMatch": "*"}
    return {} if replaced == refused else {"IfMatch": replaced}


def request_count_of(byte_count: int) -> int:
    """Return the number of requests that writing ``byte_count`` bytes takes."""
    return 1 if byte_count <= MULTIPART_BYTES else 2 + -(-byte_count // PART_BYTES)


def _crc32(runs: Sequence[Bytes]) -> str:
    checksum = 0
    for run in runs:
        checksum = zlib.crc32(run.data, checksum)
    return base64.b64encode(checksum.to_bytes(4, "big")).decode()


async def _put(
    put: Callable[..., Coroutine[Any, Any, None]], settings: S3Settings, place: dict[str, str],
    bodies: list[UploadPart], condition: Condition, connection: S3Connection,
) -> bool:  # fmt: skip
    options = encryption_of(settings)
    sent_with = condition if connection.is_conditional else {}
    try:
        try:
            await put(place, bodies, sent_with, options, connection)
        except Refused as refused:
            if refused.code not in UNCONDITIONAL or not sent_with:  # others may have been refused meanwhile
                raise
            await put(place, bodies, {}, options, connection)
            connection.is_conditional = False  # now that it is known that no other part of the request was refused
    except Refused as refused:
        if refused.code in CHANGED or ("IfMatch" in condition and refused.code in ABSENT):
            return False
        raise
    return True


async def _put_whole(
    place: dict[str, str], bodies: list[UploadPart], condition: Condition, options: dict[str, str],
    connection: S3Connection,
) -> None:  # fmt: skip
    [(runs, checksum)] = bodies
    answer = await connection.ask(
        lambda client: client.put_object(
            Body=Body(runs), ContentLength=len(Body(runs)), ChecksumCRC32=checksum, **condition, **options, **place
        )
    )
    told(answer, "ETag")  # else a login page has taken the bytes


async def _put_parts(
    place: dict[str, str], bodies: list[UploadPart], condition: Condition, options: dict[str, str],
    connection: S3Connection,
) -> None:  # fmt: skip
    """Write the object in parts. However it ends, no part is left behind: stores bill for parts."""
    begun = await connection.ask(
        lambda client: client.create_multipart_upload(ChecksumAlgorithm="CRC32", **options, **place)
    )
    upload = {"UploadId": told(begun, "UploadId"), **place}

    async def send(number: int, runs: Sequence[Bytes], checksum: str) -> dict[str, Any]:
        sent = await connection.ask(
            lambda client: client.upload_part(
                Body=Body(runs), ContentLength=len(Body(runs)), PartNumber=number, ChecksumCRC32=checksum, **upload
            )
        )
        return {"PartNumber": number, "ETag": told(sent, "ETag"), "ChecksumCRC32": checksum}

    try:
        parts = await together((send(number, *body) for number, body in enumerate(bodies, 1)), PARTS_AT_ONCE)
        whole = {"MultipartUpload": {"Parts": parts}, **condition, **upload}
        told(await connection.ask(lambda client: client.complete_multipart_upload(**whole)), "ETag")
    except BaseException:
        await _abort(upload, connection)
        raise


async def _abort(upload: dict[str, str], connection: S3Connection) -> None:
    try:
        async with asyncio.timeout(ABORT_S_MAX):
            await connection.ask(lambda client: client.abort_multipart_upload(**upload))
    except (Refused, TimeoutError):
        pass  # the bucket's rule for incomplete uploads clears it


def remove_objects(settings: S3Settings, storage_keys: Sequence[bytes]) -> None:
    """Remove objects. An object that is not there is no error. Blocking. Raises Unavailable."""
    places = [object_place(settings, each) for each in storage_keys]
    try:
        finished(settings, "remove", partial(_remove_all, places), REMOVE_S_MAX)
    except PermissionDenied as error:
        raise Unavailable(error.message) from error


async def _remove_all(places: Sequence[dict[str, str]], connection: S3Connection) -> None:
    """Remove the objects at these places. Raises Refused."""

    async def remove(place: dict[str, str]) -> None:
        try:
            await connection.ask(lambda client: client.delete_object(**place))
        except Refused as refused:
            if refused.code not in ABSENT:
                raise

    await together(map(remove, places), HEAD_COUNT_MAX)
