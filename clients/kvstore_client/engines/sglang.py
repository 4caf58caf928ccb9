"""SGLang's HiCache, backed by the sidecar: host pages go there and come back without a copy in between.

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "class_name": "KVStoreHiCache",
            "module_path": "kvstore_client.engines.sglang", "interface_v1": 1, "weights_digest": "<hex>"}'

A page is an opaque value under SGLang's page hash, in a namespace that names all that its bytes depend on: model,
weights, rank, layout, dtype and page size. A call never raises for a sidecar that is gone: pages are missing then.

Source: SGLang 0.5.23, sglang/srt/mem_cache/hicache_storage.py. Written against that interface; SGLang itself, which
needs CUDA, was not run with it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import token_array
from kvstore_client.arrays import Tensor
from kvstore_client.begin import connect

_log = logging.getLogger("kvstore.sglang")
_CONFIGURED = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "should_split_heads")


class HostPool(Protocol):
    """The engine's pool of pages in host memory: where the pages lie that tokens' indices name."""

    page_size: int

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[Sequence[int], Sequence[int]]: ...


def _interface() -> Any:
    """Return SGLang's own abstract class where it is installed: its loader insists on it."""
    try:
        return importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage
    except ImportError:
        return object


def page_hashes(tokens: Tensor | Sequence[int], page_size: int, prior: str | None = None) -> list[str]:
    """SGLang's keys of the full pages of a prompt, to ask for or warm them from outside the engine. ``prior``: the hex
    digest before the first page, where SGLang seeds it.

    Source: SGLang 0.5.23: sha256 over the digest before and the tokens as little-endian u32."""
    if not isinstance(page_size, int) or page_size < 1:
        raise InvalidRequest(f"page_size {page_size!r} must be 1 or more: SGLang's --page-size")
    array = token_array(tokens, 1 << 32)
    digest = bytes.fromhex(prior or "")
    found: list[str] = []
    for start in range(0, array.size // page_size * page_size, page_size):
        digest = hashlib.sha256(digest + array[start : start + page_size].tobytes()).digest()
        found.append(digest.hex())
    return found


class KVStoreHiCache(_interface()):  # type: ignore[misc]  # a base that mypy cannot know
    """The storage backend of one rank. Safe to call from HiCache's several threads.

    Raises, at the start only: InvalidRequest for a configuration that is wrong.
    """

    def __init__(self, storage_config: object, options: object = None) -> None:
        extra = dict(getattr(storage_config, "extra_config", None) or {})
        self._identity = {name: getattr(storage_config, name, None) for name in _CONFIGURED}
        if getattr(storage_config, "is_mla_model", False):  # every rank has the same latents
            self._identity.update(tp_rank=None, tp_size=None)
        model = getattr(storage_config, "model_name", None)
        if not model:
            raise InvalidRequest("SGLang names no model: start it with --served-model-name or --model-path")
        self._identity["model"] = model
        self._identity["weights"] = extra.get("weights_digest") or f"unverified:{model}"
        self._client = connect(extra.get("socket"), required=False)
        self._pool: HostPool | None = None
        self._namespace = self._name_of(None)

    def _name_of(self, pool: object) -> str:
        """Return the namespace: everything that a page's bytes depend on beside its hash."""
        facts = dict(self._identity)
        if pool is not None:
            facts |= {name: str(getattr(pool, name, None)) for name in ("dtype", "layout", "page_size")}
            facts["pool"] = type(pool).__name__
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        return f"sglang/{digest}"

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Set the pool whose pages ``host_indices`` name."""
        self.mem_pool_host = self._pool = mem_pool_host
        self._namespace = self._name_of(mem_pool_host)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()

    # ------------------------------------------------------------ pages in the host pool

    def _pages(self, keys: Sequence[str], host_indices: Tensor) -> list[list[NDArray[np.uint8]]]:
        """Return, per key, the buffers of its page in the pool."""
        if self._pool is None:
            raise InvalidRequest("no host pool: call register_mem_pool_host first")
        _check_indices(host_indices, len(keys), self._pool)
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        if not keys or len(addresses) % len(keys) or len(addresses) != len(sizes):
            raise InvalidRequest(f"the pool names {len(addresses)} buffers for {len(keys)} pages")
        buffers = [_memory(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        count = len(buffers) // len(keys)
        return [buffers[at : at + count] for at in range(0, len(buffers), count)]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        """Fetch pages straight into the host pool. Returns one bool per key; a page that is False may be
        overwritten."""
        if not keys:
            return []
        try:
            return self._client.get_each(self._namespace, keys, self._pages(keys, host_indices))
        except KVStoreError as error:
            return self._none(keys, error)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        """Store pages straight from the host pool; stored pages are not sent again. Returns one bool per key."""
        if not keys:
            return []
        try:
            return self._client.put_each(self._namespace, keys, self._pages(keys, host_indices))
        except KVStoreError as error:
            return self._none(keys, error)

    @staticmethod
    def _none(keys: Sequence[str], error: KVStoreError) -> list[bool]:
        _log.warning("kvstore: %s: these pages count as missing", error.message)
        return [False] * len(keys)

    # ------------------------------------------------------------ what is there

    def exists(self, key: str) -> bool:
        """Return True when a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return the number of leading pages that are stored."""
        try:
            return self._client.count_leading(self._namespace, keys)
        except KVStoreError as error:
            self._none(keys, error)
            return 0

    # ------------------------------------------------------------ tensors

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> Tensor:
        """Fetch a page into a flat tensor, and return it; None when the page is not stored. Without a tensor: return
        new bytes."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Tensor] | None = None, target_sizes: object = None
    ) -> list[Tensor]:
        """Return, per key, the tensor that was filled, or None."""
        try:
            if target_locations is not None:
                targets = list(target_locations)
                done = self._client.get_each(self._namespace, keys, targets)
                return [target if is_done else None for target, is_done in zip(targets, done, strict=True)]
            return [_tensor(self._client.get_bytes(self._namespace, key)) for key in keys]
        except KVStoreError as error:
            _log.warning("kvstore: %s: these pages count as missing", error.message)
            return [None] * len(keys)

    def set(self, key: str, value: Tensor = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Keep a flat tensor as a page."""
        return self.batch_set([key], [target_location if value is None else value])

    def batch_set(
        self,
        keys: list[str],
        values: Sequence[Tensor] | None = None,
        target_locations: Sequence[Tensor] | None = None,
        target_sizes: object = None,
    ) -> bool:
        """Keep flat tensors as pages. Returns True when all of them are stored now."""
        given = target_locations if values is None else values
        try:
            if given is None or not hasattr(given, "__len__") or len(given) != len(keys):
                raise InvalidRequest(f"{len(keys)} keys need as many tensors")
            return all(self._client.put_each(self._namespace, keys, list(given)))
        except KVStoreError as error:
            return all(self._none(keys, error)) and not keys

    def clear(self) -> None:
        """Remove nothing: unread pages are evicted in time, and another model's pages are not ours."""
        _log.warning("kvstore: clear() removes nothing; start the sidecar on another state directory to begin anew")

    def get_stats(self) -> None:
        """Return nothing: ``kvstore status`` and the sidecar's metrics page have the statistics."""
        return


def _check_indices(host_indices: Tensor, page_count: int, pool: HostPool) -> None:
    """Check that these are tokens of ``page_count`` pages inside the pool: we read and write at the addresses that they
    give. Raises: InvalidRequest."""
    step = pool.page_size
    try:
        found = np.asarray(host_indices)
    except (ValueError, TypeError, RuntimeError) as error:
        raise InvalidRequest(f"host_indices must be one run of whole numbers: {error}") from error
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise InvalidRequest(f"host_indices must be one run of whole numbers, not {found.dtype} of {found.shape}")
    if found.size != page_count * step:
        raise InvalidRequest(f"{found.size} host indices for {page_count} pages of {step} tokens")
    size = getattr(pool, "size", None)
    if found.min() < 0 or (size is not None and found.max() >= size):
        raise InvalidRequest(f"host_indices {found.min()}..{found.max()} lie outside of the pool's {size} tokens")
    pages = found.reshape(page_count, step)
    if (pages != pages[:, :1] + np.arange(step)).any():
        raise InvalidRequest(f"host_indices must name {step} tokens in a row for each page: it is read as one run")


def _memory(address: int, size: int) -> NDArray[np.uint8]:
    """Bytes of the engine's host pool, which lives as long as the engine."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _tensor(value: NDArray[np.uint8] | None) -> Tensor:
    return None if value is None else importlib.import_module("torch").from_numpy(value)
