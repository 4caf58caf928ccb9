"""Fetches without a call: a client remembers where chunks lie, copies at some steps, and asks the generations at a
later one. What it does is the client's own code; only its threads and its mapping are simulated.

The service runs between the steps. And it runs within them: a reader on another processor goes on while the service
frees memory, just after a generation has changed and just after the bytes have.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
from kvstore_client.fetch.target import given_places
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import Chain as LookedUpChain
from kvstore_client.lookup.presence import ChainName, Presence
from kvstore_client.planes.shared_memory.chunk import Chunk
from kvstore_client.planes.shared_memory.known import KnownChunks
from kvstore_client.planes.shared_memory.prefix import MappedPrefix
from kvstore_client.planes.shared_memory.session import MappedSession
from kvstore_client.planes.shared_memory.warm import WarmPrefix
from numpy.typing import NDArray

from kvstore.chunk import slab_parts
from kvstore.controller import FetchResult
from kvstore.handoff.messages import LookedUp, Question
from kvstore.keys import presence_salt
from kvstore.seams import FaultPoints
from kvstore.seams.memory import Bytes, Mapping
from kvstore.server.handoff import _chain as chain_of
from kvstore.server.render import render_fetch
from kvstore.spec import Exactness, Provenance
from kvstore.v1 import cache_pb2 as pb
from tests.presence.shown import words_of
from tests.sim.models import Chain, body
from tests.sim.oracle import row_of, told
from tests.simulated import BytearrayMemory, LoopClock
from tests.specs import bits

if TYPE_CHECKING:
    from tests.sim.life import Life

KEPT_MAX = 8
"""The most chains that a client fetches again without a call."""
STEPS_MAX = 4


def reads_warm(seed: int) -> bool:
    """True for seeds whose clients fetch without a call: they tell their uses, which changes what leaves."""
    return seed % 2 == 0


class Processors:
    """The memory of a service, and the readers on other processors, which go on whenever its bytes are given away."""

    def __init__(self, faults: FaultPoints) -> None:
        self.copies: list[WarmCopy] = []
        self._memory = BytearrayMemory()
        faults.arm("arena.free.bumped", self.go_on)

    def go_on(self) -> None:
        for copy in list(self.copies):
            copy.go_on()

    def read_only_to_others(self, name: str, byte_count: int, *, is_moved: bool = True) -> Mapping:
        return _SeenMapping(self._memory.read_only_to_others(name, byte_count, is_moved=is_moved), self.go_on)

    def writable_by_others(self, name: str, byte_count: int) -> Mapping:
        return self._memory.writable_by_others(name, byte_count)


class _SeenMapping:
    """A mapping that others read while its bytes change."""

    def __init__(self, mapping: Mapping, on_forgotten: Callable[[], None]) -> None:
        self._mapping = mapping
        self._on_forgotten = on_forgotten
        self.descriptor, self.prefault = mapping.descriptor, mapping.prefault
        self.bytes, self.close = mapping.bytes, mapping.close

    def forget(self, offset: int, byte_count: int) -> None:
        self._mapping.forget(offset, byte_count)
        self._on_forgotten()


class _Call:
    """A call whose answer is here, and after which nothing comes."""

    def __init__(self, reply: pb.FetchResponse) -> None:
        self._replies = iter([reply])

    def __next__(self) -> pb.FetchResponse:
        return next(self._replies)

    def cancel(self) -> None:
        """Do nothing: it is over."""


class _Returns:
    """Keeps leases: whoever fetched gives them back."""

    def lease(self, lease_id: int) -> None: ...

    def soon(self, call: Callable[[], object]) -> None: ...


class SimulatedSession(MappedSession):
    """A session whose service runs in the same process: memory is not mapped, and questions are not sent."""

    def __init__(self, life: Life) -> None:
        self._controller, self._arena = life.controller, life.arena
        self._is_told, self._has_pool, self.metadata = True, False, ()
        self.generations: NDArray[np.uint64] = life.arena.generations.bytes.view(np.uint64)
        self.warm = KnownChunks()
        self.returns = _Returns()  # type: ignore[assignment]  # simulated
        self.presence = Presence(self._take, lambda: True, LoopClock())
        self.presence.ask()

    def _take(self, question: Question) -> bool:
        """Serve what the client asks and reports by packets."""
        if isinstance(question, LookedUp):
            self._controller.used(map(chain_of, question.used, question.used_amounts))
        elif self.presence is not None:
            self.presence._token_count_max = self._controller.token_count_max
            self.presence._words = words_of(self._controller.parts.catalog.presence)
        return True

    def region(self, index: int) -> Bytes:
        return self._arena.regions[index].mapping.bytes

    async def fetched(self, chain: Chain, result: FetchResult) -> MappedPrefix:
        """Take what a call found, as the server renders it."""
        reply = await render_fetch(result, self._controller.begin_long_work())
        self.cache = SimpleNamespace(Fetch=lambda *_, **__: _Call(reply))  # type: ignore[assignment]  # simulated
        wanted = Wanted.of(chain.spec, None, None, chain.hidden, False)
        request = pb.FetchRequest(query=pb.ChainQuery(**name_of(chain)._asdict()))
        return self.open_prefix(wanted, request, chain.digests, 1.0)


class WarmReader:
    """One client: it knows some of the service's memory, and fetches from there."""

    def __init__(self, life: Life, chance: random.Random) -> None:
        self._life = life
        self._chance = chance
        self._session = SimulatedSession(life)
        self._chains: list[Chain] = []

    def leave(self) -> None:
        """End the session. Copies under way go on, as threads do, and what they bring must be right."""
        self._session.warm.clear()
        self._session = SimulatedSession(self._life)
        self._chains.clear()

    async def note(self, chain: Chain, result: FetchResult) -> None:
        """Remember what a call found in memory."""
        if (await self._session.fetched(chain, result)).was_in_memory:
            self._chains = [*[each for each in self._chains if each != chain][1 - KEPT_MAX :], chain]

    def opened(self) -> WarmCopy | None:
        """Begin a fetch of something known. None where the client would call."""
        presence = self._session.presence
        if not self._chains or presence is None:
            return None
        life, chain = self._life, self._chance.choice(self._chains)
        name = name_of(chain)
        salt = presence_salt(name.fingerprint, Provenance.IN_CONTEXT, Exactness.EXACT)
        found = presence.look_up([LookedUpChain(salt, chain.digests, chain.spec.chunk_tokens)])
        if found is None:
            return None
        wanted = Wanted.of(chain.spec, None, None, (), False)
        prefix = self._session.open_warm(wanted, name, chain.digests, found[0])
        if prefix is None:
            self._chains.remove(chain)  # until a call finds it again
            return None
        for index in range(found[0].hit_count):
            row = row_of(life, chain.name(index, None))
            life.trace.check(row is not None and row in life.memory, f"{chain}: chunk {index} is shown and not there")
        return WarmCopy(life, chain, wanted, prefix, self._chance)

    async def run(self, stopping: asyncio.Event) -> None:
        """Fetch again and again, until told to stop."""
        chance, life = self._chance, self._life
        try:
            while not stopping.is_set() and not life.is_over:
                copy = self.opened()
                while copy is not None and not copy.is_over:
                    copy.step()
                    await asyncio.sleep(chance.choice((0.0, 0.01, 0.3, 3.0)))
                await asyncio.sleep(chance.choice((0.001, 0.01, 0.1, 0.3)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not life.is_over:
                life.trace.failure = life.trace.failure or error
                life.trace.add("FAILURE", f"a fetch without a call: {error!r}")
                life.over.set()


class WarmCopy:
    """One fetch without a call, a step at a time: copies, and then the check that decides if they count."""

    def __init__(self, life: Life, chain: Chain, wanted: Wanted, prefix: WarmPrefix, chance: random.Random) -> None:
        self._life, self._chain, self._prefix, self._chance = life, chain, prefix, chance
        self._target = given_places(wanted, None)(prefix.token_count)
        self._layers = range(len(wanted.layers))
        self._bad: set[int] = set()
        self._steps = self._copies(life.faults)
        self.is_over = False
        life.processors.copies.append(self)

    def _copies(self, faults: FaultPoints) -> Iterator[None]:
        runs = self._prefix.runs(0)
        fused = self._target.fused(runs)
        if fused is None:
            for layer in self._layers:
                self._target.copy_layer(layer, runs, self._bad, faults)
                yield
            return
        for piece in fused.pieces(faults, self._chance.randint(1, STEPS_MAX)):
            piece()
            yield

    def step(self, *, is_within: bool = False) -> None:
        """Copy some more; after the last copy, check. ``is_within``: the service is in the middle of something."""
        if next(self._steps, self) is self:
            self.is_over = True
            self._life.processors.copies.remove(self)
            self._settle(is_within)

    def go_on(self) -> None:
        """Take some steps, or all, while the service gives memory away."""
        for _ in range(self._chance.choice((0, 1, STEPS_MAX + 1))):
            if not self.is_over:
                self.step(is_within=True)

    def _settle(self, is_within: bool) -> None:
        good, totals = self._prefix.settle(self._bad), self._life.oracle.totals
        totals["warm_stale"] += good < self._prefix.token_count
        for chunk in self._prefix.chunks:
            if chunk.token_start < good:
                totals["warm"] += 1
                self._judge(chunk, is_within)

    def _judge(self, chunk: Chunk, is_within: bool) -> None:
        """The bytes count that were stored under that name, and lie where the catalog has it."""
        life, index = self._life, chunk.token_start // self._chain.spec.chunk_tokens
        name, place = self._chain.name(index, None), (chunk.slot, chunk.generation)
        if not (is_within or life.is_over):
            life.trace.check(_is_at(life, row_of(life, name), chunk), f"{told(name)} counts at {place} and has gone")
        if place not in life.oracle.tainted:
            same = all(self._is_right(chunk, layer, body(name, chunk.layout)) for layer in self._layers)
            life.trace.check(same, f"{told(name)} was copied from {place} with other bytes")

    def _is_right(self, chunk: Chunk, layer: int, expected: Sequence[Bytes]) -> bool:
        planes = list(map(bits, self._target.layer(layer, self._prefix.token_count)))
        slab = chunk.layout.slab_of_layer[layer]
        for part in slab_parts(chunk.layout, slab, expected[slab]):
            start, stop = chunk.token_start + part.token_start, chunk.token_start + part.token_stop
            if not (planes[part.which][:, start:stop] == part.array[0]).all():
                return False
        return True


def _is_at(life: Life, row: int | None, chunk: Chunk) -> bool:
    """True when the catalog has the chunk there, or gave it up while the service itself reads it."""
    if row is not None and row in life.memory:
        placement = life.memory.placement(row)
        if (placement.slot, placement.generation) == (chunk.slot, chunk.generation):
            return True
    return chunk.slot in life.memory.tier._leaving


def name_of(chain: Chain) -> ChainName:
    return ChainName(chain.query().fingerprint, pb.EXACTNESS_EXACT, pb.PROVENANCE_IN_CONTEXT)
