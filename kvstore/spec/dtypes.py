"""Cache dtypes by name, with their size in bytes. Names are torch's; the bytes are little-endian."""

from __future__ import annotations

from kvstore.errors import InvalidRequest

DTYPES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def item_size(dtype: str) -> int:
    """Bytes per element. Raises InvalidRequest for a dtype no cache uses."""
    try:
        return DTYPES[dtype]
    except KeyError:
        raise InvalidRequest(f"cache dtype {dtype!r} is unknown; use one of {', '.join(DTYPES)}", dtype=dtype) from None
