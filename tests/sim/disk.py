"""The simulated disk as one process sees it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.sim.trace import Trace
from tests.simulated import SimulatedDisk
from tests.simulated.disk import DiskStopped

DIRECTORY = Path("/device")
RECORD = Path("/state/plain")
"""Of copies without an envelope."""


class ProcessDisk:
    """Forwards to the disk that outlives the process. ``rates`` says how often a method fails, and with which error;
    once the process ``is_over`` every call raises DiskStopped. Implements ``Disk``."""

    def __init__(self, disk: SimulatedDisk, chance: random.Random, trace: Trace, ended: Callable[[], None]) -> None:
        self.disk = disk
        self.is_over = False
        self.is_serving = False
        """While it is, calls come from byte movers only."""
        self.may_call: Callable[[], bool] = lambda: True
        self.rates: dict[str, tuple[float, int]] = {}
        self.injected = 0
        self.has_failed_to_remove = False
        self._chance = chance
        self._trace = trace
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def _call(self, name: str, *args: Any) -> Any:
        if self.is_over:
            raise DiskStopped
        if self.is_serving and not self.may_call():
            raise self._trace.fail(f"disk.{name} on the event loop")
        self._inject(name)
        try:
            return getattr(self.disk, name)(*args)
        except DiskStopped:
            self.is_over = True
            self.disk.mend()
            self._trace.add("disk", f"stopped in {name} at step {self.disk.steps}")
            self._ended()
            raise

    def _inject(self, name: str) -> None:
        rate, error = self.rates.get(name, (0.0, 0))
        if rate and self._chance.random() < rate:
            self.injected += 1
            self.has_failed_to_remove |= name == "remove"
            self._trace.add("fault", f"{name} fails: {os.strerror(error)}")
            self.disk.fail(name, error)
