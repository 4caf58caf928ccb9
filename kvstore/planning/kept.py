"""The form of files that keep knowledge over restarts: one JSON object with a format, a version, and a digest of the
content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.planning.profile import parsed


@dataclass(frozen=True)
class KeptForm:
    """The form of one kind of file. ``field``: where the content stands in the object. ``said``: the content in
    words."""

    name: str
    version: int
    field: str
    said: str

    def pack(self, content: Mapping[str, Any]) -> bytes:
        """Return the bytes that ``unpack`` reads. ``content``: plain values. A NaN or an infinity among them makes
        ``unpack`` refuse the file: knowledge is lost then, but the service that keeps it goes on."""
        whole = {"format": self.name, "version": self.version, self.field: content, "digest": digest_of(content)}
        return json.dumps(whole).encode() + b"\n"

    def unpack(self, data: bytes) -> dict[str, Any]:
        """Return the content. Its values are what a file said: check them. Raises InvalidRequest for a changed byte,
        another format, or another version."""
        try:
            found = parsed(data.decode(), f"the file of {self.said}")
        except UnicodeDecodeError as error:
            raise InvalidRequest("it is no text") from error
        if not isinstance(found, dict) or found.get("format") != self.name or found.get("version") != self.version:
            raise InvalidRequest(f"it is no {self.name} of version {self.version}")
        content = found.get(self.field)
        if not isinstance(content, dict) or found.get("digest") != digest_of(content):
            raise InvalidRequest(f"its digest is not that of its {self.said}")
        return content


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the hexadecimal checksum of a content, which shows a byte that changed."""
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
