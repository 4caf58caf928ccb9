"""The encoding that a chunk to be opened probably has: one of its model's like the last one."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from kvstore.chunk import ChunkLayout


@dataclass(eq=False, slots=True)
class RawGuesses:
    """Guesses whether a chunk is raw: then its slabs are read with its header. A wrong guess costs a request. Models
    have encodings of their own, so each layout's last chunk tells; before it, the last of any. ``is_raw``: before all.
    """

    is_raw: bool
    _by_layout: WeakKeyDictionary[ChunkLayout, bool] = field(default_factory=WeakKeyDictionary)

    def of(self, layout: ChunkLayout) -> bool:
        """Return True when the next chunk with this layout is probably raw."""
        return self._by_layout.get(layout, self.is_raw)

    def saw(self, layout: ChunkLayout, *, is_raw: bool) -> None:
        """Count an opened chunk."""
        self.is_raw = self._by_layout[layout] = is_raw
