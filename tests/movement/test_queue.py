"""A queue of moves costs no more per move when it is long."""

from __future__ import annotations

import asyncio
import time

from kvstore.movement.queue import QUEUE_COUNT_MAX, MoveQueue, Priority, Waiting

LONG, SHORT = QUEUE_COUNT_MAX, QUEUE_COUNT_MAX // 16


def queue_of(chunks: dict[int, bytes] | None = None) -> MoveQueue:
    """A queue of rows whose chunks are the same for ever, but those of ``chunks``."""
    return MoveQueue(lambda _: 1, lambda row: (0, (chunks or {}).get(row, b"a")))


async def taken_s(count: int) -> float:
    """The processor's seconds that each of ``count`` moves takes to be taken and ended, as long as none waits."""
    queue = queue_of()
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
    queue = queue_of()
    assert all(queue.add(row) for row in range(QUEUE_COUNT_MAX))
    assert not queue.add(QUEUE_COUNT_MAX)
    assert queue.add(0), "it waits already"
    queue.done(await queue.take())
    assert queue.add(QUEUE_COUNT_MAX)


async def test_a_row_that_is_raised_goes_to_who_waits_for_its_new_class() -> None:
    """Whoever takes rows of its old class may be busy for long."""
    queue = queue_of()
    assert queue.add(1, Priority.BATCH)
    assert queue.add(2, Priority.BATCH)
    assert await queue.take((Priority.BATCH,)) == 1
    taking = asyncio.ensure_future(queue.take((Priority.INTERACTIVE, Priority.STANDARD)))
    await asyncio.sleep(0)
    assert not taking.done()
    assert queue.add(2, Priority.INTERACTIVE)
    assert await asyncio.wait_for(taking, 10) == 2


async def test_a_chunk_in_the_row_of_one_that_waits_does_not_wait_itself() -> None:
    chunks = {1: b"a"}
    queue = queue_of(chunks)
    assert queue.add(1)
    assert queue.add(2)
    chunks[1] = b"b"
    assert [row in queue for row in (1, 2)] == [False, True]
    assert list(queue.waiting()) == [2]
    assert await queue.take() == 1, "who waits for the first chunk is told"
    assert 1 not in queue
    queue.done(1)
    assert list(queue.waiting()) == [2]


async def test_a_chunk_in_the_row_of_one_that_waits_has_a_turn_of_its_own() -> None:
    """It takes neither the first one's place nor its priority, nor waits aside as that one does."""
    chunks = {1: b"a", 2: b"a"}
    queue = queue_of(chunks)
    for row in (1, 2):
        assert queue.add(row, Priority.INTERACTIVE)
    assert await queue.take() == 1
    queue.set_aside(1, Priority.INTERACTIVE)
    chunks.update({1: b"b", 2: b"b"})
    for row in (3, 2, 1):
        assert queue.add(row)
    assert not queue.is_aside(1)
    assert queue.counts() == Waiting(standard=3)
    assert [await queue.take() for _ in range(3)] == [3, 2, 1]
    assert all(row in queue for row in (1, 2, 3))
    for row in (1, 2, 3):
        queue.done(row)
    assert not any(row in queue for row in (1, 2, 3))
    assert len(queue) == 0


async def test_a_row_that_is_on_its_way_and_waits_again_stays_in_the_queue() -> None:
    queue = queue_of()
    assert queue.add(1)
    assert await queue.take() == 1
    assert queue.add(1)
    queue.done(1)
    assert 1 in queue
    assert await queue.take() == 1
    assert queue.add(1)
    queue.cancel([1])
    assert 1 in queue, "its move goes on"
    queue.done(1)
    assert 1 not in queue
