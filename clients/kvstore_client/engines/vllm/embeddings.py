"""What vLLM's encoders made of images and sounds: the scheduler's side, which fetches, and the workers', which keeps.
Needs no vLLM.

vLLM fails a step whose embeddings it was promised and did not get. So nothing is promised that is not here: the
scheduler fetches an item beside the steps, lets its request wait for it, and sends the bytes along with the step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvstore.errors import KVStoreError
from kvstore.seams import Clock, SystemClock, Workers, WorkerThreads
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import ModelSpec
from kvstore_client.client import Client
from kvstore_client.engines.vllm.patience import Patience

WAIT_S_MAX = 2.0
"""A request waits no longer for an item, which is encoded then."""
ITEM_COUNT_MAX = 64
"""Items that are held or on their way at a time; of others nobody asks."""
ODD_COUNT_MAX = 1000
COPY_S_MAX = 2.0
_log = logging.getLogger("kvstore.vllm")


@dataclass
class _Item:
    """One on its way or here. ``users``: the requests that want it."""

    arrival: Future[Any]
    token_count: int
    asked_s: float
    users: set[str] = field(default_factory=set)
    embeddings: Any = None


class Fetching:
    """The scheduler's side. For one thread; no call waits for the sidecar, none raises for its sake."""

    def __init__(
        self, client: Client, spec: ModelSpec, *, clock: Clock | None = None, threads: Workers | None = None
    ) -> None:
        self._client = client
        self._spec = spec
        self._clock = clock or SystemClock()
        self._patience = Patience(self._clock)
        self._threads = threads or WorkerThreads(1, "kvstore-encoder")
        self._items: dict[str, _Item] = {}
        self._given_up: dict[str, set[str]] = {}
        self._cached: set[str] = set()
        """What vLLM's own encoder cache has, or will have after this step."""
        self._fresh: set[str] = set()
        self._loads: dict[str, Any] = {}
        self._odd: set[str] = set()
        """Identifiers that mean items of different sizes: clients may name items as they like."""

    def are_settled(self, request_id: str, wanted: Iterable[tuple[str, int]]) -> bool:
        """Whether each of a request's items, (identifier, token count), is here, or is to be encoded. Else they are on
        their way: ask again at the next step."""
        given_up = self._given_up.setdefault(request_id, set())
        is_settled = True
        for identifier, token_count in wanted:
            if identifier in self._cached or identifier in given_up:
                continue
            item = self._items.get(identifier) or self._ask(identifier, token_count)
            if item is None or self._is_lost(identifier, item, token_count):
                given_up.add(identifier)
                continue
            item.users.add(request_id)
            is_settled = is_settled and item.embeddings is not None
        return is_settled

    def _ask(self, identifier: str, token_count: int) -> _Item | None:
        if self._patience.is_spent or len(self._items) >= ITEM_COUNT_MAX:
            return None
        if identifier in self._odd or len(self._odd) >= ODD_COUNT_MAX:
            return None

        def fetch() -> Any:
            with self._patience.watch(COPY_S_MAX):
                return self._client.get_encoder(self._spec, identifier)

        item = _Item(begun(self._threads, fetch), token_count, self._clock.monotonic())
        self._items[identifier] = item
        return item

    def _is_lost(self, identifier: str, item: _Item, token_count: int) -> bool:
        """Look whether it has come. An item that takes too long, or has another size than was asked for, is none."""
        if item.embeddings is None and item.arrival.done():
            item.embeddings = _arrived(item.arrival)
            if item.embeddings is None:
                del self._items[identifier]
                return True
        if item.embeddings is not None:
            found = int(item.embeddings.shape[0])
            if found == token_count:
                return False
            _log.warning("kvstore: item %s has %d embeddings, not %d: it is encoded", identifier, found, token_count)
            self._odd.add(identifier)
            del self._items[identifier]
            return True
        return self._clock.monotonic() - item.asked_s > WAIT_S_MAX

    def has(self, identifier: str) -> bool:
        """Whether the item is here: it will be sent along with the step that needs it."""
        item = self._items.get(identifier)
        return item is not None and item.embeddings is not None

    def allocated(self, identifier: str) -> None:
        """vLLM has made room for an item, and will have it after this step: from here, or by its encoder."""
        self._cached.add(identifier)
        self._fresh.add(identifier)
        item = self._items.get(identifier)
        if item is not None and item.embeddings is not None:
            self._loads[identifier] = item.embeddings
            del self._items[identifier]

    def step(self, freed: Sequence[str]) -> dict[str, Any]:
        """The embeddings that go along with this step. ``freed``: what vLLM gave up before it."""
        loads, self._loads = self._loads, {}
        self._cached -= set(freed) - self._fresh
        self._fresh.clear()
        return loads

    def finished(self, request_id: str) -> None:
        """A request is over: let go of what only it wanted."""
        self._given_up.pop(request_id, None)
        for identifier, item in list(self._items.items()):
            item.users.discard(request_id)
            if not item.users:
                del self._items[identifier]

    def close(self) -> None:
        self._threads.close()
        self._client.close()


def _arrived(arrival: Future[Any]) -> Any:
    failure = failure_of(arrival)
    if failure is not None:
        _log.warning("kvstore: %s; the item is encoded", failure.message)
        return None
    return arrival.result()


class Keeping:
    """The workers' side: keeps what their encoder made. No call raises for the sidecar's sake."""

    def __init__(self, client: Client, clock: Clock | None = None) -> None:
        self._client = client
        self._patience = Patience(clock or SystemClock())

    def keep(self, spec: ModelSpec, identifier: str, embeddings: Any) -> None:
        """Returns when the tensor may change."""
        if self._patience.is_spent:
            return
        try:
            with self._patience.watch(COPY_S_MAX):
                self._client.put_encoder(spec, identifier, embeddings)
        except KVStoreError as error:
            _log.error("kvstore: %s; this item is not kept", error.message)

    def close(self) -> None:
        self._client.close()
