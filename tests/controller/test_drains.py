"""How long a drain waits: as long as less waits than ever before, on simulated parts."""

from __future__ import annotations

from itertools import chain, cycle
from types import SimpleNamespace
from typing import Any

from kvstore.controller.operators import Operators, Selection
from kvstore.controller.operators.changes import BATCH_S_MAX, LOOK_AGAIN_S
from kvstore.controller.operators.drains import ALONE, Drains
from kvstore.controller.operators.turns import Turns
from kvstore.controller.operators.values import Tally
from kvstore.errors import Unavailable
from kvstore.movement import Transit
from tests.controller.service import Service
from tests.scenario import scenario
from tests.tiers.service import DeviceService


class PassingTime:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def settled_s(*backlogs: int) -> float:
    """The seconds until a drain ends whose looks find these backlogs, the last two in turns."""
    service, clock = Service(), PassingTime()
    parts: Any = SimpleNamespace(clock=clock, catalog=service.parts.catalog, movement=None)
    controller = service.controller
    drains = Drains(parts, controller.claims, controller.reservations, Turns(service.clock))
    looks = chain(backlogs, cycle(backlogs[-2:]))

    class Movement:
        all_writes = ()

        @property
        def backlog_count(self) -> int:
            assert clock.now_s < 10 * BATCH_S_MAX, "a busy service is waited for without an end"
            return next(looks)

    drains._movement = Movement()  # type: ignore[assignment]  # simulated
    await drains.settle(Tally(), dry_run=False)
    return clock.now_s


async def test_what_comes_and_goes_is_no_progress() -> None:
    assert await settled_s(3, 2, 3) <= BATCH_S_MAX + 2 * LOOK_AGAIN_S


async def test_a_drain_waits_while_less_and_less_is_left() -> None:
    falling = [count for count in range(300, 0, -1) for _ in range(round(BATCH_S_MAX / LOOK_AGAIN_S) - 1)]
    assert await settled_s(*falling[:2000], 0, 0) > 2 * BATCH_S_MAX


async def test_chunks_that_are_written_while_it_looks_for_more_are_counted() -> None:
    """A look at many chunks pauses: a fast device has written the first ones before the last one is found."""
    service = Service()
    await service.store(service.controller.open_session(), 1, 2, 3)
    controller, real = service.controller, service.parts.movement
    drains = Drains(service.parts, controller.claims, controller.reservations, Turns(PassingTime()))
    at_once: Any = SimpleNamespace(takes=lambda row: True, add=lambda row, priority: None, parked=())
    drains._movement = SimpleNamespace(  # type: ignore[assignment]  # simulated
        memory=real.memory, shared_tiers=real.shared_tiers, writes=[at_once], all_writes=[], backlog_count=0
    )
    for dry_run in (True, False):
        tally = Tally()
        await drains.stores(tally, dry_run=dry_run)
        assert tally.counts[Transit.WRITTEN] == 3, dry_run


@scenario(lambda: DeviceService())
async def test_what_a_tier_refuses_is_not_called_written(service: DeviceService) -> None:
    """A refused chunk leaves the backlog, and is tried again later."""

    async def refuse(*_: Any) -> Any:
        raise Unavailable("the device is off")

    service.nvme.write = refuse  # type: ignore[method-assign]  # a device that fails
    await service.store(service.session, 1, 2, 3)
    operators = Operators(service.parts, service.controller)
    for _ in range(2):  # the second drain finds no backlog
        drained = operators.drain(Selection(), end=False, service=False, dry_run=False)
        tally = [news async for news in drained][-1].tally
        assert tally.counts == {Transit.FAILED: 3}
        assert "the device is off" in tally.problem
    for is_service in (False, True):
        drained = operators.drain(Selection(), end=False, service=is_service, dry_run=True)
        promised = [news async for news in drained][-1].tally
        drained = operators.drain(Selection(), end=False, service=is_service, dry_run=False)
        tally = [news async for news in drained][-1].tally
        assert tally.counts == {Transit.FAILED: 3, **({ALONE: 3} if is_service else {})}
        assert (promised.counts, promised.problem) == (tally.counts, tally.problem)
