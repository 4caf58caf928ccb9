"""Where objects lie, and how a lane's thread has something done with them. Jobs block until all of it has ended, within
a bound; their arguments cross to another process: settings, names, and memory that is lent."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.tiers.s3.connection import Connection, connection_to
from kvstore.tiers.s3.refusals import Refused, error_of

Result = TypeVar("Result")
VERSION = "v1"
LOOK_S_MAX, READ_S_MAX, WRITE_S_MAX, REMOVE_S_MAX = 10.0, 20.0, 25.0, 20.0
"""A job that takes longer has failed. Those who wait are told before they give up."""


def object_key(settings: S3Settings, storage_key: bytes) -> str:
    """Where a chunk lies in the bucket. Whoever asks knows the storage key and nothing else, so nothing else is in it;
    whose it is its header says."""
    name = storage_key.hex()
    return f"{settings.prefix}/{VERSION}/{name[:2]}/{name}"


def place_of(settings: S3Settings, storage_key: bytes) -> dict[str, str]:
    """What every request on a chunk's object says."""
    return {"Key": object_key(settings, storage_key), **bucket_of(settings)}


def bucket_of(settings: S3Settings) -> dict[str, str]:
    """What every request says: the bucket, and whose it has to be."""
    owner = {"ExpectedBucketOwner": settings.expected_owner} if settings.expected_owner else {}
    return {"Bucket": settings.bucket, **owner}


def finished(
    settings: S3Settings, action: str, work: Callable[[Connection], Coroutine[Any, Any, Result]], deadline_s: float
) -> Result:
    """Blocking. The work on this process's connection; the endpoint's refusals as the contract's errors."""
    try:
        return connection_to(settings).run(work, deadline_s)
    except Refused as refused:
        raise error_of(refused, action) from refused
    except DeadlineExceeded as error:
        raise Unavailable(error.message) from error


def warm_up(settings: S3Settings) -> None:
    """Blocking. Have a client in this process before anybody waits for it. What is wrong is said by who uses it."""
    try:
        connection_to(settings).run(Connection.open, LOOK_S_MAX)
    except (Refused, DeadlineExceeded):
        pass  # whoever uses it meets the same, and says so
