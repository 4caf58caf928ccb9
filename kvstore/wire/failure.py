"""A failed call on the wire: a status with a message, and the error's fields in the trailing metadata."""

from __future__ import annotations

import json
from collections.abc import Iterable

METADATA_ERROR = "kvstore-error"
"""Trailing metadata key: the failed call's error fields as a JSON object."""


def pack_fields(fields: dict[str, object]) -> str:
    """Return an error's fields as the value of METADATA_ERROR."""
    return json.dumps(fields, default=str, ensure_ascii=True)


def unpack_fields(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, object]:
    """Return the fields that a failed call's trailing metadata tell; none where they tell none, or no JSON object."""
    for key, value in metadata or ():
        if key == METADATA_ERROR:
            try:
                told = json.loads(value)
            except (ValueError, RecursionError):
                return {}
            return told if isinstance(told, dict) else {}
    return {}
