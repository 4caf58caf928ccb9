"""What a fake is to do wrong at present."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from pathlib import Path

from kvstore.errors import Unavailable

POLL_S = 0.005


class Switch(StrEnum):
    """CORRUPT: slabs come back with a bit flipped; GARBLED: headers do. STALLED: calls wait until it is off. AWAY:
    calls raise Unavailable. ABSENT: nothing is there, and what is written is dropped. LYING: hints say the contrary."""

    CORRUPT = "corrupt"
    GARBLED = "garbled"
    STALLED = "stalled"
    AWAY = "away"
    ABSENT = "absent"
    LYING = "lying"


class Switches:
    """Those that are on are the words of a file; without a file (or a path) all are off."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._waiting: dict[object, float] = {}

    def turn_on(self, *switches: Switch) -> None:
        """These, and no others. At once for every process that looks."""
        assert self._path is not None, "give the fake's settings a file for its switches"
        fresh = self._path.with_suffix(".new")
        fresh.write_text(" ".join(switches))
        os.replace(fresh, self._path)

    def turn_off(self) -> None:
        """All of them."""
        self.turn_on()

    def is_on(self, switch: Switch) -> bool:
        if self._path is None:
            return False
        try:
            return switch in self._path.read_text().split()
        except FileNotFoundError:
            return False

    async def before(self, call: str) -> None:
        """Ahead of each call. Raises Unavailable."""
        if self.is_on(Switch.STALLED):
            loop, me = asyncio.get_running_loop(), object()
            self._waiting[me] = loop.time()
            try:
                while self.is_on(Switch.STALLED):  # noqa: ASYNC110 - who turns it may be another process
                    await asyncio.sleep(POLL_S)
            finally:
                del self._waiting[me]
        else:
            await asyncio.sleep(0)
        if self.is_on(Switch.AWAY):
            raise Unavailable(f"the fake is away ({call})")

    def stalled_s(self) -> float:
        """For how long the oldest call has waited."""
        if not self._waiting:
            return 0.0
        return asyncio.get_running_loop().time() - min(self._waiting.values())
