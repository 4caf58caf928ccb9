"""One seed, whole: lives of a service over one disk, and what became of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.controller import promotion
from kvstore.seams import SimulatedDisk, simulate
from tests.sim.books import settle_down
from tests.sim.clients import Client, Knowledge
from tests.sim.life import Life, Setup
from tests.sim.oracle import Oracle
from tests.sim.trace import SimulationFailure, Trace


@dataclass
class Outcome:
    """What a run came to. ``failure`` None: every promise was kept."""

    seed: int
    digest: str = ""
    failure: BaseException | None = None
    last: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """What somebody needs to see it again."""
        return "\n".join(
            [
                *self.last,
                f"seed {self.seed} failed: {self.failure!r}",
                f"again, with every line: python -m tests.sim --seed {self.seed}",
            ]
        )


class World:
    """A disk, what was promised on it, and the lives over it."""

    def __init__(self, seed: int, *, echo: bool = False, is_calm: bool = False) -> None:
        self.seed = seed
        self.chance = random.Random(seed)
        self.setup = Setup.drawn(self.chance)
        self.is_calm = is_calm
        self.trace = Trace(lambda: asyncio.get_running_loop().time())
        self.trace.echo = echo
        self.disk = SimulatedDisk(seed, capacity_bytes=self.setup.file_system_bytes)
        self.oracle = Oracle(self.trace)
        self.known = Knowledge()
        self.totals = self.oracle.totals

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(self._unhandled)
        self.trace.add("world", f"{self.setup}")
        for number in range(self.chance.randint(3, 6)):
            self.totals["lives"] += 1
            await self._live(number)
            if self.trace.failure is not None:
                raise self.trace.failure

    async def _live(self, number: int) -> None:
        life = Life(self.setup, self.disk, self.oracle, self.trace, self.chance, self.seed * 1000 + number)
        ending = self.chance.choice(("clean", "kill", "kill", "crash", "crash", "crash"))
        self.trace.add("world", f"life {number}, to end with {ending}")
        if self.chance.random() < 0.15:
            self.disk.stop_after = self.disk.steps + self.chance.randrange(12)
        if await life.start():
            await self._serve(life, ending)
        await life.buried()
        if life.nvme is None and ending == "clean":
            return
        if ending == "crash":
            self.disk.crash()
        else:
            self.disk.kill()
        self.totals["crashes"] += 1
        self.totals["faults"] += life.disk.injected

    async def _serve(self, life: Life, ending: str) -> None:
        chance = self.chance
        if life.nvme is not None and chance.random() < 0.5:
            await self._verified(life)
        if chance.random() < 0.3:
            self.disk.stop_after = self.disk.steps + chance.randrange(200)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in range(chance.randint(3, 5)):
            client = Client(f"client-{number}", life, chance, self.known)
            life.tasks.append(loop.create_task(client.run(stopping)))
        try:
            await asyncio.wait_for(life.over.wait(), chance.uniform(0.5, 20.0))
        except TimeoutError:
            pass
        if life.over.is_set() or (ending != "clean" and chance.random() < 0.5):
            return
        stopping.set()
        await asyncio.wait([*life.tasks, loop.create_task(life.over.wait())], timeout=200.0)
        await asyncio.gather(*life.tasks)
        if life.over.is_set():
            return
        await settle_down(life)
        if ending == "clean" and not life.over.is_set():
            await life.stop()
            self.trace.add("world", "stopped")

    async def _verified(self, life: Life) -> None:
        checking = asyncio.get_running_loop().create_task(self.oracle.verify(life))
        over = asyncio.get_running_loop().create_task(life.over.wait())
        await asyncio.wait([checking, over], return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not checking.done():
            life.tasks.append(checking)
            return
        error = checking.exception()
        if error is not None and not life.over.is_set():
            raise error

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task that died unseen is a bug, unless its process had."""
        error = context.get("exception")
        if isinstance(error, SimulationFailure):
            self.trace.failure = self.trace.failure or error


@contextmanager
def settings_of(setup: Setup) -> Iterator[None]:
    """Constants of the service that a small simulation must draw too."""
    before, promotion.GROUP_BYTES = promotion.GROUP_BYTES, setup.group_bytes
    try:
        yield
    finally:
        promotion.GROUP_BYTES = before


def run_seed(seed: int, *, echo: bool = False, is_calm: bool = False, **changes: Any) -> Outcome:
    """Run one seed to its end or its first broken promise."""
    world = World(seed, echo=echo, is_calm=is_calm)
    world.setup = replace(world.setup, **changes)
    outcome = Outcome(seed)
    with settings_of(world.setup):
        try:
            simulate(world.run(), seed=seed)
        except Exception as error:
            outcome.failure = world.trace.failure or error
    outcome.last = list(world.trace.last)
    outcome.totals = world.totals
    outcome.digest = world.trace.digest(world.disk.trace_digest())
    return outcome
