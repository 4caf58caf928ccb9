"""Every way for a caller's arrays into and out of the client, as a table: what goes in and what comes back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from kvstore_client import AsyncClient, ModelSpec, Paged

from kvstore.spec import LayerSpec
from tests.e2e.odd_arrays import plain
from tests.specs import bits, random_cache, small_spec, tokens_of

COUNT = 20
"""A chunk and a part of one."""
HEADS, DIM, HIDDEN, PAGE = 2, 8, 24, 10
KV = (HEADS, COUNT, DIM)
E = (COUNT, HIDDEN)
PAGES = (2, COUNT // PAGE, PAGE, HEADS, DIM)


def spec_of(dtype: str, *, keeps_e: bool = False) -> ModelSpec:
    """A model whose caches, and E, are of this dtype."""
    heads = LayerSpec(kv_heads=HEADS, k_dim=DIM, v_dim=DIM)
    return small_spec(
        model_id=f"doors-{dtype}-{keeps_e}", layers=(heads,) * 2, cache_dtype=dtype, hidden_dtype=dtype,
        keeps_e=keeps_e, hidden_size=HIDDEN,
    )  # fmt: skip


class Visit:
    """One call through a door: a client, a model, and a prompt of its own."""

    def __init__(self, client: Any, dtype: str, seed: int) -> None:
        self.client, self.dtype, self.seed = client, dtype, seed
        self.spec, self.e_spec = spec_of(dtype), spec_of(dtype, keeps_e=True)
        self.tokens = tokens_of(COUNT, seed)

    def cache(self) -> list[Any]:
        return random_cache(self.spec, COUNT, self.seed)

    def plane(self, shape: tuple[int, ...]) -> Any:
        return plain(shape, self.dtype)


@dataclass(frozen=True)
class Door:
    """``method`` and ``argument``: what of the client's it is. ``use(visit, value)`` stores ``value`` and returns the
    bits that come back, or fetches into it and returns the bits that belong there; in the value's shape."""

    method: str
    argument: str
    shape: tuple[int, ...]
    use: Callable[[Visit, Any], Any]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.method}-{self.argument}{'-' + self.name if self.name else ''}"


# ---------------------------------------------------------------- stores


def _store(visit: Visit, value: Any) -> Any:
    client, kv = visit.client, visit.cache()
    kv[1] = (kv[1][0], value)
    client.store(visit.spec, visit.tokens, kv).wait(10)
    return bits(client.fetch(visit.spec, visit.tokens)[1][1])


def _store_hidden(visit: Visit, value: Any) -> Any:
    client = visit.client
    client.store(visit.spec, visit.tokens, visit.cache(), hidden={1: value}).wait(10)
    return bits(client.fetch(visit.spec, visit.tokens, hidden_layers=(1,)).hidden[1])


def _store_e(visit: Visit, value: Any) -> Any:
    client = visit.client
    client.store(visit.e_spec, visit.tokens, [visit.plane(E), value]).wait(10)
    return bits(client.fetch(visit.e_spec, visit.tokens)[1])


def _store_segment(visit: Visit, value: Any) -> Any:
    client, kv = visit.client, visit.cache()
    kv[0] = (value, kv[0][1])
    client.store_segment(visit.spec, visit.tokens, kv).wait(10)
    return bits(client.fetch_segment(visit.spec, visit.tokens)[0][0])


def _store_segment_hidden(visit: Visit, value: Any) -> Any:
    client = visit.client
    client.store_segment(visit.spec, visit.tokens, visit.cache(), hidden={0: value}).wait(10)
    return bits(client.fetch_segment(visit.spec, visit.tokens, hidden_layers=(0,)).hidden[0])


def _put_layer(visit: Visit, value: Any) -> Any:
    client, kv = visit.client, visit.cache()
    with client.start_store(visit.spec, visit.tokens) as writer:
        writer.put_layer(0, kv[0])
        writer.put_layer(1, (value, kv[1][1]))
        writer.commit().wait(10)
    return bits(client.fetch(visit.spec, visit.tokens)[1][0])


def _put_heads(visit: Visit, value: Any) -> Any:
    """One shard of two."""
    client, kv = visit.client, visit.cache()
    with client.start_store(visit.spec, visit.tokens, shards=2) as first:
        other = client.join_store(first.ticket, 1)
        for layer, (k, v) in enumerate(kv):
            first.put_layer(layer, (k[:1], v[:1]), heads=(0, 1))
            other.put_layer(layer, (value if layer else k[1:], v[1:]), heads=(1, 2))
        done = [other.commit(), first.commit()]
        for receipt in done:
            receipt.wait(10)
    return bits(client.fetch(visit.spec, visit.tokens)[1][0])[1:]


