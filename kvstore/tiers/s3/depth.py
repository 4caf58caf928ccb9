"""How far a chain goes on, in few questions and fewer round trips."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
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
    keys: Sequence[Key], is_there: Callable[[Key], Coroutine[Any, Any, bool]]
) -> tuple[list[bool], int]:
    """Which of these are there, and how many questions that took. A few are asked for one by one. Of more, the first;
    then places in between, for a chain ends where its first chunk is missing: 128 keys take 19 questions at most, in
    four round trips, or one where nothing is there. What lies behind a gap is not found."""
    if len(keys) <= HEAD_COUNT_MAX:
        return await together(map(is_there, keys), HEAD_COUNT_MAX), len(keys)
    low, high, count = -1, len(keys), 0
    asked = [0]
    while asked:
        answers = await together([is_there(keys[place]) for place in asked], HEAD_COUNT_MAX)
        count += len(asked)
        missing = answers.index(False) if False in answers else len(asked)
        low = asked[missing - 1] if missing else low
        high = asked[missing] if missing < len(asked) else high
        asked = points(low, high) if low >= 0 else []
    return [place <= low for place in range(len(keys))], count
