"""One fixed scenario, cut at every step of the disk: by a kill and by a power cut, and once more while it recovers.

The scenario goes once round everything that writes: first files, chunks of several sizes, eviction, slots used again,
a file replaced by one of another slot size, a clean stop with its snapshot, a start from it, and a start without.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvstore.movement.parked import RETRY_S
from kvstore.spec import ENVELOPES, Durability
from tests.sim.books import settle_down
from tests.sim.clients import SETTLE_S, Client
from tests.sim.knowledge import Knowledge
from tests.sim.life import KIB, Life, Setup
from tests.sim.models import KEYS, NARROW, WIDE, Chain
from tests.sim.oracle import Oracle
from tests.sim.run import Outcome, run_seed, surroundings
from tests.sim.trace import Trace
from tests.simulated import SimulatedDisk, simulate
from tests.simulated.disk import DiskStopped

SETUP = Setup(arena_bytes=160 * KIB, arena_region_bytes=160 * KIB, device_bytes=176 * KIB, region_bytes=64 * KIB)
FIRST = [Chain(NARROW, (0, 1)), Chain(NARROW, (1, 2), 5, (1,)), Chain(WIDE, (0, 1), 8), Chain(NARROW, (2, 0, 1))]
SECOND = [Chain(WIDE, (1, 2)), Chain(NARROW, (0, 1, 1)), Chain(NARROW, (1, 1), 0, (1,))]
RETRIES = 3
THIRD = [Chain(WIDE, (2,), 8), Chain(NARROW, (2, 2))]
LIVES = ((FIRST, True), (SECOND, False), (THIRD, True))
"""What each life stores, and whether it stops by itself."""


NEVER = 1 << 30
SEED = 3


@dataclass(frozen=True)
class Cut:
    """Where the process ends: at a step of the disk (None: not at all), by a kill or a power cut; ``second``: so many
    steps into the recovery, once more. ``is_sealed``: the second life turns an envelope on, the third another one."""

    step: int | None
    power_cut: bool = False
    second: int | None = None
    is_sealed: bool = False

    def __str__(self) -> str:
        first = f"{self.step}{'p' if self.power_cut else ''}{'s' if self.is_sealed else ''}"
        return first if self.second is None else f"{first}:{self.second}"

    @staticmethod
    def parse(said: str) -> Cut:
        first, _, second = said.partition(":")
        return Cut(int(first.rstrip("ps")), "p" in first, int(second) if second else None, "s" in first)


class Scenario:
    """One passage through the scenario."""

    def __init__(self, seed: int = SEED, *, is_sealed: bool = False) -> None:
        self.seed, self.is_sealed = seed, is_sealed
        self.trace = Trace(lambda: asyncio.get_running_loop().time())
        self.disk = SimulatedDisk(seed)
        self.oracle = Oracle(self.trace)
        self.setup = SETUP
        self.lives = 0
        self.last = FIRST
        """What the last life that was not a recovery stored."""
        self.steps = 0
        self.recovery_steps = 0

    def _life(self) -> Life:
        chance = random.Random(self.seed)
        self.lives += 1
        setup = replace(self.setup, envelope=ENVELOPES[min(self.lives, 3) - 1]) if self.is_sealed else self.setup
        return Life(setup, self.disk, self.oracle, self.trace, chance, self.seed)

    async def run(self, cut: Cut) -> None:
        self.disk.stop_after = cut.step
        for chains, is_clean in LIVES:
            self.last = chains
            if not await self._lived(chains, is_clean=is_clean):
                break
            self._cut(power_cut=cut.power_cut and not is_clean)
            self.disk.stop_after = cut.step
        self.steps = self.disk.steps
        self._cut(power_cut=cut.power_cut)
        if cut.second is not None:
            self.disk.stop_after = self.steps + cut.second
            life = self._life()
            await life.start()
            await life.buried()
            self.recovery_steps = self.disk.steps - self.steps
            self._cut(power_cut=cut.power_cut)
        await self._is_well()

    def _cut(self, *, power_cut: bool) -> None:
        if power_cut:
            self.disk.crash()
        else:
            self.disk.kill()
        self.oracle.totals["crashes"] += 1

    async def _lived(self, chains: list[Chain], *, is_clean: bool) -> bool:
        """One life. False when it was cut short."""
        life = self._life()
        try:
            if not await life.start() or not await life.unless_over(self._busy(life, chains)):
                return False
            return await life.stop() if is_clean else True
        finally:
            await life.buried()

    async def _busy(self, life: Life, chains: list[Chain]) -> None:
        client = Client("client", life, random.Random(self.seed), Knowledge())
        for chain in chains:
            await client.put(chain)
            await client.fetch(chain)
        for _ in range(2):  # the second takes the first one's place
            await client.put_value(KEYS[0])
        await client.get_value(KEYS[0])

    async def _is_well(self) -> None:
        """After whatever happened: all that was promised is there, and the service takes more."""
        life = self._life()
        self.trace.check(await life.start(), "it does not start again")
        await self.oracle.verify(life)
        again = Client("again", life, random.Random(self.seed), Knowledge())
        await again.get_value(KEYS[0])
        for chain in self.last:  # what the cut left of it may be torn, and has to be looked at while it is there
            await again.put(chain)
            await self.oracle.verify(life)
        for chain in (*THIRD, *SECOND, *FIRST):
            await again.put(chain)
        await life.controller.close_session(again.session)
        await self.oracle.verify(life)
        for chain in (Chain(NARROW, (2, 2, 2)), Chain(WIDE, (2, 1))):
            client = Client("client", life, random.Random(self.seed), Knowledge())
            level = await client.put(chain)
            for _ in range(RETRIES):
                if level is Durability.LOCAL:
                    break
                await asyncio.sleep(RETRY_S + 1.0)  # it did not fit while others were being written
                level = (await life.controller.settle(chain.query(), SETTLE_S)).durability
            said = f"{chain} reaches only {level.name} after recovery: {life.controller.parts.movement.problems}"
            self.trace.check(level is Durability.LOCAL, said)
            await client.fetch(chain)
            await life.controller.close_session(client.session)
        await settle_down(life)
        await life.buried()


def passage(cut: Cut, *, echo: bool = False, seed: int = SEED) -> Outcome:
    """The scenario, cut once or twice."""
    scenario = Scenario(seed, is_sealed=cut.is_sealed)
    scenario.trace.echo = echo
    outcome = Outcome(seed, name=f"cut {cut}", again=f"--cut {cut}")
    with surroundings(scenario.trace, scenario.setup):
        try:
            simulate(scenario.run(cut), seed=seed)
        except (Exception, DiskStopped) as error:
            outcome.failure = scenario.trace.failure or error
    outcome.failure = outcome.failure or scenario.trace.failure
    outcome.last = list(scenario.trace.last)
    outcome.totals = Counter(scenario.oracle.totals)
    outcome.steps, outcome.recovery_steps = scenario.steps, scenario.recovery_steps
    outcome.digest = scenario.trace.digest(scenario.disk.trace_digest())
    return outcome


def every_cut(*, stride: int = 1, step: int = 1, is_sealed: bool = False) -> Iterator[Cut]:
    """Each ``step``-th step of the scenario, killed and without power; then each ``stride``-th of all of these with a
    second cut at every step of the recovery from it."""
    step_count = passage(Cut(None, is_sealed=is_sealed)).steps
    firsts = [
        Cut(number, power_cut, is_sealed=is_sealed) for number in range(step_count) for power_cut in (False, True)
    ]
    yield from (first for first in firsts if first.step % step == 0)
    for first in firsts[::stride]:
        recovery_steps = passage(replace(first, second=NEVER)).recovery_steps
        for second in range(recovery_steps):
            yield replace(first, second=second)


Job = int | Cut
"""A seed, or a cut."""
JOB_S_MAX = 300.0
"""Seconds that a job may take: hundreds of times what one takes."""


def run_job(job: Job, **world: bool) -> tuple[str, Counter[str]]:
    """Return the words to print (nothing when all is well), and the counts. ``world``: see ``run_seed``. A job that
    does not end says where it is and ends its process: a run once waited for such a seed for an hour, in silence."""
    faulthandler.dump_traceback_later(JOB_S_MAX, exit=True)
    try:
        outcome = passage(job) if isinstance(job, Cut) else run_seed(job, **world)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return outcome.told() if outcome.failure else "", outcome.totals
