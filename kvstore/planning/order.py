"""Schedules: in which order contexts that wait for an engine are computed, for routers and custom schedulers.

The context of which most is warm comes next: what is in memory of its beginning, and what those before it in the
schedule compute. So contexts that share a prefix follow one another, and the prefix is computed once and not evicted
in between. A context that has waited too long comes first, whatever the others share.
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
    """One context that waits. ``chunks``: the digests of its leading whole chunks, each of which names all tokens up
    to the chunk's end (``kvstore.keys``); ``chunk_tokens`` each. Of these the first ``warm_chunks`` are in memory, the
    first ``stored_chunks`` in some tier. ``waited_s``: for how long it has waited."""

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
    ``due_s`` seconds: what is prefetched until then is loaded from memory."""

    index: int
    start: int
    stop: int
    due_s: float


@dataclass(frozen=True)
class Schedule:
    """``order``: positions in the contexts that were given, each once, what is computed next first. ``starts_s``: when
    each of these, in this order, begins. ``hints``: what is worth prefetching, the most urgent first."""

    order: tuple[int, ...]
    starts_s: tuple[float, ...]
    hints: tuple[PrefetchHint, ...]


def schedule(
    contexts: Sequence[WaitingContext], compute: ComputeRate, *, wait_s_max: float, hints_max: int = HINTS_MAX
) -> Schedule:
    """The order in which one engine of that speed computes these contexts.

    A context that has waited ``wait_s_max`` seconds when the engine becomes free comes next, the longest wait first:
    it waits no more for any that came later. So it begins no later than ``wait_s_max`` seconds, what was being computed
    when they ended, and those who came before it. Before an engine was measured nothing takes time, and only waits that
    are too long already count.

    Contexts whose beginnings are stored below memory are named in ``hints``: of the first ``hints_max`` in the order
    that have any, each chunk once.

    Raises: InvalidRequest for a bound that is no number of seconds. Cost: chunks of all contexts, in a heap.

    Source: the longest prefix first is SGLang's order (NeurIPS '24), which on a tree of prefixes computes each node
    once; ageing is ours, for the order alone starves whoever shares nothing.
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
    """Count the leading chunks of each context that are warm, while one after the other is computed. Every chunk of
    every context is passed once."""

    def __init__(self, contexts: Sequence[WaitingContext]) -> None:
        self._contexts = contexts
        self._warm = [0] * len(contexts)
        self._digests: set[bytes] = set()
        self._next: dict[bytes, list[int]] = {}
        """Contexts by the first chunk of theirs that is cold."""
        self._heap: list[tuple[int, float, int]] = []
        for index in range(len(contexts)):
            self._wait(index)
        for context in contexts:
            self._warm_up(context.chunks[: context.warm_chunks])

    def _wait(self, index: int) -> None:
        """Pass the context's warm chunks, and wait for the first that is cold."""
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
        """From now on the context's chunks are warm."""
        context = self._contexts[index]
        self._warm_up(context.chunks[self._warm[index] :])

    def tokens(self, index: int) -> int:
        """Return the number of leading tokens of a context that are warm."""
        return self._warm[index] * self._contexts[index].chunk_tokens

    def warmest(self, is_placed: Sequence[bool]) -> int:
        """Of those that are not placed the one with most warm tokens; of equal ones, the one that has waited longer."""
        while True:
            tokens, _, index = heapq.heappop(self._heap)
            if not is_placed[index] and -tokens == self.tokens(index):
                return index


def _hints(
    contexts: Sequence[WaitingContext], order: Iterable[tuple[int, float]], hints_max: int
) -> Iterator[PrefetchHint]:
    """Return the chunks of the next contexts that are stored below memory, each for the first context that needs it."""
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
