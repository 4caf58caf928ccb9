"""One seed, whole: lives of a service over one disk, and what became of them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.chunk import envelope, sealed_file
from kvstore.movement import pieces
from kvstore.spec import ENVELOPES
from kvstore.tiers.nvme import newest, plain
from tests.sim.books import settle_down
from tests.sim.clients import Client
from tests.sim.cloud import Cloud, has_cloud
from tests.sim.hasty import HastyClient
from tests.sim.knowledge import Knowledge
from tests.sim.life import Life, Setup
from tests.sim.nemesis import Nemesis, draw_errors
from tests.sim.oracle import Oracle
from tests.sim.trace import SimulationFailure, Trace
from tests.sim.warm import reads_warm
from tests.simulated import SeededRandom, SimulatedDisk, simulate
from tests.simulated.disk import DiskStopped

LEAVE_S_MAX = 200.0
"""Simulated seconds in which those who use a service stop once they are told to."""


@dataclass
class Outcome:
    """What a run came to. ``failure`` None: every promise was kept."""

    seed: int
    digest: str = ""
    failure: BaseException | None = None
    last: list[str] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    name: str = ""
    again: str = ""
    steps: int = 0
    recovery_steps: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or f"seed {self.seed}"
        self.again = self.again or f"--seed {self.seed}"

    def told(self) -> str:
        """What somebody needs to see it again."""
        return "\n".join(
            [
                *self.last,
                f"{self.name} failed: {self.failure!r}",
                f"again, with every line: python -m tests.sim {self.again}",
            ]
        )


class World:
    """A disk, what was promised on it, and the lives over it."""

    def __init__(
        self, seed: int, *, echo: bool = False, is_calm: bool = False, is_cloudy: bool = False, is_hasty: bool = False
    ) -> None:  # fmt: skip
        self.seed = seed
        self.chance = random.Random(seed)
        self.setup = Setup.drawn(self.chance)
        self.is_calm = is_calm
        self._client = HastyClient if is_hasty else Client
        self.room_bytes = self.setup.device_bytes
        self.trace = Trace(lambda: asyncio.get_running_loop().time())
        self.trace.echo = echo
        self.disk = SimulatedDisk(seed, capacity_bytes=self.setup.file_system_bytes)
        self.oracle = Oracle(self.trace)
        self.cloud = Cloud(seed) if is_cloudy or has_cloud(seed) else None
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
        life = Life(
            self._setup(number), self.disk, self.oracle, self.trace, self.chance, self.seed * 1000 + number, self.cloud
        )  # fmt: skip
        ending = self.chance.choice(("clean", "kill", "kill", "crash", "crash", "crash"))
        self.trace.add("world", f"life {number}, to end with {ending}")
        if self.chance.random() < 0.15:
            self.disk.stop_after = self.disk.steps + self.chance.randrange(12)
        if self.chance.random() < 0.25:
            self.trace.add("world", f"starts with errors: {draw_errors(life, self.chance)}")
        is_clean = False
        if await life.start():
            life.disk.rates.clear()
            if self.cloud is not None:
                self.oracle.verify_objects(self.cloud)
            is_clean = await self._serve(life, ending)
        await life.buried()
        self.totals["faults"] += life.disk.injected
        if is_clean:
            return
        if ending == "crash":
            self.disk.crash()
        else:
            self.disk.kill()
        self.totals["crashes"] += 1

    def _setup(self, number: int) -> Setup:
        """Of a life. Now and then an operator gives the device less room, for one life or more."""
        if self.chance.random() < 0.15:
            share = self.chance.choice((0.5, 0.7, 1.0))
            self.room_bytes = int(self.setup.device_bytes * share) // 4096 * 4096
        return replace(self.setup, device_bytes=self.room_bytes, envelope=self._envelope(number))

    def _envelope(self, number: int) -> str:
        """Some seeds turn envelopes on and off from life to life; not where the device may have no room to say so."""
        turns = self.seed % 3 == 1 and self.setup.file_system_bytes is None
        return ENVELOPES[(self.seed // 3 + number) % len(ENVELOPES)] if turns else self.setup.envelope

    async def _serve(self, life: Life, ending: str) -> bool:
        """True when it came to a clean stop."""
        chance = self.chance
        if life.nvme is not None and chance.random() < 0.5:
            await life.unless_over(self.oracle.verify(life))
        if chance.random() < 0.3:
            self.disk.stop_after = self.disk.steps + chance.randrange(200)
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in range(chance.randint(3, 5)):
            client = self._client(f"client-{number}", life, chance, self.known)
            life.tasks.append(loop.create_task(client.run(stopping)))
            if reads_warm(self.seed):
                life.tasks.append(loop.create_task(client.warm.run(stopping)))
        if not self.is_calm and chance.random() < 0.7:
            life.tasks.append(loop.create_task(Nemesis(life, chance).run(stopping)))
        if self.cloud is not None:
            life.tasks.append(loop.create_task(self._changing(self.cloud, stopping)))
        try:
            await asyncio.wait_for(life.over.wait(), chance.choice((0.1, 1.0, 5.0, 20.0)))
        except TimeoutError:
            pass
        if life.over.is_set() or (ending != "clean" and chance.random() < 0.5):
            return False
        stopping.set()
        ends = [loop.create_task(asyncio.wait(life.tasks)), loop.create_task(life.over.wait())]
        await asyncio.wait(ends, timeout=LEAVE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
        for each in ends:
            each.cancel()
        if not life.over.is_set():
            left = [task for task in life.tasks if not task.done()]
            self.trace.check(not left, f"{LEAVE_S_MAX} s after they were told to stop these go on: {left}")
            await asyncio.gather(*life.tasks)
            await settle_down(life)
        if ending != "clean" or life.over.is_set():
            return False
        is_clean = await life.stop()
        self.trace.add("world", "stopped" if is_clean else "stopped short")
        return is_clean

    async def _changing(self, cloud: Cloud, stopping: asyncio.Event) -> None:
        """One weather after another beyond the node, until told to stop; then it is calm."""
        try:
            while not stopping.is_set() and not self.is_calm:
                self.trace.add("cloud", cloud.change())
                await asyncio.sleep(cloud.chance.choice((0.05, 0.5, 3.0)))
        finally:
            cloud.calm()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A task that died unseen is a bug, unless its process had."""
        error = context.get("exception")
        if isinstance(error, SimulationFailure):
            self.trace.failure = self.trace.failure or error


