"""The form of files that keep knowledge over restarts: one JSON object with a format, a version, and a digest of the
content."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
        return self.pack_texts({name: text_of(value) for name, value in content.items()})

    def pack_texts(self, texts: Mapping[str, str]) -> bytes:
        """Return what ``pack`` returns for values that ``text_of`` turned into these texts. It costs little: keep the
        texts of large values that seldom change."""
        head = {"format": self.name, "version": self.version, "digest": _digest_of(texts)}
        return f"{json.dumps(head)[:-1]}, {json.dumps(self.field)}: {_joined(texts.items())}}}\n".encode()

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


def text_of(value: Any) -> str:
    """Return a value as JSON, the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def digest_of(content: Mapping[str, Any]) -> str:
    """Return the hexadecimal checksum of a content, which shows a byte that changed."""
    return blake3(text_of(content).encode()).hexdigest()


def _digest_of(texts: Mapping[str, str]) -> str:
    """Return ``digest_of`` the content whose values have these texts."""
    return blake3(_joined(sorted(texts.items())).encode()).hexdigest()


def _joined(texts: Iterable[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in texts) + "}"
