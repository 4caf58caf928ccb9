"""Stores: reserve, copy into staging (the caller waits for this), commit in the background."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvstore.chunk import ChunkLayout, layout_of, slab_parts
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError
from kvstore.seams import FaultPoints
from kvstore.spec import CacheKind, Durability, Exactness, ModelSpec, StoreState
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.arrays import checked, settle_device
from kvstore_client.copying import Copier, copy, plane_run, raw
from kvstore_client.derived import check_exact
from kvstore_client.planes import checked_planes
from kvstore_client.prefix import AnySession
from kvstore_client.prompt import EXACT, Prompt
from kvstore_client.receipt import Outcome, Settling
from kvstore_client.staging import Run
from kvstore_client.tails import superseded

UNIT_BYTES_MAX = 64 << 20
"""A chunk larger than this is staged in runs of slabs."""


@dataclass(frozen=True)
class Source:
    """The caller's tensors, checked. ``planes[part]`` has per slab of the part's layout its (K, V) or (E,)."""

    spec: ModelSpec
    token_count: int
    hidden_layers: tuple[int, ...]
    planes: list[list[tuple[Any, ...]]]

    @staticmethod
    def of(prompt: Prompt, kv: Any, hidden: Mapping[int, Any] | None) -> Source:
        """Raises InvalidRequest naming the argument whose type, shape or dtype is wrong, and for a merged cache that
        is to be kept as better than it is."""
        spec, token_count = prompt.spec, prompt.token_count
        if prompt.exactness == EXACT and getattr(kv, "exactness", Exactness.EXACT) is not Exactness.EXACT:
            raise InvalidRequest(
                "kv was built on a cache that was not exact: store it with exactness=Exactness.DERIVED"
            )
        if not isinstance(kv, Sequence) or len(kv) != spec.layer_count:
            found = len(kv) if isinstance(kv, Sequence) else type(kv).__name__
            entry = "E" if spec.keeps_e else "(K, V)"
            raise InvalidRequest(f"kv must be one {entry} per layer, {spec.layer_count} of them, not {found}")
        if hidden and spec.keeps_e:
            raise InvalidRequest("hidden: this spec keeps E of every layer as its cache (keeps_e): leave it out")
        is_claimed = prompt.is_claimed or prompt.exactness != EXACT
        planes: list[list[tuple[Any, ...]]] = [[]]
        for index in spec.slab_layers:
            given = checked_planes(spec, index, kv[index], f"kv[{index}]", token_count)
            if not is_claimed:
                check_exact(given, f"kv[{index}]")
            planes[0].append(tuple(map(raw, given)))
        if hidden is not None and not isinstance(hidden, Mapping):
            raise InvalidRequest(f"hidden must be {{layer: [tokens, hidden]}}, not {type(hidden).__name__}")
        for layer_index in hidden or ():
            if not isinstance(layer_index, int) or not 0 <= layer_index < spec.layer_count:
                raise InvalidRequest(f"hidden[{layer_index}]: the model has layers 0..{spec.layer_count - 1}")
        hidden_layers = tuple(sorted(hidden or ()))
        for layer_index in hidden_layers:
            shape = (token_count, spec.hidden_size)
            x = checked((hidden or {})[layer_index], shape, spec.hidden_dtype, f"hidden[{layer_index}]")
            if not is_claimed:
                check_exact([x], f"hidden[{layer_index}]")
            planes.append([(raw(x.reshape(1, *shape)),)])
        settle_device([plane for part in planes for slab in part for plane in slab])
        return Source(spec, token_count, hidden_layers, planes)

    def layout(self, part: int, token_count: int) -> ChunkLayout:
        if part == 0:
            return layout_of(self.spec, self.spec.kind, token_count)
        return layout_of(self.spec, CacheKind.E, token_count, self.hidden_layers[part - 1])


@dataclass(frozen=True)
class Unit:
    """A run of slabs of one chunk: what is staged and filled together."""

    chunk: int
    part: int
    token_start: int
    layout: ChunkLayout
    slab_first: int
    slab_stop: int

    @property
    def base(self) -> int:
        return self.layout.slabs[self.slab_first].offset

    @property
    def byte_count(self) -> int:
        last = self.layout.slabs[self.slab_stop - 1]
        return last.offset + last.byte_count - self.base

    def fill(self, run: Run) -> pb.Fill:
        first, last = self.layout.slabs[self.slab_first], self.layout.slabs[self.slab_stop - 1]
        return pb.Fill(
            chunk=self.chunk,
            strip_first=first.strip_first,
            strip_count=last.strip_first + last.strip_count - first.strip_first,
            staging_id=run.staging_id,
            staging_offset=run.offset,
        )


def _continues(group: list[tuple[Unit, Run]], unit: Unit, run: Run) -> bool:
    """Whether a unit is the next chunk of a group, and lies right behind it in staging."""
    last, before = group[-1]
    return (
        last.layout is unit.layout
        and (last.part, last.slab_first, last.slab_stop) == (unit.part, unit.slab_first, unit.slab_stop)
        and unit.token_start == last.token_start + last.layout.token_count
        and (run.staging_id, run.offset) == (before.staging_id, before.offset + before.byte_count)
    )


class Store:
    """One store on its way."""

    def __init__(
        self,
        session: AnySession,
        pool: Any,
        source: Source,
        copier: Copier,
        faults: FaultPoints,
        timeout_s: float,
    ) -> None:
        self._session = session
        self._pool = pool
        self._source = source
        self._copier = copier
        self._faults = faults
        self._timeout_s = timeout_s
        self.waits = False
        """Whether the commit waits for other stores, perhaps of this very client."""
        self._reservation_id = 0
        self._supersedes: Callable[[], bytes] = bytes
        """Digests of the partial chunks that this store's begin with."""
        self._staged: list[tuple[Unit, Run]] = []

    def stage(self, name: bytes, prompt: Prompt) -> None:
        """Reserve, and copy what is wanted into staging. When staging is short, fills go out in between."""
        request = reserve_request(name, prompt, self._source.hidden_layers)
        response = self._call(request)
        self._reservation_id = response.reservation_id
        self._supersedes = partial(superseded, prompt, list(response.tails))
        self.waits = StoreState.PENDING in response.states
        try:
            self._copy_all(self._units(list(response.states), prompt.token_count))
        except BaseException:
            self.abort()
            raise

    def _units(self, states: list[int], token_count: int) -> list[Unit]:
        units: list[Unit] = []
        part_count = len(self._source.planes)
        step = self._source.spec.chunk_tokens
        for chunk, state in enumerate(states):
            if state != StoreState.WANTED:
                continue
            part, start = chunk % part_count, chunk // part_count * step
            layout = self._source.layout(part, min(step, token_count - start))
            first = size = 0
            for index, slab in enumerate(layout.slabs):
                if size and size + slab.byte_count > UNIT_BYTES_MAX:
                    units.append(Unit(chunk, part, start, layout, first, index))
                    first, size = index, 0
                size += slab.byte_count
            units.append(Unit(chunk, part, start, layout, first, len(layout.slabs)))
        return units

    def _copy_all(self, units: list[Unit]) -> None:
        remaining = sum(unit.byte_count for unit in units)
        batch: list[tuple[Unit, Run]] = []
        for unit in units:
            run = self._pool.take(unit.byte_count, remaining)
            if run is None:
                self._copy_batch(batch)
                batch = []
                self._fill()
                run = self._pool.take(unit.byte_count, remaining)
            if run is None:
                raise Exhausted(
                    f"staging has no room for {unit.byte_count} bytes: raise limits.staging_bytes_max, or wait for "
                    "earlier stores"
                )
            remaining -= unit.byte_count
            self._staged.append((unit, run))  # at once: it is given back whatever comes next
            batch.append((unit, run))
        self._copy_batch(batch)
        self._faults.reach("store.staged")

    def _copy_batch(self, batch: list[tuple[Unit, Run]]) -> None:
        groups: list[list[tuple[Unit, Run]]] = []
        for unit, run in batch:
            if groups and _continues(groups[-1], unit, run):
                groups[-1].append((unit, run))
            else:
                groups.append([(unit, run)])
        work = [(group, index) for group in groups for index in range(group[0][0].slab_first, group[0][0].slab_stop)]
        if work:
            try:
                self._copier.split(self._copy_slabs, work, self._timeout_s)
            except DeadlineExceeded:
                # A copy may still write to its staging, so that must never be used again: it goes with the session.
                self._session.close()
                raise

    def _copy_slabs(self, work: Sequence[tuple[list[tuple[Unit, Run]], int]]) -> None:
        for group, index in work:
            unit, run = group[0]
            layout = unit.layout
            memory = run.segment[run.offset + layout.slabs[index].offset - unit.base :]
            planes = self._source.planes[unit.part][index]
            for part in slab_parts(layout, index, memory, len(group), run.byte_count):
                source = plane_run(planes[part.which], unit.token_start, layout.token_count, len(group), part)
                copy(raw(part.array), source)

    def _fills(self) -> list[pb.Fill]:
        return [unit.fill(run) for unit, run in self._staged]

    def _fill(self) -> None:
        if self._staged:
            step = pb.FillStrips(reservation_id=self._reservation_id, fills=self._fills())
            self._call(pb.StoreRequest(fill=step))
            self._give_back()

    def _give_back(self) -> None:
        for _, run in self._staged:
            self._pool.give_back(run)
        self._staged = []

    def commit(self) -> tuple[Durability, int, str]:
        """Send the last fills and commit. Runs in the background. Failures are the outcome, not exceptions."""
        try:
            step = pb.Commit(reservation_id=self._reservation_id, fills=self._fills(), supersedes=self._supersedes())
            response = self._call(pb.StoreRequest(commit=step))
            self._give_back()
        except KVStoreError as error:
            self.abort()
            return Durability.NONE, 0, error.message
        step_tokens = self._source.spec.chunk_tokens
        stored = min(response.committed_count * step_tokens, self._source.token_count)
        return Durability(response.durability), stored, response.refusal

    def abort(self) -> None:
        """Drop the reservation, and wait for that as long as for any call."""
        runs = [run for _, run in self._staged]
        self._staged = []
        drop_reservation(self._session, self._pool, self._reservation_id, runs, self._timeout_s)

    def _call(self, request: pb.StoreRequest) -> Any:
        return self._session.call(self._session.cache.Store, request, self._timeout_s)


