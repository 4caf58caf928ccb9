"""An event loop whose time passes only when nothing else is left to do. Hours of timeouts run in milliseconds, and the
same coroutine runs the same way each time: there is no thread, no socket and no clock, and sets of tasks iterate in the
same order in each run."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import selectors
from collections.abc import Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeVar

Result = TypeVar("Result")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Virtual seconds from 0. Files and sockets are never ready here.

    Raises: RuntimeError when every task waits and no timer is left that could wake one.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self.at_turn: Callable[[], None] = _nothing
        """Called at the beginning of each turn of the loop, before what is ready in it runs."""
        self._numbers = itertools.count(1)
        super().__init__(_Waiting(self))
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move time forward: no task has anything to do until then."""
        assert seconds >= 0
        self._now += seconds

    def next_number(self) -> int:
        return next(self._numbers)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(self)

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> NoReturn:
        raise RuntimeError(f"{func}: a simulation has no threads; submit it to SeededWorkers")

    def _write_to_self(self) -> None:
        """Do nothing. It would wake a loop that sleeps in the kernel, and this loop never sleeps there."""


def _nothing() -> None:
    """Do nothing at the beginning of a turn, unless a test says otherwise."""


class _Waiting(selectors.SelectSelector):
    """Called once in each turn of the loop: where no task is ready it moves time to the next timer."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.at_turn()
        if timeout is None:
            raise RuntimeError(f"nothing left to run: deadlock at {self._loop.time():.6f} s")
        self._loop.advance(max(0.0, timeout))
        return []


class _Future(asyncio.Future[Any]):
    """Hashed by number, not by address: asyncio keeps sets of futures, and their order must not vary by run."""

    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__(loop=loop)
        self._number = loop.next_number()

    def __hash__(self) -> int:
        return self._number


class _Task(asyncio.Task[Any]):
    """Hashed by number, as ``_Future``."""

    def __init__(
        self, loop: SimulatedLoop, coroutine: Coroutine[Any, Any, Any], context: contextvars.Context | None
    ) -> None:
        self._number = loop.next_number()
        super().__init__(coroutine, loop=loop, context=context)

    def __hash__(self) -> int:
        return self._number


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    context: contextvars.Context | None = None,
) -> _Task:
    assert isinstance(loop, SimulatedLoop)
    assert isinstance(coroutine, Coroutine)
    return _Task(loop, coroutine, context)


class LoopClock:
    """The clock of the simulated loop that runs the caller."""

    def monotonic(self) -> float:
        return self._running().time()

    def wall(self) -> float:
        return self._running().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def _running(self) -> SimulatedLoop:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop), "LoopClock needs a SimulatedLoop: run the coroutine with simulate()"
        return loop


def simulate(coroutine: Coroutine[Any, Any, Result], *, seed: int) -> Result:
    """Run ``coroutine`` on a fresh loop to its end. ``seed`` is the seed of the simulated parts inside: an error that
    the coroutine raises gets a note with it, so that the run can be repeated. The loop itself draws nothing."""
    try:
        with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
            return runner.run(coroutine)
    except BaseException as error:
        error.add_note(f"simulation seed {seed}")
        raise
