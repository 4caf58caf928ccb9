"""A queue of moves costs no more per move when it is long."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import pytest

from kvstore.movement.queue import IN_FLIGHT_BYTES_MAX, QUEUE_COUNT_MAX, MoveQueue, Priority, Waiting
from kvstore.movement.writes import BATCH_LANE_COUNT, LANE_COUNT

LONG, SHORT = QUEUE_COUNT_MAX, QUEUE_COUNT_MAX // 16
URGENT, SLOW = (Priority.INTERACTIVE, Priority.STANDARD), (Priority.BATCH,)
LANES = (URGENT,) * LANE_COUNT + (SLOW,) * BATCH_LANE_COUNT


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


# ------------------------------------------------------------ who is woken


@contextmanager
def runs_of(code: CodeType) -> Iterator[list[int]]:
    """Count how often a coroutine function is begun or goes on."""
    found = [0]

    def seen(frame: FrameType, event: str, _: object) -> None:
        found[0] += event == "call" and frame.f_code is code

    sys.setprofile(seen)
    try:
        yield found
    finally:
        sys.setprofile(None)


class Lanes:
    """Callers that take rows for ever, each of some classes, and end a move when they are told. ``sizes``: the bytes of
    each row."""

    def __init__(self, lanes: Collection[Collection[Priority]], sizes: dict[int, int] | None = None) -> None:
        self.sizes = sizes or {}
        self.queue = MoveQueue(lambda row: self.sizes.get(row, 1), lambda _: (0, b"a"))
        self.moving: dict[int, asyncio.Event] = {}
        self.taken: list[tuple[int, Collection[Priority]]] = []
        self.tasks: dict[asyncio.Task[None], Collection[Priority]] = {}
        self.idle: list[Collection[Priority]] = []
        """The classes of those that wait for a row."""
        for classes in lanes:
            self.start(classes)

    def start(self, classes: Collection[Priority]) -> None:
        self.tasks[asyncio.ensure_future(self._lane(classes))] = classes

    async def _lane(self, classes: Collection[Priority]) -> None:
        while True:
            self.idle.append(classes)
            try:
                row = await self.queue.take(classes)
            finally:
                self.idle.remove(classes)
            self.taken.append((row, classes))
            ends = self.moving[row] = asyncio.Event()
            await ends.wait()

    def done(self, row: int) -> None:
        self.queue.done(row)
        self.moving.pop(row).set()

    async def quiet(self) -> None:
        """Let all of them run until none goes on."""
        for _ in range(4 * len(LANES)):
            await asyncio.sleep(0)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_row_wakes_one_of_those_who_wait() -> None:
    """A herd of lanes that is woken for each row takes the service's loop as long as the rows themselves."""
    rows = range(4 * LANE_COUNT)
    with runs_of(MoveQueue.take.__code__) as runs:
        lanes = Lanes(LANES)
        await lanes.quiet()
        for row in rows:
            assert lanes.queue.add(row, Priority.STANDARD)
            await lanes.quiet()
            lanes.done(row)
            await lanes.quiet()
    assert [row for row, _ in lanes.taken] == list(rows)
    assert runs[0] == len(LANES) + 2 * len(rows), "each row is taken by a lane that goes on, and asks for the next"
    await lanes.end()


async def test_rows_that_come_together_wake_as_many_as_they_are() -> None:
    with runs_of(MoveQueue.take.__code__) as runs:
        lanes = Lanes(LANES)
        await lanes.quiet()
        for row in range(3):
            assert lanes.queue.add(row, Priority.STANDARD)
        assert lanes.queue.add(3, Priority.BATCH)
        await lanes.quiet()
    assert sorted(lanes.taken) == [(0, URGENT), (1, URGENT), (2, URGENT), (3, SLOW)]
    assert runs[0] == len(LANES) + 4
    await lanes.end()


@pytest.mark.parametrize("is_woken_first", [True, False])
async def test_who_is_woken_and_cancelled_leaves_the_row_to_another(is_woken_first: bool) -> None:
    lanes = Lanes((URGENT, URGENT))
    await lanes.quiet()
    if is_woken_first:
        assert lanes.queue.add(1)
    next(iter(lanes.tasks)).cancel()
    if not is_woken_first:
        assert lanes.queue.add(1)
    await lanes.quiet()
    assert lanes.taken == [(1, URGENT)]
    await lanes.end()


@pytest.mark.parametrize("seed", range(10))
async def test_nobody_waits_for_a_row_that_may_go(seed: int) -> None:
    """Rows come, are raised, wait aside and are resumed, are dropped, and end, in any order; callers are cancelled."""
    chance = random.Random(seed)
    share = IN_FLIGHT_BYTES_MAX // 4
    lanes = Lanes(
        [chance.choice((URGENT, SLOW, tuple(Priority))) for _ in range(chance.randint(1, 8))],
        {row: chance.choice((1, share, 3 * share, 5 * share)) for row in range(30)},
    )
    queue = lanes.queue
    for _ in range(300):
        row, what = chance.randrange(30), chance.random()
        if what < 0.4:
            queue.add(row, chance.choice(tuple(Priority)))
        elif what < 0.75 and lanes.moving:
            lanes.done(chance.choice(list(lanes.moving)))
        elif what < 0.8 and lanes.moving:
            aside = chance.choice(list(lanes.moving))
            lanes.moving.pop(aside).set()
            queue.set_aside(aside, chance.choice(tuple(Priority)))
        elif what < 0.85:
            queue.resume([row])
        elif what < 0.9:
            queue.cancel([row])
        elif what < 0.92 and len(lanes.tasks) > 1:
            task = chance.choice(list(lanes.tasks))
            lanes.start(lanes.tasks.pop(task))
            task.cancel()
        if chance.random() < 0.5:
            await lanes.quiet()
            for classes in lanes.idle:
                row_next = next(queue._ordered(classes), None)
                assert row_next is None or (
                    queue._moving and queue._moving_bytes + lanes.sizes[row_next] > IN_FLIGHT_BYTES_MAX
                ), f"{row_next} waits for nobody"
            assert len(queue._moving) == 1 or queue._moving_bytes <= IN_FLIGHT_BYTES_MAX
    await lanes.end()
