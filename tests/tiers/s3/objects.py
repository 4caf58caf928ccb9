"""What lies in a bucket, as others may have written it, and what was asked for."""

from __future__ import annotations

import pytest
import xxhash
from botocore.exceptions import ClientError

from kvstore.chunk import Making
from kvstore.spec import Encoding
from kvstore.tiers.s3.objects import object_key
from tests.contracts.chunks import SMALL, Chunk
from tests.contracts.shared.s3_stand import S3Stand

CHECKSUM_AT = 368


def put_bytes(stand: S3Stand, what: Chunk, data: bytes) -> None:
    stand.put(what.header.storage_key, data)


def bytes_of(what: Chunk, encoding: Encoding = Encoding.RAW) -> bytes:
    way = Making(header=what.header, layout=what.layout, encoding=encoding, sealing=None)
    return b"".join(piece.tobytes() for piece in way.made(what.pieces)[1])


def there(stand: S3Stand, what: Chunk) -> bytes:
    return stand.server.get(object_key(stand.settings, what.header.storage_key))


def with_header(data: bytes, at: int, value: int) -> bytes:
    """A header whose checksum is right, with one u16 of it changed."""
    page = bytearray(data[: SMALL.header_bytes])
    page[at : at + 2] = value.to_bytes(2, "little")
    page[CHECKSUM_AT : CHECKSUM_AT + 16] = bytes(16)
    page[CHECKSUM_AT : CHECKSUM_AT + 16] = xxhash.xxh3_128_digest(page)
    return bytes(page) + data[SMALL.header_bytes :]


def newer(data: bytes) -> bytes:
    return with_header(with_header(data, 8, 2), 10, 2)


def gets(stand: S3Stand) -> list[str]:
    """The ranges that were asked for since the last time."""
    asked = [headers["Range"] for method, _, headers in stand.switches.asked if method == "GET"]
    stand.switches.asked.clear()
    return asked


def archive(stand: S3Stand, key: bytes) -> None:
    """As a bucket's rule does after some days."""
    place = {"Bucket": stand.server.bucket, "Key": object_key(stand.settings, key)}
    data = stand.server.get(place["Key"])
    try:
        stand.server.client.put_object(**place, Body=data, StorageClass="GLACIER")
    except ClientError as error:  # Ceph's gateway refuses a class that its zone does not have
        if error.response["Error"]["Code"] != "InvalidArgument":
            raise
        pytest.skip("this server has no archive")
    if stand.server.client.head_object(**place).get("StorageClass") != "GLACIER":
        pytest.skip("this server has no archive")
