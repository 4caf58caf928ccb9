"""The parts of ``make gpu``: two runs of tests, and the benchmarks of a GPU. Each has a share of the time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kvstore.errors import InvalidRequest
from kvstore_ops.bench import GPU
from kvstore_ops.bench.alone import module_name
from kvstore_ops.gpu.process import Outcome, outcome_of

TEST_S_MAX = 60
"""Seconds after which one test counts as failed."""


@dataclass(frozen=True)
class Part:
    """A run of tests (``paths``), or the benchmark of this name. ``share``: of the time, beside the others' shares."""

    name: str
    share: float
    paths: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def run(self, limit_s: float, scale: str, directory: Path) -> Outcome:
        """Run it, for ``limit_s`` at most. ``directory``: for its own files."""
        if not self.paths:
            return outcome_of(self.name, [*_python(), "kvstore_ops.entry", "bench", self.name, *_flags(scale)], limit_s)
        junit = directory / f"{self.name}.xml"
        options = ["-v", "--tb=short", "-p", "no:cacheprovider", f"--timeout={TEST_S_MAX}", f"--junitxml={junit}"]
        return outcome_of(self.name, [*_python(), "pytest", *self.paths, *self.arguments, *options], limit_s, junit)


TESTS = (
    Part("gpu-tests", 3.0, ("tests/gpu",), ("-m", "gpu")),
    Part("kernel-tests", 1.5, ("tests/kernels",)),
)
SHARES = {"gpu-kernels": 2.0, "gpu-fetch": 1.5, "gpu-store": 1.5, "gpu-hbm": 0.7}
"""Of benchmarks whose share is not 1."""
PARTS = (*TESTS, *(Part(name, SHARES.get(name, 1.0)) for name in GPU if find_spec(module_name(name)) is not None))


def chosen(names: Sequence[str]) -> tuple[Part, ...]:
    """Return the parts of these names; all of them where none is named. Raises InvalidRequest for an unknown name."""
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise InvalidRequest(f"--only {name}: known are {', '.join(known)}")
    return tuple(known[name] for name in names) if names else PARTS


def outcomes(parts: Sequence[Part], scale: str, directory: Path, left_s: Callable[[], float]) -> Iterator[Outcome]:
    """Run the parts in order, and yield what became of each. Each may take its share of the time that is left then, so
    that time which one leaves goes to those behind it. ``left_s``: the time that is left."""
    for number, part in enumerate(parts):
        limit_s = left_s() * part.share / sum(each.share for each in parts[number:])
        yield part.run(max(1.0, limit_s), scale, directory)


def _python() -> list[str]:
    return [sys.executable, "-m"]


def _flags(scale: str) -> list[str]:
    return [] if scale == "full" else [f"--{scale}"]
