"""Named fault points. Production code calls ``faults.reach("arena.evict.bumped")`` at the places where a
crash, a delay or a pause must be survivable; with nothing armed that is one dict look-up."""

from __future__ import annotations

from collections.abc import Callable


class FaultPoints:
    """A table of armed points. Tests arm one with a callable that raises, sleeps or signals."""

    def __init__(self) -> None:
        self._armed: dict[str, Callable[[], None]] = {}

    def arm(self, point: str, action: Callable[[], None]) -> None:
        self._armed[point] = action

    def reach(self, point: str) -> None:
        if self._armed:
            action = self._armed.get(point)
            if action is not None:
                action()
