"""Rates: kernels timed on a device, each beside its limit; what fails is kept as an error, so that the others run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore_ops.bench.result import note, quartiles

GROUPS = {"full": 9, "quick": 5, "tiny": 1}
RUNS_PER_GROUP = 6


@dataclass
class Case:
    """One kernel at one size: its rate and its limit, of the same unit; without a target, it is only shown."""

    rate: float
    limit: float
    unit: str
    target: float = 0.0
    spread: tuple[float, float] = (0.0, 0.0)

    @property
    def ratio(self) -> float:
        return self.rate / self.limit if self.limit else 0.0


@dataclass
class Rates:
    """The device, its limits, and what was found."""

    device: str
    scale: str
    cases: dict[str, Case] = field(default_factory=dict)
    tried: dict[str, dict[str, float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    matmul_flops: float = 0.0

    @property
    def tries(self) -> bool:
        """True when other sizes of blocks are tried."""
        return self.device == "cuda" and self.scale == "full"

    def seconds(self, action: Callable[[], object]) -> list[float]:
        """Return the seconds of one run, by group of runs. Runs of a group are enqueued together, so that the GPU does
        not wait for Python."""
        action()
        return [self._group(action) / RUNS_PER_GROUP for _ in range(GROUPS[self.scale])]

    def _group(self, action: Callable[[], object]) -> float:
        import torch

        if self.device == "cpu":
            before_s = time.perf_counter()
            for _ in range(RUNS_PER_GROUP):
                action()
            return time.perf_counter() - before_s
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch's
        begin.record()
        for _ in range(RUNS_PER_GROUP):
            action()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def add(self, name: str, work: float, unit: str, limit: float, target: float, action: Callable[[], object]) -> None:
        """Time an action that does ``work``, in ``unit`` times seconds. Keep an error: the others shall run."""
        note(f"rates: {name}")
        try:
            seconds = self.seconds(action)
        except Exception as error:  # noqa: BLE001 - a kernel's compiler raises errors of many kinds
            self.errors[name] = f"{type(error).__name__}: {error}"
            return
        rates = [work / each for each in seconds]
        self.cases[name] = Case(statistics.median(rates), limit, unit, target, quartiles(rates))

    def check(self, name: str, action: Callable[[], None]) -> bool:
        """Run a check, and return True when it passes. Keep what fails as an error."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - as in add
            self.errors[name] = f"{type(error).__name__}: {error}"
        return name not in self.errors

    def best(self, kernel: str, work: float, ways: Mapping[str, Callable[[], object]]) -> None:
        """Time one kernel with blocks of other sizes."""
        found = self.tried.setdefault(kernel, {})
        for name, action in ways.items():
            try:
                found[name] = work / statistics.median(self.seconds(action))
            except Exception as error:  # noqa: BLE001 - as in add
                self.errors[f"{kernel} {name}"] = f"{type(error).__name__}: {error}"[:200]
