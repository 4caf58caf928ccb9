"""Stores: reserve, hand the bytes over (the caller waits for this), commit in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvstore.errors import UNREGISTERED, InvalidRequest, KVStoreError
from kvstore.spec import LEVELS, Durability, StoreState
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.copying import Committed
from kvstore_client.lookup.tails import superseded
from kvstore_client.planes.session import ClientSession
from kvstore_client.planes.store import StagingMemory, StagingRun, StoreSource, units_of
from kvstore_client.prompt import Prompt
from kvstore_client.store.receipt import Outcome, Settling


class Store:
    """One store in flight."""

    def __init__(self, session: ClientSession, source: StoreSource, context: Context, *, at_once: bool = False) -> None:
        """``at_once``: somebody waits until the bytes are durable, and not only for the caller's memory."""
        self._session = session
        self._at_once = at_once
        self._source = source
        self._pool = session.staging
        self._upload = session.upload(source, context.copier, context.timeout_s)
        self._faults = context.faults
        self._timeout_s = context.timeout_s
        self.waits = False
        """True when the commit waits for other stores, perhaps of this very client."""
        self._reservation_id = 0
        self._supersedes: Callable[[], bytes] = bytes
        """Returns digests of the stored partial chunks that begin this store's chunks."""

    def stage(self, request: pb.StoreRequest, prompt: Prompt | None = None) -> None:
        """Reserve, and hand over the wanted bytes. ``prompt``: its chunks may supersede partial ones."""
        response = self._call(request)
        self._reservation_id = response.reservation_id
        if prompt is not None:
            self._supersedes = partial(superseded, prompt, list(response.tails))
        states: list[int] = list(response.states)
        self.waits = StoreState.PENDING in states
        try:
            self._upload.put(self._reservation_id, units_of(self._source, states), at_once=self._at_once)
            self._faults.reach("store.staged")
        except BaseException:
            self.abort()
            raise

    def commit(self) -> Committed:
        """Send the remaining bytes and commit. Runs in the background. Failures are the outcome, not exceptions."""
        try:
            fills = self._upload.finish()
            step = pb.Commit(reservation_id=self._reservation_id, fills=fills, supersedes=self._supersedes())
            response = self._call(pb.StoreRequest(commit=step))
            self._upload.free()
        except KVStoreError as error:
            self.abort()
            return Durability.NONE, 0, error.message
        step_tokens = self._source.spec.chunk_tokens
        stored = min(response.committed_count * step_tokens, self._source.token_count)
        return Durability(response.durability), stored, response.refusal

    def abort(self) -> None:
        """Drop the reservation; wait for that at most the timeout of a call."""
        runs = self._upload.stop()
        drop_reservation(self._session, self._pool, self._reservation_id, runs, self._timeout_s)

    def _call(self, request: pb.StoreRequest) -> pb.StoreResponse:
        reply: pb.StoreResponse = self._session.call(self._session.cache.Store, request, self._timeout_s)
        return reply


def drop_reservation(
    session: ClientSession, pool: StagingMemory, reservation_id: int, runs: Sequence[StagingRun], timeout_s: float
) -> None:  # fmt: skip
    """Drop a reservation. Returns when the sidecar has dropped it, or has not answered in time; then the call is
    repeated until it has, or the session ends. Its staging is free once the sidecar has answered: until then it may
    read there."""
    try:
        session.give_back(dropping(session, pool, reservation_id, runs, timeout_s))
    except KVStoreError:
        return


def dropping(
    session: ClientSession, pool: StagingMemory, reservation_id: int, runs: Sequence[StagingRun], timeout_s: float
) -> Callable[[], None]:  # fmt: skip
    """Return the call that drops a reservation. It keeps nothing of the store alive but its staging."""
    request = pb.StoreRequest(abort=pb.Abort(reservation_id=reservation_id))

    def drop() -> None:
        session.call(session.cache.Store, request, timeout_s)
        for run in runs:
            pool.give_back(run)

    return drop


def beyond(durability: Durability | None) -> Durability:
    """The level to name in a store's first call: only one beyond the node concerns the sidecar so early."""
    return durability if durability is not None and durability > Durability.LOCAL else Durability.NONE


def reserve_request(
    name: bytes, prompt: Prompt, hidden_layers: tuple[int, ...], shards: int = 1, durability: Durability | None = None
) -> pb.StoreRequest:
    """Return the request that reserves room for a prompt's chunks."""
    return pb.StoreRequest(
        reserve=pb.Reserve(
            query=prompt.query(name, prompt.digests, hidden_layers),
            token_digests=b"".join(prompt.token_digests()),
            tail_token_count=prompt.token_count % prompt.spec.chunk_tokens,
            first_position=prompt.first_position,
            shards=shards,
            durability=int(beyond(durability)),  # type: ignore[arg-type]  # the stubs want enum values, the wire takes ints
        )
    )


def ask_settled(
    session: ClientSession, request: pb.Settle, token_count: int, chunk_tokens: int, timeout_s: float
) -> Settling:
    """Ask the sidecar which levels so many leading tokens have reached. It may wait as long as the request says; the
    call may take ``timeout_s`` more."""
    asked = session.begin(session.cache.Store, pb.StoreRequest(settle=request), request.timeout_seconds + timeout_s)

    def outcome() -> Outcome:
        try:
            reply = session.answer(asked)
        except InvalidRequest as error:
            if UNREGISTERED not in error.fields:
                raise
            reply = pb.StoreResponse()  # its model is forgotten, as one is that has no chunk any more
        if min(reply.committed_count * chunk_tokens, token_count) < token_count:
            why = "a part of it is gone again: evicted (raise arena.capacity_bytes), replaced or removed"
            return Outcome(dict.fromkeys(LEVELS, why), True)
        return Outcome(reported(reply), reply.is_settled)

    answered: Future[None] = Future()
    asked.add_done_callback(lambda _: answered.set_result(None))
    return Settling(answered, outcome)


def reported(reply: pb.StoreResponse) -> dict[Durability, str]:
    """Return, per level that was not reached, the reason. A sidecar of an earlier release reports the node's own levels
    only."""
    if reply.levels:
        known = dict.fromkeys(LEVELS, "this sidecar does not know it")
        told = {each.durability: "" if each.is_reached else each.reason for each in reply.levels}
        return {level: why for level in LEVELS if (why := told.get(int(level), known[level]))}  # type: ignore[call-overload]  # as above
    older = dict.fromkeys(LEVELS, reply.refusal or "this sidecar does not know it")
    return {level: why for level, why in older.items() if level > reply.durability}
