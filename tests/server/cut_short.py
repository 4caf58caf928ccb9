"""A whole simulated service, and calls of it that are cut short: cancelled in some turn of the event loop, as gRPC
cancels the call of a client that has gone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from kvstore.controller.operators import Operators, turns
from kvstore.controller.prefills import PartialPrefills
from kvstore.seams import pauses
from kvstore.seams.memory import Bytes
from kvstore.server import rpc
from kvstore.server.operators import AdminService
from kvstore.server.places import CallPlaces
from kvstore.server.prefills import PrefillService
from kvstore.server.services import CacheService
from kvstore.tiers import WritePolicy
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire import METADATA_SESSION
from tests.sim.books import QUIET_S_MAX, imbalance
from tests.sim.cloud import Cloud
from tests.sim.judge import Judge
from tests.sim.life import Life, Setup
from tests.sim.models import NARROW, Chain, body
from tests.sim.oracle import Oracle
from tests.sim.trace import Trace
from tests.simulated import SimulatedDisk, simulate
from tests.simulated.loop import SimulatedLoop

SEED = 7
LEFT_S = 30.0
"""Simulated seconds that callers wait."""
CALL_S_MAX = 300.0
"""Simulated seconds after which a call that was cancelled has ended: longer than any job takes."""
PAUSE_S = 0.05
"""Simulated seconds before the first look at the books; from look to look the pause doubles."""
TURNS_MAX = 400
"""Turns after which every call has ended by itself."""
ENDED_BY_AGE = ("tickets_expired", "store_expired_reservations", "leases_revoked")
"""Counters of what ended because it was too old. No test waits for that: a call gives back what it took."""
KEPT = Chain(NARROW, (900, 901))
"""Acknowledged before any call is cut short."""


class Blind(Oracle):
    """Lets copies go: operators of these tests remove them."""

    def watch(self, life: Life) -> None:
        return None


class Call:
    """The call, as a handler sees it."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def invocation_metadata(self) -> list[tuple[str, bytes]]:
        return [(METADATA_SESSION, self._secret)]

    def time_remaining(self) -> float | None:
        return LEFT_S

    async def abort(self, code: object, message: str, metadata: object) -> None:
        raise AssertionError(f"{code}: {message}")