def _put_pages(visit: Visit, value: Any) -> Any:
    client, kv = visit.client, visit.cache()
    with client.start_store(visit.spec, visit.tokens) as writer:
        writer.put_layer(0, kv[0])
        writer.put_layer(1, Paged([value], np.arange(COUNT)))
        writer.commit().wait(10)
    found = client.fetch(visit.spec, visit.tokens)[1]
    return np.stack([bits(plane).transpose(1, 0, 2).reshape(PAGES[1:]) for plane in found])


def _put_hidden(visit: Visit, value: Any) -> Any:
    client, kv = visit.client, visit.cache()
    with client.start_store(visit.spec, visit.tokens, hidden_layers=(1,)) as writer:
        for layer, pair in enumerate(kv):
            writer.put_layer(layer, pair)
        writer.put_hidden(1, value)
        writer.commit().wait(10)
    return bits(client.fetch(visit.spec, visit.tokens, hidden_layers=(1,)).hidden[1])


# ---------------------------------------------------------------- fetches


_stored: WeakKeyDictionary[Any, set[ModelSpec]] = WeakKeyDictionary()
"""By client, the models of which a cache is stored."""


def _kept(visit: Visit) -> list[Any]:
    """A cache that is stored, once for all visits of a client and a model."""
    visit.tokens = tokens_of(COUNT, 1)
    kv = random_cache(visit.spec, COUNT, 1)
    if _is_new(visit.client, visit.spec):
        for store in (visit.client.store, visit.client.store_segment):
            store(visit.spec, visit.tokens, kv).wait(10)
    return kv


def _is_new(client: Any, spec: ModelSpec) -> bool:
    stored = _stored.setdefault(client, set())
    is_new = spec not in stored
    stored.add(spec)
    return is_new


def _into(visit: Visit, value: Any) -> list[Any]:
    """Places for a fetch, of which one is the value."""
    return [(visit.plane(KV), visit.plane(KV)), (value, visit.plane(KV))]


def _by(method: str) -> Callable[[Visit, Any], Any]:
    def use(visit: Visit, value: Any) -> Any:
        kv = _kept(visit)
        found = getattr(visit.client, method)(visit.spec, visit.tokens, into=_into(visit, value))
        _finish(found)
        return kv[1][0]

    return use


def _finish(found: Any) -> None:
    """Take all of it, in whatever way it comes."""
    if hasattr(found, "wait"):
        found.wait(10)
    elif not isinstance(found, list):
        assert len(list(found)) == 2


def _fetch_heads(visit: Visit, value: Any) -> Any:
    kv = _kept(visit)
    visit.client.fetch(visit.spec, visit.tokens, into=[(value, visit.plane((1, COUNT, DIM)))], heads=(1, 2), layers=[1])
    return kv[1][0][1:]


def _fetch_e(visit: Visit, value: Any) -> Any:
    tokens, e = tokens_of(COUNT, 1), [plain(E, visit.dtype) for _ in range(2)]
    if _is_new(visit.client, visit.e_spec):
        visit.client.store(visit.e_spec, tokens, e).wait(10)
    visit.client.fetch(visit.e_spec, tokens, into=[plain(E, visit.dtype), value])
    return e[1]


def _paged(kv: list[Any]) -> Any:
    return np.stack([plane.transpose(1, 0, 2).reshape(PAGES[1:]) for plane in kv[1]])


def _fetch_pages(visit: Visit, value: Any) -> Any:
    kv = _kept(visit)
    visit.client.fetch(visit.spec, visit.tokens, into=Paged([visit.plane(PAGES), value], np.arange(COUNT)))
    return _paged(kv)


def _start_fetch(visit: Visit, value: Any) -> Any:
    kv = _kept(visit)
    match = visit.client.lookup(visit.spec, visit.tokens, hold=True)
    try:
        visit.client.start_fetch(match.ticket, into=_into(visit, value)).wait(10)
    finally:
        visit.client.release_ticket(match.ticket)
    return kv[1][0]


def _start_fetch_pages(visit: Visit, value: Any) -> Any:
    kv = _kept(visit)
    match = visit.client.lookup(visit.spec, visit.tokens, hold=True)
    try:
        into = Paged([visit.plane(PAGES), value], np.arange(COUNT))
        visit.client.start_fetch(match.ticket, into=into).wait(10)
    finally:
        visit.client.release_ticket(match.ticket)
    return _paged(kv)


