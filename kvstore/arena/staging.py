"""Staging memory: one session may write it and the server reads it once."""

from __future__ import annotations

from kvstore.errors import InvalidRequest
from kvstore.seams.memory import Bytes, Mapping


class Staging:
    """One staging memfd of a session. The client may change it at any time: the server copies the bytes it needs once
    and trusts only its copy."""

    def __init__(self, staging_id: int, mapping: Mapping, byte_count: int) -> None:
        self.staging_id = staging_id
        self.mapping = mapping
        self.byte_count = byte_count

    def run(self, offset: int, byte_count: int) -> Bytes:
        """Return a view of ``byte_count`` bytes at ``offset``. Raises InvalidRequest when they leave the mapping."""
        if offset < 0 or byte_count < 0 or offset + byte_count > self.byte_count:
            raise InvalidRequest(
                f"staging run {offset}+{byte_count} lies outside its {self.byte_count} bytes",
                staging_id=self.staging_id,
            )
        return self.mapping.bytes[offset : offset + byte_count]
