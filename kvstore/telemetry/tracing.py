"""Tells what happened to a request, as spans that a tracing system joins to its engine's trace. Off unless a setting
asks.

What may be traced is written once: with ``NO_TRACING``, which does nothing, and with ``kvstore.telemetry.spans``,
which sends spans. No span has a digest, a token or a name of a model: counts, tiers, the tenant and what failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

Value = str | int | float | bool
TRACE_HEADERS = ("traceparent", "tracestate")
"""What a call carries of its caller's trace (W3C Trace Context)."""


class TraceSpan(Protocol):
    """One piece of a request's way."""

    def note(self, **attributes: Value) -> None:
        """Say more of it."""


class Tracing(Protocol):
    """Makes spans. A span is the parent of those that are begun inside of it, also by tasks that are begun there."""

    @property
    def is_on(self) -> bool:
        """True when anybody is told."""

    def call(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[TraceSpan]:
        """A call that came with this metadata: part of its caller's trace, where that says so."""

    def span(self, name: str, **attributes: Value) -> AbstractContextManager[TraceSpan]:
        """A part of what is being done. What is raised inside is said of it."""

    def close(self) -> None:
        """Send what has not been sent, for a bounded time. Idempotent."""


class _NoSpan:
    def note(self, **attributes: Value) -> None:
        return None


class NoTracing:
    """Nobody is told of anything. Cost: 0.2 us per span, in the few places that ask."""

    is_on = False

    def __init__(self) -> None:
        self._span = nullcontext(_NoSpan())

    def call(self, name: str, metadata: Iterable[tuple[str, str | bytes]]) -> AbstractContextManager[TraceSpan]:
        return self._span

    def span(self, name: str, **attributes: Value) -> AbstractContextManager[TraceSpan]:
        return self._span

    def close(self) -> None:
        return None


NO_TRACING = NoTracing()
