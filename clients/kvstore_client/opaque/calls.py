"""Calls for opaque values: put, get, exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest
from kvstore.seams import SystemRandom
from kvstore.spec import Durability
from kvstore_client.arrays import Buffer
from kvstore_client.context import Context
from kvstore_client.copying import Committed, commit_beside
from kvstore_client.opaque.reader import Reader
from kvstore_client.opaque.value import (
    CHUNK_BYTES,
    HEAD,
    Key,
    Pieces,
    Value,
    flat,
    namespace_spec,
    reserve_value,
    writable,
)
from kvstore_client.overlap import Span, check_apart
from kvstore_client.prompt import EXACT, Prompt
from kvstore_client.store.calls import check_durability, settle_of
from kvstore_client.store.receipt import Receipt
from kvstore_client.store.store import Store

PUTS_AT_ONCE = 64
"""The most unfinished stores of one call: a session may have a few hundred, shared by all its calls."""
Result = TypeVar("Result")


def put(
    context: Context, namespace: str, key: str | bytes, pieces: Sequence[Buffer], durability: Durability | None,
    *, replace: bool,
) -> Receipt:  # fmt: skip
    """See ``Client.put_pieces``."""
    return _begun_put(context, namespace, key, pieces, durability, replace=replace)[0]


def _begun_put(
    context: Context, namespace: str, key: str | bytes, pieces: Sequence[Buffer], durability: Durability | None,
    *, replace: bool,
) -> tuple[Receipt, bool]:  # fmt: skip
    """Return (receipt, True when the sidecar did not answer in time)."""
    check_durability(durability)
    if durability is not None and durability > Durability.LOCAL:
        raise InvalidRequest(f"durability {durability.name}: values stay on their node: ask for LOCAL at most")
    spec, names = namespace_spec(namespace), Key.of(key)
    version = SystemRandom().bytes(16)
    value = Value.of(spec, version, [flat(piece) for piece in pieces])
    if value.chunk_count > 1 and not replace:  # its parts have new names: it would be called stored, and not be there
        raise InvalidRequest(f"replace=False: give {CHUNK_BYTES - HEAD.size} bytes at most, or use put_each")
    digests = names.chain(version, value.chunk_count)
    try:
        with context.or_miss() as miss:
            session, name = context.ready(spec)
            store = Store(session, value, context)
            store.stage(reserve_value(value, name, digests, names.whole + names.first if replace else b""))
            settle = settle_of(context, Prompt.known(spec, digests, EXACT), (), durability)
            commit = partial(_all_of, value, store)
            return Receipt(commit_beside(context.committer, commit, store.abort, waits=False), settle), False
    except Exhausted as error:
        context.count("stores_refused")
        return Receipt.nothing(error.message), False
    return Receipt.nothing(miss.why), miss.is_late


def _all_of(value: Value, store: Store) -> Committed:
    """Commit all of a value, or nothing."""
    level, stored, reason = store.commit()
    if stored < value.token_count:
        return Durability.NONE, 0, reason or "a part of it found no room: raise arena.capacity_bytes"
    return level, stored, reason


def get(
    context: Context, namespace: str, key: str | bytes, into: Buffer | None, *, verify: bool
) -> NDArray[np.uint8] | None:  # fmt: skip
    """See ``Client.get_bytes``."""
    names, target = Key.of(key), None if into is None else Pieces([writable(into)])
    found = _read(context, namespace, verify, lambda reader: reader.get(names, target), None)
    return None if found is None else found.arrays[0]


def get_each(
    context: Context, namespace: str, keys: Sequence[str | bytes], targets: Sequence[Buffer], *, verify: bool
) -> list[bool]:  # fmt: skip
    """See ``Client.get_each``."""
    if len(keys) != len(targets):
        raise InvalidRequest(f"{len(keys)} keys and {len(targets)} targets: give one target for each key")
    names = [Key.of(key) for key in keys]
    places = [Pieces([writable(one) for one in (each if isinstance(each, list) else [each])]) for each in targets]
    spans = [(Span.of(one), f"targets[{number}]") for number, each in enumerate(places) for one in each.arrays]
    check_apart([span for span, _ in spans], [name for _, name in spans])
    if not names:
        return []
    return _read(context, namespace, verify, lambda reader: reader.get_each(names, places), [False] * len(names))


def put_each(
    context: Context, namespace: str, keys: Sequence[str | bytes], values: Sequence[Buffer], timeout_s: float
) -> list[bool]:  # fmt: skip
    """See ``Client.put_each``."""
    if len(keys) != len(values):
        raise InvalidRequest(f"{len(keys)} keys and {len(values)} values: give one value for each key")
    monotonic = context.clock.monotonic
    until_s = monotonic() + timeout_s
    receipts: list[Receipt | None] = []
    is_late = False  # a sidecar that stands still would keep each value waiting as long as the first
    for key, value in zip(keys, values, strict=True):
        if len(receipts) >= PUTS_AT_ONCE:
            _is_kept(receipts[-PUTS_AT_ONCE], until_s - monotonic())
        pieces = [flat(each) for each in (value if isinstance(value, list) else [value])]
        is_large = sum(piece.nbytes for piece in pieces) > CHUNK_BYTES - HEAD.size
        is_there, begun_s = False, monotonic()
        if is_large and not is_late and begun_s <= until_s:
            is_there = exists(context, namespace, [key])[0]
            is_late = not is_there and monotonic() - begun_s >= context.timeout_s
        if is_late or monotonic() > until_s:
            receipts.append(Receipt.nothing("the time for these values is over"))
        elif is_there:
            receipts.append(None)
        else:
            receipt, is_late = _begun_put(context, namespace, key, pieces, Durability.MEMORY, replace=is_large)
            receipts.append(receipt)
    return [_is_kept(each, until_s - monotonic()) for each in receipts]


def _is_kept(receipt: Receipt | None, timeout_s: float) -> bool:
    """Return True when a store has kept its value in time. ``receipt`` None: the value was stored already."""
    if receipt is None:
        return True
    try:
        return receipt.wait(max(0.0, timeout_s)) > Durability.NONE
    except DeadlineExceeded:
        return False


def exists(context: Context, namespace: str, keys: Sequence[str | bytes]) -> list[bool]:
    """Return, per key, True when it has a value."""
    names = [Key.of(key) for key in keys]
    return _read(context, namespace, False, lambda reader: reader.exists(names), [False] * len(names))


def count_leading(context: Context, namespace: str, keys: Sequence[str | bytes]) -> int:
    """See ``Client.count_leading``."""
    return _read(context, namespace, False, lambda reader: reader.count_leading(keys), 0)


def _read(
    context: Context, namespace: str, verify: bool, read: Callable[[Reader], Result], otherwise: Result
) -> Result:  # fmt: skip
    spec = namespace_spec(namespace)
    with context.or_miss():
        session, name = context.ready(spec)
        return read(Reader(session, name, spec, context.copier, context.timeout_s, verify))
    return otherwise
