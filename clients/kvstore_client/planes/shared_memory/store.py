"""A store's bytes by staging: copied here, read there once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import call
from typing import Any

from kvstore_copies import HELPED_BYTES

from kvstore.errors import DeadlineExceeded, Exhausted, Internal, KVStoreError
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.copying import Copier
from kvstore_client.planes.shared_memory.mapped import CALL_FILLS_MAX, MappedMemory
from kvstore_client.planes.store import StagingRun, Steps, StoreSource, Unit

Staged = tuple[Unit, StagingRun]
AHEAD_BYTES = 32 << 20
"""Bytes that are sent ahead at first; then twice as many each time. To send less often costs the caller less."""


def _continues(group: list[Staged], unit: Unit, run: StagingRun) -> bool:
    """Return True when a unit is the next chunk of a group, and lies right behind it in staging."""
    last, before = group[-1]
    return (
        last.layout is unit.layout
        and (last.part, last.slab_first, last.slab_stop) == (unit.part, unit.slab_first, unit.slab_stop)
        and unit.token_start == last.token_start + last.layout.token_count
        and (run.staging_id, run.offset) == (before.staging_id, before.offset + before.byte_count)
    )


class StagedUpload:
    """Units in staging (``planes.store.Upload``). When staging is short, fills go out in between."""

    def __init__(self, session: MappedMemory, source: StoreSource, copier: Copier, timeout_s: float) -> None:
        self._session = session
        self._pool = session.staging
        self._source = source
        self._copier = copier
        self._timeout_s = timeout_s
        self._staged: list[Staged] = []
        self._ahead: list[StagingRun] = []
        """Runs that the sidecar was told of while others were copied. It has read them when it has committed."""
        self._told: list[Any] = []
        """The calls that told it."""

    def put(self, reservation_id: int, units: Sequence[Unit], *, at_once: bool = False) -> None:
        """Copy all units. Raises Exhausted when staging has no room for one."""
        pool = self._pool
        remaining = sum(unit.byte_count for unit in units)
        batch: list[Staged] = []
        batch_bytes = 0
        ahead_bytes = AHEAD_BYTES if at_once else remaining
        for unit in units:
            run = pool.take(unit.byte_count, remaining)
            if run is None:
                self._copy_batch(batch)
                batch, batch_bytes = [], 0
                self._fill(reservation_id)
                run = pool.take(unit.byte_count, remaining)
            if run is None:
                raise Exhausted(
                    f"staging has no room for {unit.byte_count} bytes: raise limits.staging_bytes_max, or wait for "
                    "earlier stores"
                )
            remaining -= unit.byte_count
            self._staged.append((unit, run))  # at once, so that it is given back whatever comes next
            if batch_bytes >= ahead_bytes:
                self._copy_batch(batch)
                self._send_ahead(reservation_id, batch)
                batch, batch_bytes = [], 0
                ahead_bytes *= 2
            batch.append((unit, run))
            batch_bytes += unit.byte_count
        self._copy_batch(batch)

    def _copy_batch(self, batch: list[Staged]) -> None:
        groups: list[list[Staged]] = []
        for unit, run in batch:
            if groups and _continues(groups[-1], unit, run):
                groups[-1].append((unit, run))
            else:
                groups.append([(unit, run)])
        copies = [self._copies(group) for group in groups]
        work = [step for each in copies for step in each.steps]
        if work:
            try:
                byte_count = sum(unit.byte_count for unit, _ in batch)
                are_small = byte_count < HELPED_BYTES * len(copies)  # compiled code's thread helps with none of them
                by_torch = are_small or any(each.by_torch for each in copies)
                self._copier.share(call, work, byte_count, self._timeout_s, by_torch=by_torch)
            except DeadlineExceeded:
                # A copy may still write to its staging. End the session, so that this memory is never used again.
                self._session.close()
                raise
            except KVStoreError:
                raise
            except Exception as error:
                raise Internal(f"a copy to staging failed: {error!r}") from error

    def _copies(self, group: list[Staged]) -> Steps:
        """Return the copies of units that lie one behind the other: prepared together where that can be."""
        unit, run = group[0]
        memory = run.memory[run.offset : run.offset + run.byte_count * (len(group) - 1) + unit.byte_count]
        fused = self._source.fused(unit, memory, len(group), run.byte_count)
        one_by_one = (partial(self._copy_slab, group, index) for index in range(unit.slab_first, unit.slab_stop))
        return fused or Steps(list(one_by_one))

    def _copy_slab(self, group: list[Staged], index: int) -> None:
        unit, run = group[0]
        memory = run.memory[run.offset + unit.layout.slabs[index].offset - unit.base :]
        self._source.copy(unit, index, memory, count=len(group), stride=run.byte_count)

    def _send_ahead(self, reservation_id: int, batch: list[Staged]) -> None:
        """Tell the sidecar of the units that were staged before the last one, without waiting for it."""
        if len(batch) > CALL_FILLS_MAX:
            return
        step = pb.FillStrips(reservation_id=reservation_id, fills=[unit.fill(run) for unit, run in batch], at_once=True)
        session = self._session
        self._told.append(session.begin(session.cache.Store, pb.StoreRequest(fill=step), self._timeout_s))
        ahead = self._ahead + [run for _, run in batch]
        staged = self._staged[: -1 - len(batch)] + self._staged[-1:]
        self._ahead, self._staged = ahead, staged  # together: a run in both would be given back twice

    def _fill(self, reservation_id: int) -> None:
        if self._staged:
            self._session.fill(reservation_id, self.finish(), [run for _, run in self._staged], self._timeout_s)
            self.free()

    def finish(self) -> list[pb.Fill]:
        """Return the fills of all staged units, but for those that the sidecar knows."""
        while self._told:
            self._session.answer(self._told.pop())
        return [unit.fill(run) for unit, run in self._staged]

    def free(self) -> None:
        for run in self.stop():
            self._pool.give_back(run)

    def stop(self) -> list[StagingRun]:
        runs = [*self._ahead, *(run for _, run in self._staged)]
        self._ahead, self._staged = [], []
        return runs
