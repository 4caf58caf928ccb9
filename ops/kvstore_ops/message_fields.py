"""Messages as plain values, for JSON that scripts read."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.message import Message


def as_fields(message: Message) -> dict[str, Any]:
    """Return every field by its name in the contract, zeros included: numbers as numbers, bytes as hexadecimal digits,
    as all commands write fingerprints and digests. A message that is not set is left out."""
    return {
        field.name: _whole(field, getattr(message, field.name))
        for field in message.DESCRIPTOR.fields
        if not field.has_presence or message.HasField(field.name)
    }


def _whole(field: Any, value: Any) -> Any:
    if not field.is_repeated:
        return _one(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        of = field.message_type.fields_by_name["value"]
        return {str(key): _one(of, value[key]) for key in value}
    return [_one(field, each) for each in value]


def _one(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return as_fields(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
