"""Converts specs, plans and rates to messages and back. This package is shared, because server and client must convert
alike and the client must not import the server's package."""

from kvstore.wire.failure import METADATA_ERROR, pack_fields, unpack_fields
from kvstore.wire.spec import spec_from_message, spec_to_message

METADATA_SESSION = "kvstore-session-bin"
"""Metadata key of a call's session secret (32 bytes)."""
METADATA_TOKEN = "authorization"  # noqa: S105 - the key, not a token
"""Metadata key of a remote call's bearer token."""

__all__ = [
    "METADATA_ERROR",
    "METADATA_SESSION",
    "METADATA_TOKEN",
    "pack_fields",
    "spec_from_message",
    "spec_to_message",
    "unpack_fields",
]
