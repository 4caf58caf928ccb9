"""Every error kvstore raises, sorted by what the caller does next. A miss is a value, never an error.

    KVStoreError
    ├── InvalidRequest      fix the call               INVALID_ARGUMENT
    ├── Unauthenticated     connect again, or get a token   UNAUTHENTICATED
    ├── PermissionDenied    ask for the right          PERMISSION_DENIED
    ├── Unavailable         retry; meanwhile recompute UNAVAILABLE
    ├── DeadlineExceeded    recompute                  DEADLINE_EXCEEDED
    ├── Exhausted           back off                   RESOURCE_EXHAUSTED
    ├── DataLoss            recompute; the chunk is gone or quarantined   DATA_LOSS
    └── Internal            report it                  INTERNAL

Each class maps to exactly one gRPC status name (``status``); ``from_status`` converts a status back.
Context travels as fields (``error.fields``), so that logs and clients need not parse the message.
"""

from __future__ import annotations

from typing import ClassVar


class KVStoreError(Exception):
    """Base of the tree: a message that names the setting or value that is wrong, and fields for machines."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, /, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields


class InvalidRequest(KVStoreError):
    """The call itself is wrong; the same call will fail again."""

    status = "INVALID_ARGUMENT"


class Unauthenticated(KVStoreError):
    """The session, token or id is unknown to the server; connect again."""

    status = "UNAUTHENTICATED"


class PermissionDenied(KVStoreError):
    """The caller is known and may not do this."""

    status = "PERMISSION_DENIED"


class Unavailable(KVStoreError):
    """The service cannot be reached or is stopping; retry later, recompute meanwhile."""

    status = "UNAVAILABLE"


class DeadlineExceeded(KVStoreError):
    """The answer did not come in time; recompute."""

    status = "DEADLINE_EXCEEDED"


class Exhausted(KVStoreError):
    """A limit is reached; back off. The message names the limit's setting."""

    status = "RESOURCE_EXHAUSTED"


class DataLoss(KVStoreError):
    """Bytes that were announced are gone or failed their check; recompute."""

    status = "DATA_LOSS"


class Internal(KVStoreError):
    """A bug of ours; report it."""

    status = "INTERNAL"


UNREGISTERED = "unregistered"
"""A field of the error for a call that names a model which the server does not know: the model's fingerprint, in
hexadecimal digits. A client that finds it registers the model again and repeats the call."""


def not_registered(fingerprint: bytes) -> InvalidRequest:
    """Return the error for a call that names a model which was not registered, or is forgotten."""
    told = "this model is not registered with this server: call RegisterModel first"
    return InvalidRequest(told, **{UNREGISTERED: fingerprint.hex()})


ERRORS: tuple[type[KVStoreError], ...] = (
    InvalidRequest,
    Unauthenticated,
    PermissionDenied,
    Unavailable,
    DeadlineExceeded,
    Exhausted,
    DataLoss,
    Internal,
)

_BY_STATUS: dict[str, type[KVStoreError]] = {error.status: error for error in ERRORS}
_FOREIGN_STATUS: dict[str, type[KVStoreError]] = {
    "CANCELLED": Unavailable,
    "ABORTED": Unavailable,
    "NOT_FOUND": InvalidRequest,
    "ALREADY_EXISTS": InvalidRequest,
    "FAILED_PRECONDITION": InvalidRequest,
    "OUT_OF_RANGE": InvalidRequest,
    "UNIMPLEMENTED": InvalidRequest,
    "UNKNOWN": Internal,
}


def from_status(status: str, message: str, /, **fields: object) -> KVStoreError:
    """Return the error for any gRPC status name. A status that only gRPC itself produces gets the nearest class."""
    cls = _BY_STATUS.get(status) or _FOREIGN_STATUS.get(status, Internal)
    return cls(message, **fields)