class CutShort:
    """Cancels a call at the beginning of the turn ``number`` of the loop after its start. A turn in which the answer to
    what it waits for has come counts, too: the call is cancelled before it sees that answer."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.was_cancelled = False

    async def __call__(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what the call returns; None where it was cancelled."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        task, left = loop.create_task(call), self.number

        def turn() -> None:
            nonlocal left
            left -= 1
            if left == -1:
                self.was_cancelled = task.cancel()

        before, loop.at_turn = loop.at_turn, turn
        try:
            left_running = (await asyncio.wait([task], timeout=CALL_S_MAX))[1]
        finally:
            loop.at_turn = before
        assert not left_running, f"cancelled in turn {self.number}, it goes on: {task}"
        assert task.cancelled() is self.was_cancelled, f"cancelled in turn {self.number}, it ended with {task!r}"
        return None if self.was_cancelled else task.result()


class Bench:
    """A service with memory, a device, an engine and objects, and one client's session."""

    def __init__(self, disk: SimulatedDisk, **setup: Any) -> None:
        trace = Trace(lambda: asyncio.get_running_loop().time())
        self.cloud = Cloud(SEED)
        self.cloud._write = WritePolicy.BACK, WritePolicy.BACK
        self.life = Life(Setup(**setup), disk, Blind(trace), trace, random.Random(SEED), SEED, self.cloud)
        self.controller, parts = self.life.controller, self.life.parts
        parts.pins._limits = replace(parts.limits, pin_bytes_max=self.life.setup.arena_bytes)
        self._places = CallPlaces(4)
        operators = Operators(parts, self.controller)
        prefills = PartialPrefills(parts, self.controller.lookups, self.controller.tickets)
        self._services = {
            pb.DESCRIPTOR.services_by_name["CacheService"]: CacheService(self.controller, b"epoch"),
            admin_pb2.DESCRIPTOR.services_by_name["AdminService"]: AdminService(
                self.controller, operators, prefills, parts.clock, 1, None
            ),
            prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"]: PrefillService(
                self.controller, prefills, parts.profiles
            ),
        }
        self._judge = Judge(self.life)
        self._tasks = 0

    async def __aenter__(self) -> Bench:
        assert await self.life.start()
        self.session = self.controller.open_session()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None and not self.life.is_over:
            assert await self.life.stop()
        await self.life.buried()
        if self.life.trace.failure is not None:
            raise self.life.trace.failure

    def call(self, name: str, request: Any) -> Any:
        """Begin a call as the server does. Return its reply's coroutine, or the iterator of its replies."""
        for described, service in self._services.items():
            method = described.methods_by_name.get(name)
            if method is not None:
                wrap = rpc._streaming if method.server_streaming else rpc._unary
                function = self._places.placed(method, getattr(service, name))
                return wrap(function, name, self.life.parts.counters)(request, Call(self.session.secret))
        raise AssertionError(name)

    # ------------------------------------------------------------ calls that are not cut short

    def store(self, **step: Any) -> Coroutine[Any, Any, pb.StoreResponse]:
        reply: Coroutine[Any, Any, pb.StoreResponse] = self.call("Store", pb.StoreRequest(**step))
        return reply

    def reserve(self, chain: Chain, shards: int = 1) -> Coroutine[Any, Any, pb.StoreResponse]:
        digests = b"".join(chain.token_digests)
        return self.store(reserve=pb.Reserve(query=chain_of(chain), token_digests=digests, shards=shards))

    def staged(self, chain: Chain, reserved: pb.StoreResponse) -> list[pb.Fill]:
        """Put the wanted chunks' bytes into fresh staging. Return the fills that take them from there."""
        fills: list[pb.Fill] = []
        for number, state in enumerate(reserved.states):
            if state == pb.STORE_STATE_WANTED:
                layout = chain.layout(number, None)
                fills.append(self.staged_chunk(number, body(chain.name(number, None), layout), layout.strip_count))
        return fills

    def staged_chunk(self, number: int, slabs: Iterable[Bytes], strip_count: int) -> pb.Fill:
        pieces = list(slabs)
        byte_count = sum(piece.size for piece in pieces)
        staging = self.controller.create_staging(self.session, -(-byte_count // 4096) * 4096)
        at = 0
        for piece in pieces:
            staging.mapping.bytes[at : at + piece.size] = piece
            at += piece.size
        return pb.Fill(chunk=number, strip_first=0, strip_count=strip_count, staging_id=staging.staging_id)

    async def put(self, chain: Chain, level: int = pb.DURABILITY_LOCAL) -> None:
        """Store a whole chain, and see it reach a level."""
        reserved = await self.reserve(chain)
        fills = self.staged(chain, reserved)
        done = await self.store(commit=pb.Commit(reservation_id=reserved.reservation_id, fills=fills))
        assert done.committed_count == len(chain.digests), done
        self.free_staging()
        settled = await self.store(settle=self.settle(chain, level))
        reached = {each.durability for each in settled.levels if each.is_reached}
        assert level in reached, settled

    def settle(self, chain: Chain, level: int) -> pb.Settle:
        return pb.Settle(query=chain_of(chain), timeout_seconds=20.0, durability=level)  # type: ignore[arg-type]  # the number on the wire

    def free_staging(self) -> None:
        for staging_id in list(self.session.stagings):
            self.controller.close_staging(self.session, staging_id)

    async def reads(self, chain: Chain) -> None:
        """Fetch a chain: all of it is there, to the bit."""
        result = await self.controller.fetch_wide(self.session, chain.query())
        assert result.hit_count == len(chain.digests), f"{chain}: {result.hit_count} {result.reason.name}"
        async for news in self.controller.arrivals(result):
            assert not any(each.lost for each in news)
        for position in range(len(result.chunks)):
            assert self._judge.check_bytes(self.session, chain, result, position, None)
        self.controller.release(self.session, [result.lease_id])

    async def changed(self, **change: Any) -> admin_pb2.ChangeResponse:
        """Make an operator's change to its end, and return its last report."""
        reports: list[admin_pb2.ChangeResponse] = []
        await sent(self.call("Change", admin_pb2.ChangeRequest(**change)), reports)
        assert reports[-1].is_last
        assert not reports[-1].problem, reports[-1].problem
        return reports[-1]

    async def gone_from_node(self, chain: Chain) -> None:
        """Have all of the node's copies of a chain removed."""
        await self.changed(evict=admin_pb2.Evict(), selection=named(chain))
        assert not self.controller.lookups.lookup(chain.query()).hit_count
        self.life.parts.movement.shared_tiers._hints.clear()  # so that the tiers are asked anew

    async def on_the_device(self, chain: Chain) -> None:
        """Have memory give up a chain that the device has."""
        await self.changed(move=admin_pb2.Move(tier="nvme"), selection=named(chain))

    # ------------------------------------------------------------ afterwards

    async def balanced(self) -> None:
        """Wait until the books balance: what is off for good is a leak."""
        found, waited_s, pause_s = "the service is busy", 0.0, PAUSE_S
        while found and waited_s < QUIET_S_MAX:
            await asyncio.sleep(pause_s)
            waited_s, pause_s = waited_s + pause_s, 2 * pause_s
            movement = self.life.parts.movement
            if not (movement.backlog_count or movement.loads.loading_bytes):
                found = imbalance(self.life) or self._open()
        assert not found, found
        self._tasks = self._tasks or len(asyncio.all_tasks())

    def _open(self) -> str:
        """Return a description of what calls have left open; empty when that is nothing."""
        stats, parts = self.controller.stats(), self.life.parts
        movement = parts.movement
        counts = {
            "tickets": stats.ticket_count, "streams": stats.stream_count, "watchers": stats.watcher_count,
            "pinned bytes": stats.pinned_bytes, "stores being made": self.controller.reservations.chunk_count,
            "calls": self._places.lasting._count + self._places._others._count,
            "waits for the client": len(self.session._waits),
            "uses of models": sum(each.user_count for each in parts.catalog.models.values()),
            "waiters of writes": sum(len(each._waiters) for each in movement.all_writes),
            "tasks": len(asyncio.all_tasks()) - self._tasks if self._tasks else 0,
            **{name: stats.counters.get(name, 0) for name in ENDED_BY_AGE},
        }  # fmt: skip
        return ", ".join(f"{number} {name}" for name, number in counts.items() if number)


def chain_of(chain: Chain) -> pb.ChainQuery:
    query = chain.query()
    return pb.ChainQuery(fingerprint=query.fingerprint, digests=b"".join(query.digests), exactness=pb.EXACTNESS_EXACT)


def named(*chains: Chain) -> admin_pb2.Selection:
    """Select the chunks of these chains."""
    return admin_pb2.Selection(chain=b"".join(digest for each in chains for digest in each.digests))


async def sent(replies: AsyncIterator[Any], seen: list[Any]) -> None:
    """Take a handler's replies as gRPC does, which sends each of them."""
    async for reply in replies:
        await asyncio.sleep(0)
        seen.append(reply)


# ---------------------------------------------------------------- runs

Scenario = Callable[[Bench, CutShort], Awaitable[None]]


def cut_in_each_turn(scenario: Scenario, *, step: int = 1, left: Sequence[Chain] = (), **setup: Any) -> None:
    """Run a scenario again and again, its call cut short one turn of the loop later each time, until the call ends by
    itself; with ``step`` so many turns later. ``left``: chains on the device that a process left which was killed.
    All work that may pause between two items does so after each."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pauses, "STEP_S", -1.0)
        patched.setattr(turns, "STEP_S", -1.0)
        simulate(_each_turn(scenario, step, left, setup), seed=SEED)


async def _each_turn(scenario: Scenario, step: int, left: Sequence[Chain], setup: dict[str, Any]) -> None:
    disk = SimulatedDisk(SEED)
    if left:
        async with Bench(disk, **setup) as bench:
            for chain in left:
                await bench.put(chain)
            bench.life.end()
        disk.kill()
    async with Bench(disk, **setup) as bench:
        await bench.put(KEPT, pb.DURABILITY_OBJECT)
        await bench.balanced()
        for number in count(0, step):
            assert number < TURNS_MAX, "the call does not end by itself"
            cut = CutShort(number)
            try:
                await scenario(bench, cut)
                await bench.balanced()
                await bench.reads(KEPT)
            except BaseException as error:
                error.add_note(f"cut short in turn {number}")
                raise
            if not cut.was_cancelled:
                return


def fresh(cut: CutShort, length: int = 2) -> Chain:
    """A chain that is stored in this run alone."""
    return Chain(NARROW, (cut.number, *range(1, length)))