DOORS = [
    Door("store", "kv", KV, _store),
    Door("store", "hidden", E, _store_hidden),
    Door("store", "kv", E, _store_e, "E"),
    Door("store_segment", "kv", KV, _store_segment),
    Door("store_segment", "hidden", E, _store_segment_hidden),
    Door("put_layer", "kv", KV, _put_layer),
    Door("put_layer", "kv", (1, COUNT, DIM), _put_heads, "heads"),
    Door("put_layer", "kv", PAGES, _put_pages, "pages"),
    Door("put_hidden", "hidden", E, _put_hidden),
    Door("fetch", "into", KV, _by("fetch")),
    Door("fetch", "into", (1, COUNT, DIM), _fetch_heads, "heads"),
    Door("fetch", "into", E, _fetch_e, "E"),
    Door("fetch", "into", PAGES, _fetch_pages, "pages"),
    Door("fetch_layers", "into", KV, _by("fetch_layers")),
    Door("fetch_segment", "into", KV, _by("fetch_segment")),
    Door("fetch_segment_layers", "into", KV, _by("fetch_segment_layers")),
    Door("start_fetch", "into", KV, _start_fetch),
    Door("start_fetch", "into", PAGES, _start_fetch_pages, "pages"),
    Door("start_fetch_prefix", "into", KV, _by("start_fetch_prefix")),
    Door("start_fetch_segment", "into", KV, _by("start_fetch_segment")),
]


# ---------------------------------------------------------------- values without a dtype


def _put_bytes(client: Any, key: str, value: Any) -> Any:
    client.put_bytes("doors", key, value).wait(10)
    return client.get_bytes("doors", key)


def _put_pieces(client: Any, key: str, value: Any) -> Any:
    client.put_pieces("doors", key, [value, b"more"]).wait(10)
    found = client.get_bytes("doors", key)
    return None if found is None else found[:-4]


def _put_each(client: Any, key: str, value: Any) -> Any:
    assert client.put_each("doors", [key, key + "2"], [[value], b"more"]) == [True, True]
    return client.get_bytes("doors", key)


def _put_encoder(client: Any, key: str, value: Any) -> Any:
    spec = small_spec()
    client.put_encoder(spec, key, value).wait(10)
    found = client.get_encoder(spec, key)
    assert (tuple(found.shape), str(found.dtype)) == (tuple(value.shape), f"torch.{_name_of(value)}")
    return bits(found).reshape(-1).view(np.uint8)


def _name_of(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _noise(client: Any, key: str, size: int) -> Any:
    data = np.random.default_rng(3).integers(0, 256, size, np.uint8)
    client.put_bytes("doors", key, data).wait(10)
    return data


def _get_bytes(client: Any, key: str, value: Any) -> Any:
    data = _noise(client, key, _size(value))
    assert client.get_bytes("doors", key, into=value) is not None
    return data


def _get_each(client: Any, key: str, value: Any) -> Any:
    data = _noise(client, key, _size(value))
    assert client.get_each("doors", [key], [[value]]) == [True]
    return data


def _size(value: Any) -> int:
    is_sparse = getattr(value, "layout", torch.strided) is not torch.strided
    return 8 if is_sparse else int(getattr(value, "nbytes", 8))


@dataclass(frozen=True)
class BytesDoor:
    """As ``Door``: ``use(client, key, value)``, with the bits as bytes."""

    method: str
    argument: str
    use: Callable[[Any, str, Any], Any]

    def __str__(self) -> str:
        return f"{self.method}-{self.argument}"


BYTES_DOORS = [
    BytesDoor("put_bytes", "data", _put_bytes),
    BytesDoor("put_pieces", "pieces", _put_pieces),
    BytesDoor("put_each", "values", _put_each),
    BytesDoor("put_encoder", "embeddings", _put_encoder),
    BytesDoor("get_bytes", "into", _get_bytes),
    BytesDoor("get_each", "targets", _get_each),
]


# ---------------------------------------------------------------- the asyncio client by the same table


class Awaited:
    """The asyncio client's calls, each waited for, in the place of the other's."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def __getattr__(self, name: str) -> Any:
        if not hasattr(AsyncClient, name):
            return getattr(self._client.client, name)

        def call(*args: Any, **options: Any) -> Any:
            made = getattr(self._client, name)(*args, **options)
            if hasattr(made, "__aiter__"):
                return self._all_of(made)
            return asyncio.run_coroutine_threadsafe(made, self._loop).result(30)

        return call

    def _all_of(self, stream: Any) -> list[Any]:
        async def take() -> list[Any]:
            return [each async for each in stream]

        return asyncio.run_coroutine_threadsafe(take(), self._loop).result(30)


def running_loop() -> asyncio.AbstractEventLoop:
    """An event loop on a thread of its own; stopped by ``call_soon_threadsafe(loop.stop)``."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop
