"""The client's calls for opaque values by namespace and key."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest
from kvstore.seams import Clock, FaultPoints, SystemRandom
from kvstore.spec import Durability, ModelSpec
from kvstore_client.connection import Connection
from kvstore_client.copying import Copier, commit_beside
from kvstore_client.encoder import EncoderCalls
from kvstore_client.overlap import Span, check_apart
from kvstore_client.prefix import AnySession
from kvstore_client.prompt import Prompt
from kvstore_client.reading import Reader
from kvstore_client.receipt import Receipt
from kvstore_client.remote.session import RemoteSession
from kvstore_client.remote.values import RemoteValueStore
from kvstore_client.starting import Means, check_durability
from kvstore_client.value import (
    CHUNK_BYTES,
    EXACT,
    HEAD,
    Key,
    Pieces,
    Value,
    ValueStore,
    WholeStore,
    flat,
    namespace_spec,
    writable,
)

PUTS_AT_ONCE = 64
"""Values of one call whose stores have not ended: a session may have a few hundred, and is not this call's alone."""


class OpaqueCalls(EncoderCalls):
    """The client's calls for opaque values."""

    _connection: Connection
    _copier: Copier
    _clock: Clock
    _timeout_s: float
    faults: FaultPoints

    @abstractmethod
    def _ready(self, spec: ModelSpec) -> tuple[AnySession, bytes]:
        """The client's."""

    @abstractmethod
    def _means(self) -> Means:
        """The client's."""

    def put_bytes(
        self, namespace: str, key: str | bytes, data: Any, *, durability: Durability | None = None
    ) -> Receipt:  # fmt: skip
        """Keep a value under a key; what the key had before is gone. Returns as soon as ``data`` may be reused; the
        receipt tells what was kept: all of it or nothing. Two puts of one key at a time: one of them stays, whole.

        ``data``: bytes, or a contiguous array or CPU tensor. Raises: InvalidRequest naming what is wrong.
        """
        return self.put_pieces(namespace, key, [data], durability=durability)

    def put_pieces(
        self, namespace: str, key: str | bytes, pieces: Sequence[Any], *, durability: Durability | None = None,
        replace: bool = True,
    ) -> Receipt:  # fmt: skip
        """As ``put_bytes``, of a value that lies in several buffers. ``replace=False``: what the key has stays, for
        keys that have one value for ever, of one chunk; nothing is sent then."""
        check_durability(durability)
        spec, names = namespace_spec(namespace), Key.of(key)
        version = SystemRandom().bytes(16)
        value = Value.of(spec, version, [flat(piece) for piece in pieces])
        digests = names.chain(version, value.chunk_count)

        def run() -> Receipt:
            session, name = self._ready(spec)
            how = (value, self._copier, self.faults, self._timeout_s)
            store: WholeStore
            store = RemoteValueStore(session, *how) if isinstance(session, RemoteSession) else ValueStore(session, *how)
            store.begin(name, digests, names.whole + names.first if replace else b"")
            means = self._means()
            settle = None if durability is Durability.MEMORY else means.settle(Prompt.known(spec, digests, EXACT), ())
            return Receipt(commit_beside(means.committer, store.commit, store.abort, waits=False), settle)

        try:
            return self._connection.or_gone(run, Receipt.nothing)
        except Exhausted as error:
            self._connection.counters["stores_refused"] += 1
            return Receipt.nothing(error.message)

    def get_bytes(
        self, namespace: str, key: str | bytes, *, into: Any = None, verify: bool = False
    ) -> NDArray[np.uint8] | None:  # fmt: skip
        """The value of a key, whole, as an array of bytes: owned memory, or ``into``, which is as long as the value.
        None when it is not there. ``verify``: hash every strip on the way. Raises: InvalidRequest."""
        names, target = Key.of(key), None if into is None else Pieces([writable(into)])
        found: Pieces | None = self._read(namespace, verify, lambda reader: reader.get(names, target), None)
        return None if found is None else found.arrays[0]

    def get_each(
        self, namespace: str, keys: Sequence[str | bytes], targets: Sequence[Any], *, verify: bool = False
    ) -> list[bool]:
        """Values of known sizes, each into its target: a buffer, or a list of buffers that are one run. One call for
        all of them; False for what is not there, or has another size: that target's bytes mean nothing then.

        Raises: InvalidRequest."""
        if len(keys) != len(targets):
            raise InvalidRequest(f"{len(keys)} keys and {len(targets)} targets: give one target for each key")
        names = [Key.of(key) for key in keys]
        places = [Pieces([writable(one) for one in (each if isinstance(each, list) else [each])]) for each in targets]
        spans = [(Span.of(one), f"targets[{number}]") for number, each in enumerate(places) for one in each.arrays]
        check_apart([span for span, _ in spans], [name for _, name in spans])
        if not names:
            return []
        done: list[bool] = self._read(
            namespace, verify, lambda reader: reader.get_each(names, places), [False] * len(names)
        )
        return done

    def put_each(
        self, namespace: str, keys: Sequence[str | bytes], values: Sequence[Any], *, timeout_s: float = 30.0
    ) -> list[bool]:
        """Values of keys that have one value for ever: what is there is not sent again. Each value is a buffer, or a
        list of buffers that are one run. Returns when all of them are stored, or ``timeout_s`` have passed: whether
        each is there. ``values`` may be reused then. Raises: InvalidRequest."""
        if len(keys) != len(values):
            raise InvalidRequest(f"{len(keys)} keys and {len(values)} values: give one value for each key")
        until_s = self._clock.monotonic() + timeout_s
        receipts: list[Receipt | None] = []
        for key, value in zip(keys, values, strict=True):
            if len(receipts) >= PUTS_AT_ONCE:
                _is_kept(receipts[-PUTS_AT_ONCE], until_s - self._clock.monotonic())
            pieces = [flat(each) for each in (value if isinstance(value, list) else [value])]
            is_large = sum(piece.nbytes for piece in pieces) > CHUNK_BYTES - HEAD.size
            if self._clock.monotonic() > until_s:
                receipts.append(Receipt.nothing("the time for these values is over"))
            elif is_large and self.exists(namespace, key):
                receipts.append(None)
            else:
                receipts.append(self.put_pieces(namespace, key, pieces, durability=Durability.MEMORY, replace=is_large))
        return [_is_kept(each, until_s - self._clock.monotonic()) for each in receipts]

    def exists(self, namespace: str, keys: str | bytes | Sequence[str | bytes]) -> Any:
        """Whether a key has a value, or, of a sequence of keys, which of them have. Moves nothing that is of one chunk
        (4 MiB). Raises: InvalidRequest."""
        one = isinstance(keys, str | bytes)
        asked: Sequence[Any] = [keys] if one else keys
        names = [Key.of(key) for key in asked]
        found = self._read(namespace, False, lambda reader: reader.exists(names), [False] * len(names))
        return found[0] if one else found

    def count_leading(self, namespace: str, keys: Sequence[str | bytes]) -> int:
        """How many of the leading keys have a value."""
        names = [Key.of(key) for key in keys]
        found: int = self._read(namespace, False, lambda reader: reader.count_leading(names), 0)
        return found

    def _read(self, namespace: str, verify: bool, read: Callable[[Reader], Any], otherwise: Any) -> Any:
        spec = namespace_spec(namespace)

        def run() -> Any:
            session, name = self._ready(spec)
            return read(Reader(session, name, spec, self._copier, self._timeout_s, verify))

        return self._connection.or_gone(run, partial(_instead, otherwise))


def _is_kept(receipt: Receipt | None, timeout_s: float) -> bool:
    """None: of what was there already."""
    if receipt is None:
        return True
    try:
        return receipt.wait(max(0.0, timeout_s)) > Durability.NONE
    except DeadlineExceeded:
        return False


def _instead(value: Any, _: str) -> Any:
    return value
