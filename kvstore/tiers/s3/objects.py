"""The names of objects, and how a lane's thread runs a job. Jobs block until all of their work has ended, within a time
limit. Their arguments cross to another process: settings, names, and memory that is lent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.tiers.s3.connection import S3Connection, connection_to
from kvstore.tiers.s3.refusals import Refused, error_of

Result = TypeVar("Result")
VERSION = "v1"
LOOK_S_MAX, READ_S_MAX, WRITE_S_MAX, REMOVE_S_MAX = 10.0, 20.0, 25.0, 20.0
"""A job that takes more seconds than this plus the time for its bytes (``limit_s``) has failed. The limits are shorter
than those of the callers that wait."""


def object_key(settings: S3Settings, storage_key: bytes) -> str:
    """Return the name of a chunk's object in the bucket. A reader knows the storage key and nothing else, so the name
    has nothing else; the header says whose chunk it is."""
    name = storage_key.hex()
    return f"{settings.prefix}/{VERSION}/{name[:2]}/{name}"


def object_place(settings: S3Settings, storage_key: bytes) -> dict[str, str]:
    """Return the arguments of every request on a chunk's object."""
    return {"Key": object_key(settings, storage_key), **bucket_of(settings)}


def bucket_of(settings: S3Settings) -> dict[str, str]:
    """Return the arguments of every request: the bucket, and the owner that it must have."""
    owner = {"ExpectedBucketOwner": settings.expected_owner} if settings.expected_owner else {}
    return {"Bucket": settings.bucket, **owner}


def encryption_of(settings: S3Settings) -> dict[str, str]:
    """Return the arguments of every request that makes an object: the key with which the provider encrypts it."""
    key = settings.sse_kms_key_id
    return {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key} if key else {}


def finished(
    settings: S3Settings, action: str, work: Callable[[S3Connection], Coroutine[Any, Any, Result]], deadline_s: float
) -> Result:
    """Run the work on this process's connection. Raises the endpoint's refusals as the contract's errors. Blocking."""
    try:
        return connection_to(settings).run(work, deadline_s)
    except Refused as refused:
        raise error_of(refused, action) from refused
    except DeadlineExceeded as error:
        raise Unavailable(error.message) from error


def warm_up(settings: S3Settings) -> None:
    """Make this process's client before a call waits for it. Blocking. An error is left to the first call that uses
    it."""
    try:
        connection_to(settings).run(S3Connection.open, LOOK_S_MAX)
    except (Refused, DeadlineExceeded):
        pass  # the first call that uses it meets the same error, and raises it
