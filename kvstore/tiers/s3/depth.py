"""How far a chain goes on, in few questions and fewer round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from kvstore.tiers.s3.connection import together

Key = TypeVar("Key")
HEAD_COUNT_MAX = 8
"""Questions at a time."""


def points(low: int, high: int) -> list[int]:
    """Places between ``low`` and ``high``, neither of them included: as many as are asked at a time, evenly apart."""
    count = min(HEAD_COUNT_MAX, high - low - 1)
    return [low + (high - low) * (number + 1) // (count + 1) for number in range(count)]


async def are_there(
    keys: Sequence[Key], is_there: Callable[[Key], Coroutine[Any, Any, bool]], chains: Sequence[int] = ()
) -> tuple[list[bool], int]:
    """Which of these are there, and how many questions that took. A few, and those that are no ``chains`` (keys of
    each, in order), are asked for one by one. Of a chain, the first; then places in between, for a chain ends where its
    first chunk is missing: 128 keys take 19 questions at most, in four round trips, or one where nothing is there. What
    lies behind a gap is not found."""
    limit, count = asyncio.Semaphore(HEAD_COUNT_MAX), 0

    async def ask(key: Key) -> bool:
        nonlocal count
        async with limit:
            count += 1
            return await is_there(key)

    if not chains or len(keys) <= HEAD_COUNT_MAX:
        return await together(map(ask, keys), HEAD_COUNT_MAX), count
    assert sum(chains) == len(keys)
    stops = list(accumulate(chains))
    parts = [keys[stop - length : stop] for stop, length in zip(stops, chains, strict=True)]
    lengths = await together((_depth(part, ask) for part in parts), len(parts))
    return [at < length for part, length in zip(parts, lengths, strict=True) for at in range(len(part))], count


async def _depth(chain: Sequence[Key], is_there: Callable[[Key], Coroutine[Any, Any, bool]]) -> int:
    """How many leading keys of a chain are there."""
    low, high = -1, len(chain)
    asked = [0]
    while asked:
        answers = await together([is_there(chain[place]) for place in asked], HEAD_COUNT_MAX)
        missing = answers.index(False) if False in answers else len(asked)
        low = asked[missing - 1] if missing else low
        high = asked[missing] if missing < len(asked) else high
        asked = points(low, high) if low >= 0 else []
    return low + 1
