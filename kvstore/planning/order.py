"""Schedules: the order in which contexts that wait for an engine are computed, for routers and custom schedulers.

The context with the most warm tokens comes next. Leading chunks are warm when they are in memory, or when a context
before it in the schedule computes them. So contexts that share a prefix follow one another, and the prefix is computed
once and not evicted in between. A context that has waited too long comes first, whatever the others share.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.planning.loading.compute import ComputeRate

HINTS_MAX = 4


@dataclass(frozen=True)
class WaitingContext:
    """One context that waits. ``chunks``: the digests of its leading whole chunks, of ``chunk_tokens`` tokens each; a
    digest names all tokens up to the chunk's end (``kvstore.keys``). The first ``warm_chunks`` of them are in memory,
    the first ``stored_chunks`` in some tier. ``waited_s``: the seconds that it has waited."""

    token_count: int
    chunks: Sequence[bytes]
    chunk_tokens: int
    warm_chunks: int = 0
    stored_chunks: int = 0
    waited_s: float = 0.0

    def __post_init__(self) -> None:
        held = len(self.chunks)
        if not 0 <= self.warm_chunks <= held or not 0 <= self.stored_chunks <= held:
            raise InvalidRequest(
                f"warm_chunks {self.warm_chunks} and stored_chunks {self.stored_chunks} must be in 0..{held}"
            )
        if self.chunk_tokens <= 0 or held * self.chunk_tokens > self.token_count:
            raise InvalidRequest(
                f"{held} chunks of chunk_tokens {self.chunk_tokens} must be within token_count {self.token_count}"
            )
        if not 0 <= self.waited_s < float("inf"):
            raise InvalidRequest(f"waited_s {self.waited_s} must be a number of seconds, 0 or more")


@dataclass(frozen=True)
class PrefetchHint:
    """Chunks ``start .. stop`` of ``contexts[index]`` are stored below memory, and the context's turn comes in
    ``due_s`` seconds. Chunks that are prefetched by then are loaded from memory."""

    index: int
    start: int
    stop: int
    due_s: float


@dataclass(frozen=True)
class Schedule:
    """``order``: the indices of the given contexts, each once, in the order of computing. ``starts_s``: the seconds
    from now at which each of these begins, in the same order. ``hints``: chunks worth prefetching, the most urgent
    first."""

    order: tuple[int, ...]
    starts_s: tuple[float, ...]
    hints: tuple[PrefetchHint, ...]


def schedule(
    contexts: Sequence[WaitingContext], compute: ComputeRate, *, wait_s_max: float, hints_max: int = HINTS_MAX
) -> Schedule:
    """Return the order in which one engine of that speed computes these contexts.

    A context that has waited ``wait_s_max`` seconds when the engine becomes free comes next, the longest wait first.
    From then on no later context goes before it. So it begins after at most ``wait_s_max`` seconds, the rest of the
    context being computed at that time, and the contexts that came before it. Until an engine is measured, computing
    counts as 0 seconds, so that only waits that are already too long change the order.

    ``hints`` names the first ``hints_max`` contexts in the order that have chunks stored below memory, each chunk once.

    Raises: InvalidRequest for a bound that is no number of seconds. Cost: linear in the chunks of all contexts, and a
    heap.

    Source: the longest prefix first is SGLang's order (NeurIPS '24), which on a tree of prefixes computes each node
    once. Ageing is ours: the order alone starves a context that shares no prefix.
    """
    if not 0 <= wait_s_max < float("inf"):
        raise InvalidRequest(f"wait_s_max {wait_s_max} must be a number of seconds, 0 or more")
    warmth = _Warmth(contexts)
    by_age = sorted(range(len(contexts)), key=lambda index: -contexts[index].waited_s)
    oldest, order, starts_s, now_s = 0, list[int](), list[float](), 0.0
    is_placed = [False] * len(contexts)
    while len(order) < len(contexts):
        while is_placed[by_age[oldest]]:
            oldest += 1
        index = by_age[oldest]
        if contexts[index].waited_s + now_s < wait_s_max:
            index = warmth.warmest(is_placed)
        is_placed[index] = True
        order.append(index)
        starts_s.append(now_s)
        found = contexts[index]
        warm = warmth.tokens(index)
        now_s += compute.seconds(found.token_count - warm, warm)
        warmth.compute(index)
    return Schedule(
        tuple(order), tuple(starts_s), tuple(_hints(contexts, zip(order, starts_s, strict=True), hints_max))
    )


class _Warmth:
    """Counts the leading warm chunks of each context while one context after the other is computed. It passes every
    chunk of every context once."""

    def __init__(self, contexts: Sequence[WaitingContext]) -> None:
        self._contexts = contexts
        self._warm = [0] * len(contexts)
        self._digests: set[bytes] = set()
        self._next: dict[bytes, list[int]] = {}
        """Contexts by their first cold chunk."""
        self._heap: list[tuple[int, float, int]] = []
        for index in range(len(contexts)):
            self._wait(index)
        for context in contexts:
            self._warm_up(context.chunks[: context.warm_chunks])

    def _wait(self, index: int) -> None:
        """Advance the context past its warm chunks, and register it under its first cold chunk."""
        context, count = self._contexts[index], self._warm[index]
        while count < len(context.chunks) and context.chunks[count] in self._digests:
            count += 1
        self._warm[index] = count
        if count < len(context.chunks):
            self._next.setdefault(context.chunks[count], []).append(index)
        heapq.heappush(self._heap, (-self.tokens(index), -context.waited_s, index))

    def _warm_up(self, digests: Iterable[bytes]) -> None:
        for digest in digests:
            self._digests.add(digest)
            for index in self._next.pop(digest, ()):
                self._wait(index)

    def compute(self, index: int) -> None:
        """Mark the context's chunks as warm."""
        context = self._contexts[index]
        self._warm_up(context.chunks[self._warm[index] :])

    def tokens(self, index: int) -> int:
        """Return the number of leading warm tokens of a context."""
        return self._warm[index] * self._contexts[index].chunk_tokens

    def warmest(self, is_placed: Sequence[bool]) -> int:
        """Return the context with the most warm tokens that is not placed yet; among equals, the longest waiting."""
        while True:
            tokens, _, index = heapq.heappop(self._heap)
            if not is_placed[index] and -tokens == self.tokens(index):
                return index


def _hints(
    contexts: Sequence[WaitingContext], order: Iterable[tuple[int, float]], hints_max: int
) -> Iterator[PrefetchHint]:
    """Yield a hint for each of the next contexts with chunks below memory. A chunk goes to the first context that needs
    it."""
    told = {digest for context in contexts for digest in context.chunks[: context.warm_chunks]}
    given = 0
    for index, due_s in order:
        if given >= hints_max:
            return
        context = contexts[index]
        start = 0
        while start < context.stored_chunks and context.chunks[start] in told:
            start += 1
        if start < context.stored_chunks:
            told.update(context.chunks[start : context.stored_chunks])
            given += 1
            yield PrefetchHint(index, start, context.stored_chunks, due_s)
