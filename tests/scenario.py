"""Tests that are coroutines of a service on simulated parts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

Test = Callable[..., Awaitable[None]]


class Runner(Protocol):
    """Starts its service, runs what it is given, and stops it."""

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None: ...


def scenario(make: Callable[[], Runner] | None = None) -> Callable[[Test], Callable[..., None]]:
    """The test's first argument runs it: a fixture, or what ``make`` returns, which is no fixture then."""

    def of(test: Test) -> Callable[..., None]:
        signature = inspect.signature(test)
        names = [*signature.parameters]

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            runner = fixtures.pop(names[0]) if make is None else make()
            runner.run(functools.partial(test, runner, **fixtures))

        if make is not None:
            others = [signature.parameters[name] for name in names[1:]]
            whole.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return whole

    return of
