"""A queue of moves costs no more per move when it is long."""

from __future__ import annotations

import asyncio
import time

from kvstore.movement.queue import QUEUE_COUNT_MAX, MoveQueue, Priority

LONG, SHORT = QUEUE_COUNT_MAX, QUEUE_COUNT_MAX // 16


async def taken_s(count: int) -> float:
    """The processor's seconds that each of ``count`` moves takes to be taken and ended, as long as none waits."""
    queue = MoveQueue(lambda _: 1)
    for row in range(count):
        assert queue.add(row)
    began_s = time.thread_time()
    for row in range(count):
        assert await queue.take() == row
        queue.done(row)
    return (time.thread_time() - began_s) / count


def test_a_full_queue_is_taken_in_linear_time() -> None:
    """The cost of one move in a full queue is that in a short one, and not sixteen times as much."""
    long_s, short_s = (min(asyncio.run(taken_s(count)) for _ in range(3)) for count in (LONG, SHORT))
    assert long_s < 4 * short_s


async def test_a_queue_that_is_full_says_so() -> None:
    queue = MoveQueue(lambda _: 1)
    assert all(queue.add(row) for row in range(QUEUE_COUNT_MAX))
    assert not queue.add(QUEUE_COUNT_MAX)
    assert queue.add(0), "it waits already"
    queue.done(await queue.take())
    assert queue.add(QUEUE_COUNT_MAX)


async def test_a_row_that_is_raised_goes_to_who_waits_for_its_new_class() -> None:
    """Whoever takes rows of its old class may be busy for long."""
    queue = MoveQueue(lambda _: 1)
    assert queue.add(1, Priority.BATCH)
    assert queue.add(2, Priority.BATCH)
    assert await queue.take((Priority.BATCH,)) == 1
    taking = asyncio.ensure_future(queue.take((Priority.INTERACTIVE, Priority.STANDARD)))
    await asyncio.sleep(0)
    assert not taking.done()
    assert queue.add(2, Priority.INTERACTIVE)
    assert await asyncio.wait_for(taking, 10) == 2
