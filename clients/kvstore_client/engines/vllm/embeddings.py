"""Embeddings of images and sounds by vLLM's encoders: the scheduler's side fetches, the workers' side keeps them. Needs
no vLLM.

vLLM fails a step whose promised embeddings are missing, so only embeddings in this process are promised. The
scheduler's side fetches an item beside the steps, lets its request wait for it, and sends the bytes along with the
step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvstore.errors import KVStoreError
from kvstore.seams import Clock, SystemClock, Workers, WorkerThreads
from kvstore.seams.jobs import begun, failure_of
from kvstore.spec import ModelSpec
from kvstore_client.arrays import Tensor
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause

WAIT_S_MAX = 2.0
"""The most seconds that a request waits for an item. After that the item is encoded."""
ITEM_COUNT_MAX = 64
"""The most items held or on their way at a time. Further items are not asked for, but encoded."""
ODD_COUNT_MAX = 1000
COPY_S_MAX = 2.0
_log = logging.getLogger("kvstore.vllm")


@dataclass
class _Item:
    """An item on its way or in memory. ``users``: the requests that want it."""

    arrival: Future[Tensor]
    token_count: int
    asked_s: float
    users: set[str] = field(default_factory=set)
    embeddings: Tensor = None


class Fetching:
    """The scheduler's side. For one thread; no call waits for the sidecar, and none raises because of it."""

    def __init__(
        self, client: Client, spec: ModelSpec, *, clock: Clock | None = None, threads: Workers | None = None
    ) -> None:
        self._client = client
        self._spec = spec
        self._clock = clock or SystemClock()
        self._patience = CallPause(self._clock)
        self._threads = threads or WorkerThreads(1, "kvstore-encoder")
        self._items: dict[str, _Item] = {}
        self._given_up: dict[str, set[str]] = {}
        self._cached: set[str] = set()
        """Identifiers of items in vLLM's own encoder cache, now or after this step."""
        self._fresh: set[str] = set()
        self._loads: dict[str, Tensor] = {}
        self._odd: set[str] = set()
        """Identifiers that have named items of different sizes: clients may name items as they like."""

    def are_settled(self, request_id: str, wanted: Iterable[tuple[str, int]]) -> bool:
        """Return True when each of a request's items, (identifier, token count), is in memory, or is to be encoded.
        False: some are on their way; ask again at the next step."""
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

        def fetch() -> Tensor:
            with self._patience.watch(COPY_S_MAX):
                return self._client.get_encoder(self._spec, identifier)

        item = _Item(begun(self._threads, fetch), token_count, self._clock.monotonic())
        self._items[identifier] = item
        return item

    def _is_lost(self, identifier: str, item: _Item, token_count: int) -> bool:
        """Take the item if it has come. Return True when it is missing, takes too long, or has another size than was
        asked for."""
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
        """Return True when the item is in memory: it will be sent along with the step that needs it."""
        item = self._items.get(identifier)
        return item is not None and item.embeddings is not None

    def allocated(self, identifier: str) -> None:
        """Note that vLLM has made room for an item, and has it after this step: from here, or by its encoder."""
        self._cached.add(identifier)
        self._fresh.add(identifier)
        item = self._items.get(identifier)
        if item is not None and item.embeddings is not None:
            self._loads[identifier] = item.embeddings
            del self._items[identifier]

    def step(self, freed: Sequence[str]) -> dict[str, Tensor]:
        """Return the embeddings to send along with this step. ``freed``: items that vLLM dropped before it."""
        loads, self._loads = self._loads, {}
        self._cached -= set(freed) - self._fresh
        self._fresh.clear()
        return loads

    def finished(self, request_id: str) -> None:
        """Drop the items that only this finished request wanted."""
        self._given_up.pop(request_id, None)
        for identifier, item in list(self._items.items()):
            item.users.discard(request_id)
            if not item.users:
                del self._items[identifier]

    def close(self) -> None:
        self._threads.close()
        self._client.close()


def _arrived(arrival: Future[Tensor]) -> Tensor:
    failure = failure_of(arrival)
    if failure is not None:
        _log.warning("kvstore: %s; the item is encoded", failure.message)
        return None
    return arrival.result()


class Keeping:
    """The workers' side: keeps the embeddings that their encoder made. No call raises because of the sidecar."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._patience = CallPause(SystemClock())

    def keep(self, spec: ModelSpec, identifier: str, embeddings: Tensor) -> None:
        """Store an item's embeddings. Returns when the tensor may change."""
        if self._patience.is_spent:
            return
        try:
            with self._patience.watch(COPY_S_MAX):
                self._client.put_encoder(spec, identifier, embeddings)
        except KVStoreError as error:
            _log.error("kvstore: %s; this item is not kept", error.message)

    def close(self) -> None:
        self._client.close()
