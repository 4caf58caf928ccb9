"""SGLang's page hashes, written from their description alone: sha256 over the digest before (raw bytes) and the page's
tokens as little-endian u32. An extra key or salt is the first page's digest before. Run it to print the vectors.

    python -m tests.engines.sglang_pages
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def page_hashes(tokens: Sequence[int], page_size: int, seed: str = "") -> list[str]:
    """Hex digests of the full pages. ``seed``: hex digest that stands before the first page."""
    found: list[str] = []
    before = bytes.fromhex(seed)
    for start in range(0, len(tokens) // page_size * page_size, page_size):
        page = tokens[start : start + page_size]
        before = hashlib.sha256(before + struct.pack(f"<{page_size}I", *page)).digest()
        found.append(before.hex())
    return found


if __name__ == "__main__":
    for digest in page_hashes(range(48), 16):
        print(digest)