def drop_reservation(
    session: AnySession, pool: Any, reservation_id: int, runs: Sequence[Run], timeout_s: float
) -> None:  # fmt: skip
    """Returns when the sidecar has forgotten it, or has not answered in time; then it is told again until it has, or
    the session ends. Its staging is free once the sidecar says so: until then it may read there."""
    try:
        session.give_back(dropping(session, pool, reservation_id, runs, timeout_s))
    except KVStoreError:
        return


def dropping(
    session: AnySession, pool: Any, reservation_id: int, runs: Sequence[Run], timeout_s: float
) -> Callable[[], None]:  # fmt: skip
    """The call that drops a reservation. It keeps nothing of the store alive but its staging."""
    request = pb.StoreRequest(abort=pb.Abort(reservation_id=reservation_id))

    def drop() -> None:
        session.call(session.cache.Store, request, timeout_s)
        for run in runs:
            pool.give_back(run)

    return drop


def reserve_request(name: bytes, prompt: Prompt, hidden_layers: tuple[int, ...], shards: int = 1) -> pb.StoreRequest:
    """Ask for room for a prompt's chunks."""
    return pb.StoreRequest(
        reserve=pb.Reserve(
            query=prompt.query(name, prompt.digests, hidden_layers),
            token_digests=b"".join(prompt.token_digests()),
            tail_token_count=prompt.token_count % prompt.spec.chunk_tokens,
            shards=shards,
        )
    )


def ask_settled(
    session: AnySession, name: bytes, prompt: Prompt, hidden_layers: tuple[int, ...], token_count: int, wait_s: float,
    timeout_s: float,
) -> Settling:  # fmt: skip
    """Ask the sidecar what a stored prefix has reached; it waits for the device at most ``wait_s``."""
    step = prompt.spec.chunk_tokens
    query = prompt.query(name, prompt.digests[: -(-token_count // step)], hidden_layers)
    request = pb.StoreRequest(settle=pb.Settle(query=query, timeout_seconds=wait_s))
    asked = session.begin(session.cache.Store, request, wait_s + timeout_s)

    def outcome() -> Outcome:
        reply = session.answer(asked)
        if min(reply.committed_count * step, token_count) < token_count:
            return Durability.NONE, "a part of it is gone again: raise arena.capacity_bytes", True
        return Durability(reply.durability), reply.refusal, reply.is_settled

    answered: Future[Any] = Future()
    asked.add_done_callback(answered.set_result)
    return Settling(answered, outcome)
