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


def scenario(make: Callable[..., Runner] | None = None) -> Callable[[Test], Callable[..., None]]:
    """The test's first argument runs it: a fixture, or what ``make`` returns of the fixtures that it names."""

    def of(test: Test) -> Callable[..., None]:
        signature = inspect.signature(test)
        wanted = signature.parameters
        first = next(iter(wanted))
        made_of = inspect.signature(make).parameters if make is not None else {first: wanted[first]}
        all_of_it = {**made_of, **{name: wanted[name] for name in wanted if name != first}}

        @functools.wraps(test)
        def whole(**fixtures: Any) -> None:
            given = [fixtures[name] for name in made_of]
            runner = make(*given) if make is not None else given[0]
            runner.run(functools.partial(test, runner, **{name: fixtures[name] for name in wanted if name != first}))

        whole.__signature__ = signature.replace(parameters=[*all_of_it.values()])  # type: ignore[attr-defined]  # for pytest
        return whole

    return of
