"""Jobs that cross to byte movers, and what it takes to have them done."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import DataLoss
from kvstore.seams import MoverProcesses
from kvstore.seams.movers import Lane
from tests.descriptors import open_files

WAIT_S = 10.0


def double(source: np.ndarray, target: np.ndarray) -> int:
    np.multiply(source, 2, out=target)
    return os.getpid()


def whose() -> int:
    return os.getpid()


def slow(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def lose(reason: str) -> None:
    raise DataLoss("it is gone", reason=reason)


def refuse() -> None:
    raise OSError(errno.EIO, "the device says no")


class Stubborn(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def raise_stubborn() -> None:
    raise Stubborn("cannot be", "made again")


def find_a_lambda() -> object:
    return lambda: None


def total(numbers: np.ndarray) -> int:
    return int(numbers.sum())


def run(movers: MoverProcesses, scenario: Callable[[Lane], Awaitable[None]], count: int = 2) -> None:
    async def whole() -> None:
        lane = movers.lane("test", count, nice=5)
        try:
            await asyncio.wait_for(scenario(lane), WAIT_S)
        finally:
            lane.close()

    asyncio.run(whole())


async def done(lane: Lane, function: Callable[..., Any], *args: object) -> Any:
    return await asyncio.wrap_future(lane.submit(function, *args))


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.005)


def is_stopped(pid: int) -> bool:
    """All its threads: a signal that stops a process reaches them one by one."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


def holds_the_lock(pid: int) -> bool:
    return any(name.endswith("/lock") for name in open_files(pid))
