"""The arena's regions."""

from __future__ import annotations

from kvstore.seams.memory import Mapping
from kvstore.seams.runs import FreeRuns


class Region(FreeRuns):
    """The first ``usable`` bytes may be handed out; using the first ``backed`` bytes costs no page faults any more."""

    def __init__(self, index: int, mapping: Mapping, byte_count: int) -> None:
        super().__init__()
        self.index = index
        self.mapping = mapping
        self.byte_count = byte_count
        self.usable = 0
        self.backed = 0
        self.owners: dict[int, tuple[int, int]] = {}
        """By the offset of each extent in use: the generation slot of its placement, and its size."""

    def extend(self, byte_count: int) -> None:
        """Make ``byte_count`` more bytes usable."""
        assert self.usable + byte_count <= self.byte_count
        self.give_back(self.usable, byte_count)
        self.usable += byte_count
