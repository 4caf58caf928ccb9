"""Warms up a node that begins: it brings what other nodes fetch most of a model, once an engine registers that model.

Nodes leave hints in the Redis that they share. A hint only names chunks: their bytes come from the tiers, and are
checked like all others. Nothing is evicted for it, one model's share is bounded, and requests go first: reads have no
classes, so a warm-up takes a few chunks at a time, and only while no request waits for a tier.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import aclosing

from kvstore.catalog import ROOT_ROW
from kvstore.catalog.spaces import Model
from kvstore.chunk import Sealing, open_file, seal_file
from kvstore.controller import ChainQuery, Controller, Parts
from kvstore.controller.operators import Operators
from kvstore.directory import NodeDirectory
from kvstore.directory.hints import CHAIN_COUNT_MAX, HotRun, pack_hints, unpack_hints
from kvstore.errors import KVStoreError
from kvstore.seams import EnvelopeRing
from kvstore.spec import Exactness, Provenance

LOOK_S = 1.0
"""Seconds between two looks for newly registered models."""
GIVE_S = 5.0
"""Seconds between two times at which the node gives its hints."""
HOT_COUNT = 64
"""Prefixes in hints, of all models together."""
YOUNG, FULL = 0.5, 0.9
"""The part of memory up to which it is young, and the part up to which a warm-up fills it: engines' stores need room,
too."""
PIECE_COUNT = 16
"""Chunks that are brought at a time."""
BUSY_STEP_S, BUSY_S_MAX = 0.1, 60.0
"""Seconds between two looks whether requests wait for a tier, and after which a warm-up gives up because of them."""
_log = logging.getLogger("kvstore.server")


class Warming:
    """One tenant's. ``kind`` and ``ring``: the envelope of hints, as that of copies in Redis. ``byte_count_max``: the
    most that is brought for each model."""

    def __init__(
        self, parts: Parts, controller: Controller, operators: Operators, directory: NodeDirectory,
        envelope: tuple[str, EnvelopeRing], byte_count_max: int,
    ) -> None:  # fmt: skip
        self._parts = parts
        self._controller = controller
        self._operators = operators
        self._directory = directory
        self._kind, self._ring = envelope
        self._byte_count_max = byte_count_max
        self._known: set[bytes] = set()
        """Fingerprints of models that were warmed up since the start, or needed no warm-up."""

    async def run(self) -> None:
        """Give and follow hints, for ever."""
        clock = self._parts.clock
        given_s = clock.monotonic()
        while True:
            await clock.sleep(LOOK_S)
            self._known &= self._parts.catalog.models.keys()  # those of forgotten models would collect
            for model in [each for each in self._models() if each.fingerprint not in self._known]:
                self._known.add(model.fingerprint)
                await self._tried(model)
            if clock.monotonic() - given_s >= GIVE_S:
                given_s = clock.monotonic()
                await self._give()

    def _models(self) -> list[Model]:
        """Return the registered models; namespaces of bytes have no layers."""
        return [each for each in self._parts.catalog.models.values() if each.spec.layers]

    async def _tried(self, model: Model) -> None:
        try:
            if self._used <= YOUNG and (chains := await self._hinted(model)):
                await self._warm_up(model, chains)
        except KVStoreError as error:
            _log.warning("a warm-up ended early", extra={"model": model.spec.model_id, "reason": error.message})

    # ------------------------------------------------------------ give

    async def _give(self) -> None:
        for model in self._models():
            runs, heat = self._runs(model)
            if not runs:
                continue
            data = pack_hints(runs)
            if self._kind != "none":
                data = seal_file(Sealing(self._kind, self._ring.newest), _about(model), data)
            try:
                await self._directory.give_hints(model.fingerprint, heat, data)
            except KVStoreError as error:
                _log.debug("hints were not given", extra={"reason": error.message})
                return

    def _runs(self, model: Model) -> tuple[list[HotRun], float]:
        """Return the model's hottest runs, and the heat of all of them."""
        space = model.seen(None, Exactness.EXACT, Provenance.IN_CONTEXT)
        table, places = self._parts.catalog.table, {-1: -1}
        rows: list[int] = []
        runs: list[HotRun] = []
        heat = 0.0
        hottest = self._parts.heat.hottest(HOT_COUNT)
        for index, each in enumerate(hottest):
            if self._parts.catalog.space_of(each.row) is not space or each.above not in places:
                continue
            stop = hottest[each.above].row if each.above >= 0 else ROOT_ROW
            digests = [table.digests[row] for row in self._climb(each.row, stop)]
            if len(digests) <= CHAIN_COUNT_MAX:
                places[index] = len(rows)
                rows.append(each.row)
                runs.append((places[each.above], digests[::-1]))
                heat += each.own_heat
        return runs, heat

    def _climb(self, row: int, stop: int) -> Iterator[int]:
        for _ in range(CHAIN_COUNT_MAX + 1):
            if row in (stop, ROOT_ROW):
                return
            yield row
            row = self._parts.catalog.table.parents[row]

    # ------------------------------------------------------------ follow

    async def _hinted(self, model: Model) -> list[list[bytes]]:
        """Return the chains that another node hints at. Raises DataLoss for what is no hint of ours."""
        data = await self._directory.hints(model.fingerprint)
        if data is None:
            return []
        opened = open_file(self._ring, _about(model), data)
        if opened is None or (self._kind != "none" and opened == data):
            return []  # sealed with a key that is not here, or not sealed
        return unpack_hints(opened)

    async def _warm_up(self, model: Model, chains: list[list[bytes]]) -> None:
        """Bring the chains one after the other, the hottest first, until the bytes or the room are used up."""
        size = model.seen(None, Exactness.EXACT).known_bytes(model.spec.chunk_tokens)
        left = self._byte_count_max // size if size else 0
        session = self._controller.open_session()
        asked: dict[bytes, None] = {}
        try:
            for chain in chains:
                end = sum(digest in asked for digest in chain)
                while end < len(chain):
                    count = min(PIECE_COUNT, len(chain) - end, left - len(asked))
                    if count <= 0 or not await self._is_free_for(count * size):  # hints may overlap oddly
                        return
                    end += count
                    query = ChainQuery(model.fingerprint, chain[:end])
                    async with aclosing(self._operators.prefetch(session, query, dry_run=False)) as news:
                        async for _ in news:
                            pass
                    asked.update(dict.fromkeys(chain[:end]))
        finally:
            await self._controller.close_session(session)
            _log.info("warmed up", extra={"model": model.spec.model_id, "chunks": len(asked)})

    async def _is_free_for(self, byte_count: int) -> bool:
        """Wait until no request waits for a tier. Return True when there is room in memory, too."""
        clock = self._parts.clock
        until_s = clock.monotonic() + BUSY_S_MAX
        while self._parts.movement.loads.loading_bytes and clock.monotonic() < until_s:
            await clock.sleep(BUSY_STEP_S)
        arena = self._parts.arena
        return (
            not self._parts.movement.loads.loading_bytes
            and arena.used_bytes + byte_count <= FULL * arena.capacity_bytes
        )

    @property
    def _used(self) -> float:
        return self._parts.arena.used_bytes / self._parts.arena.capacity_bytes


def _about(model: Model) -> bytes:
    return b"hints " + model.fingerprint
