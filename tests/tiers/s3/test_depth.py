"""How far a chain goes on in a bucket, in few questions."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import KVStoreError, Unavailable
from kvstore.tiers.s3.depth import are_there, first_count


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 128, 1000])
async def test_a_chain_is_found_to_its_end_in_few_questions(count: int) -> None:
    for length in {0, 1, 2, count // 3, count - 1, count}:
        asked: list[int] = []

        async def is_there(key: int, length: int = length, asked: list[int] = asked) -> bool:
            asked.append(key)
            return key < length

        answers, question_count = await are_there(range(count), is_there, [count])
        assert answers == [key < length for key in range(count)]
        assert len(asked) == len(set(asked)) == question_count
        assert question_count <= (8 if count <= 8 else 19 if count <= 128 else 33)
        assert length or count <= 8 or question_count == 1, "what is nowhere costs one"


async def test_what_is_no_chain_is_asked_for_key_by_key() -> None:
    """A chain whose first chunk is missing says nothing of the next one."""
    there = {key for key in range(60) if key % 3 or key > 50}

    async def is_there(key: int) -> bool:
        return key in there

    assert await are_there(range(60), is_there) == ([key in there for key in range(60)], 60)
    starts = {0: 20, 20: 0, 25: 30, 55: 5}  # chains of 20, 5, 30 and 5 keys, and how much of each is there
    expected = [any(start <= key < start + count for start, count in starts.items()) for key in range(60)]

    async def leads(key: int) -> bool:
        return expected[key]

    answers, count = await are_there(range(60), leads, [20, 5, 30, 5])
    assert answers == expected
    assert count < 40


async def test_a_question_that_fails_fails_all() -> None:
    async def is_there(key: int) -> bool:
        raise Unavailable("away")

    with pytest.raises(KVStoreError, match="away"):
        await are_there(range(100), is_there, [100])


@pytest.mark.parametrize(("count", "chains"), [(3, []), (60, []), (8, [8]), (60, [60]), (60, [20, 5, 30, 5])])
async def test_what_is_asked_before_any_answer_is_known_beforehand(count: int, chains: list[int]) -> None:
    asked: list[int] = []
    answer = asyncio.Event()

    async def is_there(key: int) -> bool:
        asked.append(key)
        await answer.wait()
        return False

    asking = asyncio.ensure_future(are_there(range(count), is_there, chains))
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(asked) == first_count(count, chains)
    answer.set()
    await asking