class _Listener(logging.Handler):
    """The service logs a traceback where it survives a bug of its own: that is a failure here."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(logging.ERROR)
        self._trace = trace

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and self._trace.failure is None:
            self._trace.add("FAILURE", f"{record.getMessage()}: {error!r}")
            self._trace.failure = error


@contextmanager
def surroundings(trace: Trace, setup: Setup) -> Iterator[None]:
    """Constants of the service that a small simulation must draw too; its log goes nowhere."""
    log, listener = logging.getLogger("kvstore"), _Listener(trace)
    before, pieces.PIECE_BYTES = pieces.PIECE_BYTES, setup.group_bytes
    count_max, newest.COUNT_MAX = newest.COUNT_MAX, setup.newest_count_max
    randoms = envelope._random, sealed_file._random, plain._random
    envelope._random = sealed_file._random = plain._random = SeededRandom(0)
    propagates, log.propagate = log.propagate, False
    log.addHandler(listener)
    try:
        yield
    finally:
        pieces.PIECE_BYTES = before
        newest.COUNT_MAX = count_max
        envelope._random, sealed_file._random, plain._random = randoms
        log.propagate = propagates
        log.removeHandler(listener)


def run_seed(
    seed: int, *, echo: bool = False, is_calm: bool = False, is_cloudy: bool = False, is_hasty: bool = False,
    **changes: Any,
) -> Outcome:  # fmt: skip
    """Run one seed to its end or its first broken promise. ``is_cloudy``: shared tiers lie beyond the node, whatever
    the seed says. ``is_hasty``: clients give calls up."""
    world = World(seed, echo=echo, is_calm=is_calm, is_cloudy=is_cloudy, is_hasty=is_hasty)
    world.setup = replace(world.setup, **changes)
    outcome = Outcome(seed, again=f"--seed {seed}" + " --cloud" * is_cloudy + " --haste" * is_hasty)
    with surroundings(world.trace, world.setup):
        try:
            simulate(world.run(), seed=seed)
        except Exception as error:
            outcome.failure = world.trace.failure or error
        except DiskStopped as error:
            outcome.failure = SimulationFailure(f"somebody outlived the process: {error!r}")
    outcome.last = list(world.trace.last)
    outcome.totals = world.totals
    outcome.digest = world.trace.digest(world.disk.trace_digest())
    return outcome
