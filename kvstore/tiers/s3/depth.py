"""Finds the end of a chain in a bucket, in few questions and fewer round trips."""

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
    """Return evenly spaced places between ``low`` and ``high``, both excluded: as many as are asked at a time."""
    count = min(HEAD_COUNT_MAX, high - low - 1)
    return [low + (high - low) * (number + 1) // (count + 1) for number in range(count)]


def first_count(key_count: int, chains: Sequence[int] = ()) -> int:
    """Return the number of questions that ``are_there`` asks before it has an answer."""
    return min(HEAD_COUNT_MAX, len(chains) if chains and key_count > HEAD_COUNT_MAX else key_count)


async def are_there(
    keys: Sequence[Key], is_there: Callable[[Key], Coroutine[Any, Any, bool | None]], chains: Sequence[int] = ()
) -> tuple[list[bool | None], int]:
    """Return a flag per key, True when it is there, None when it cannot be had now, and the number of questions. A few
    keys, and keys without ``chains`` (the number of keys of each, in order), are asked for one by one. For a chain the
    first key is asked for, then keys in between, for a chain ends where its first chunk is missing (what cannot be had
    ends none): 128 keys take 19 questions at most, in four round trips, or one where nothing is there. Chunks behind a
    gap are not found."""
    limit, count = asyncio.Semaphore(HEAD_COUNT_MAX), 0

    async def ask(key: Key) -> bool | None:
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


async def _depth(chain: Sequence[Key], is_there: Callable[[Key], Coroutine[Any, Any, bool | None]]) -> int:
    """Return the number of leading keys of a chain that are there."""
    low, high = -1, len(chain)
    asked = [0]
    while asked:
        answers = await together([is_there(chain[place]) for place in asked], HEAD_COUNT_MAX)
        missing = answers.index(False) if False in answers else len(asked)
        low = asked[missing - 1] if missing else low
        high = asked[missing] if missing < len(asked) else high
        asked = points(low, high) if low >= 0 else []
    return low + 1
