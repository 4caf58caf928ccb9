"""Reads copies again: all of them slowly, to find damage before a reader does; copies that a crash left at once, before
a store relies on them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.catalog import Catalog, Copies
from kvstore.config import PolicySettings
from kvstore.errors import DataLoss, Unavailable
from kvstore.movement.names import ChunkNames
from kvstore.movement.removal import Removal
from kvstore.movement.sources import check_whole
from kvstore.movement.writes import Writes
from kvstore.seams import Clock
from kvstore.spec import MissReason
from kvstore.telemetry import Counters

IDLE_S = 1.0
ROUND_S_MIN = 600.0
"""Seconds from the start of one round that reads something to that of the next, at least: where little is stored the
same few chunks would be read all the time."""
CHECK_S_MIN = 0.02
"""Seconds from one check of a round to the next, at least: each takes the loop 0.3 ms, however small its chunk."""
ROWS_AT_ONCE = 4096
PROOFS_AT_ONCE = 8
PROOF_COUNT_MAX = 65_536
"""Copies that wait to be proven, at most."""
_log = logging.getLogger("kvstore.movement")


@dataclass(eq=False, slots=True)
class _Proof:
    """A copy that waits to be proven or is being proven. ``is_stored_anew``: its chunk is stored again, should it turn
    out that the copy cannot be made durable."""

    copies: Copies
    row: int
    ended: asyncio.Future[None]
    is_stored_anew: bool = False


class Checks:
    """Verifies every strip of every copy in turn, at policy.scrub_bytes_per_s or less; 0 turns that off. ``writes``
    write a chunk again whose copy in a slower tier failed."""

    def __init__(
        self, catalog: Catalog, names: ChunkNames, removal: Removal, writes: Sequence[Writes], clock: Clock,
        counters: Counters, policies: PolicySettings,
    ) -> None:  # fmt: skip
        self._catalog = catalog
        self._table = catalog.table
        self._names = names
        self._removal = removal
        self._writes = writes
        self._clock = clock
        self._counters = counters
        self._policies = policies
        self._doubtful: asyncio.Queue[_Proof] = asyncio.Queue(PROOF_COUNT_MAX)
        self._proving: dict[tuple[str, int], _Proof] = {}
        """Proofs that have not ended, by tier and row."""

    async def run(self) -> None:
        """Verify copies, round after round, for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(PROOFS_AT_ONCE):
                group.create_task(self._proofs())
            if self._policies.scrub_bytes_per_s:
                group.create_task(self._go_round())

    # ------------------------------------------------------------ one copy

    async def check(self, copies: Copies, row: int) -> bool | None:
        """Read one tier's copy. True: it passed its checks. False: it failed and was quarantined; another tier's copy
        takes its place, and if memory has the chunk it is written again. None: the tier could not give it."""
        return await self._looked_at(copies, row, self._read(copies, row, "scrub_failures"))

    async def _looked_at(self, copies: Copies, row: int, look: Coroutine[Any, Any, bool]) -> bool | None:
        identity = self._table.identity(row)
        try:
            is_good = await look
        except Exception as error:  # noqa: BLE001 - the boundary: one look that fails ends neither the round nor the service
            _log.warning("scrub could not read", extra={"tier": copies.tier.name, "reason": str(error)})
            return None
        # The row may be another chunk's by now: nobody holds what a round reads.
        if not is_good and row in self._table.copies[0] and self._table.identity(row) == identity:
            for writes in self._writes:
                writes.add(row)
        return is_good

    async def _read(self, copies: Copies, row: int, failures: str = "") -> bool:
        """Read a whole copy. False: it failed its check, and is quarantined unless it left meanwhile. ``failures``: the
        counter of those that are. True also where there is no copy. Raises KVStoreError where the tier gives no answer.
        """
        if row not in copies:
            return True
        residency, name = copies.residency(row), self._names.of(row)
        try:
            await check_whole(await copies.tier.open(name, residency), name.layout)
        except DataLoss:
            if await self._removal.quarantine(copies, row, residency) and failures:
                self._counters.add(failures)
            return False
        return True

    async def _renewed(self, proof: _Proof) -> bool:
        """Check a copy, and make it durable: the process that left it may have died, or its sync may have failed,
        before it was. A copy that cannot be made durable is given up where its chunk is stored anew: False, too.
        Elsewhere it stays: Unavailable. The row is held."""
        copies, row = proof.copies, proof.row
        residency = copies.residency(row)
        if not await self._read(copies, row):
            return False
        if row in copies and copies.residency(row) == residency and not copies.is_proven(row):
            is_renewed = await copies.tier.renew(residency)
            if copies.residency(row) == residency:
                if not is_renewed:
                    if not proof.is_stored_anew:
                        raise Unavailable("nothing can be written where a copy lies that a crash left: it stays")
                    self._give_up(copies, row)
                    return False
                copies.prove(row)
        return True

    def _give_up(self, copies: Copies, row: int) -> None:
        """Give up a good copy where nothing can be written, so that the chunk is written elsewhere."""
        self._removal.drop(copies, row, MissReason.EVICTED)

    # ------------------------------------------------------------ proofs

    async def prove_all(
        self, rows: Sequence[int], timeout_s: float, stored_anew: Collection[int]
    ) -> None:  # fmt: skip
        """Have the copies that a crash left checked and made durable, before anything is promised on them. Copies that
        fail are gone afterwards; so are, of the rows ``stored_anew``, those that cannot be made durable: the caller
        sees to it that the chunk is written elsewhere. Copies that the tier does not give in time stay unproven for
        now: they are proven once it does, and who settles them waits for that (``proofs_end``)."""
        doubtful = [
            (copies, row)
            for copies in self._table.copies
            for row in rows
            if row in copies and not copies.is_proven(row)
        ]
        for copies, row in doubtful:
            proof = self._proving.get((copies.tier.name, row))
            if proof is None and not self._doubtful.full():
                proof = _Proof(copies, row, asyncio.get_running_loop().create_future())
                self._proving[copies.tier.name, row] = proof
                self._table.hold(row)
                self._doubtful.put_nowait(proof)
            if proof is not None and row in stored_anew:
                proof.is_stored_anew = True
        late = await self._ended(((copies.tier.name, row) for copies, row in doubtful), timeout_s)
        if late:
            _log.warning("recovered chunks were not read in time", extra={"chunks": late})

    async def proofs_end(self, tier: str, rows: Iterable[int], timeout_s: float) -> bool:
        """Wait until a tier's copies of these chunks that are being proven have passed or failed, at most ``timeout_s``
        seconds. Returns True when all of them have."""
        return not await self._ended(((tier, row) for row in rows), timeout_s)

    async def _ended(self, asked: Iterable[tuple[str, int]], timeout_s: float) -> int:
        """Wait for the proofs of these copies, at most ``timeout_s`` seconds, and return how many have not ended."""
        futures = [proof.ended for each in asked if (proof := self._proving.get(each)) is not None]
        return len((await asyncio.wait(futures, timeout=timeout_s))[1]) if futures else 0

    async def _proofs(self) -> None:
        while True:
            proof = await self._doubtful.get()
            copies, row = proof.copies, proof.row
            try:
                is_proven = copies.is_proven(row)
                if not is_proven and await self._looked_at(copies, row, self._renewed(proof)) is not None:
                    self._counters.add_of(copies.tier.name, "proven_chunks")
            finally:
                del self._proving[copies.tier.name, row]
                self._catalog.unhold(row)
                if not proof.ended.done():
                    proof.ended.set_result(None)

    # ------------------------------------------------------------ rounds

    async def _go_round(self) -> None:
        while True:
            await self._clock.sleep(IDLE_S)
            began_s = self._clock.monotonic()
            if await self.round():
                await self._clock.sleep(max(0.0, began_s + ROUND_S_MIN - self._clock.monotonic()))

    async def round(self) -> int:
        """Check every copy once, and return how many there were."""
        count = 0
        for copies in list(self._table.copies):
            row = 0
            while row < len(self._table.digests):
                if row in copies and self._can_be_read(row):
                    count += 1
                    await self._paced(copies, row)
                elif row % ROWS_AT_ONCE == 0:
                    await self._clock.sleep(0)
                row += 1
        return count

    def _can_be_read(self, row: int) -> bool:
        """True when the layout of a chunk is known. A recovered chunk has none before its model is registered; nor has
        a hidden one, because its model has no chunks of its length."""
        return self._catalog.space_of(row).model_spec is not None and self._catalog.is_visible(row)

    async def _paced(self, copies: Copies, row: int) -> None:
        """Check one copy, and wait as long as its bytes take. Nothing holds the chunk meanwhile: it is not in use, and
        leaves when room is needed; its own is free once it was read. A chain's last chunk that stayed would keep all of
        the chain."""
        byte_count = self._names.of(row).layout.total_bytes
        if await self.check(copies, row) is not None:
            self._counters.add("scrubbed_bytes", byte_count)
        await self._clock.sleep(max(CHECK_S_MIN, byte_count / self._policies.scrub_bytes_per_s))
