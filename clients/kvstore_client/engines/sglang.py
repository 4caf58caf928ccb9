"""SGLang's HiCache, backed by the sidecar: host pages go there and come back without a copy in between.

    python -m sglang.launch_server ... --enable-hierarchical-cache --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvstore", "class_name": "KVStoreHiCache",
            "module_path": "kvstore_client.engines.sglang", "interface_v1": 1, "weights_digest": "<hex>"}'

A page is an opaque value under SGLang's page hash, in a namespace that names all that its bytes depend on: model,
weights, settings, rank, and the pool's geometry. Each of the engine's host pools has a namespace of its own. A call
never raises for a sidecar that is gone: pages are missing then.

Source: SGLang 0.5.23, sglang/srt/mem_cache/hicache_storage.py. Tested with SGLang's own controller and host pools, on
CPUs; its kernels, which need a GPU, were not run.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.keys import token_array
from kvstore.seams import SystemRandom
from kvstore_client.arrays import Tensor, memory_at
from kvstore_client.begin import connect
from kvstore_client.engines.sglang_calls import CALL_S_MAX, PageCalls, warn_missing
from kvstore_client.engines.sglang_settings import OF_DRAFTS, OF_ENGINE, OF_WEIGHTS, BackendSettings

_log = logging.getLogger("kvstore.sglang")
_CONFIGURED = (
    "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
    "should_split_heads",
)  # fmt: skip
_OF_POOL = (
    "dtype", "layout", "page_size", "size_per_token", "layer_num", "target_layer_num", "start_layer", "end_layer",
    "head_num", "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank", "qk_rope_head_dim", "storage_format_tag",
)  # fmt: skip
_FIRST = (("", ""), ("default", ""))
"""Version and ``clear`` of an engine whose weights nobody has replaced, or named otherwise."""
KV, MAMBA = "kv", "mamba"
"""SGLang's names of a model's pool of K and V, and of its recurrent states."""
BLOCK_GROUPS, TRAILING_PAGES = "block_groups", "trailing_pages"
"""SGLang's names of what a pool must have for a prefix; else all of its pages."""


class PoolTransfer(Protocol):
    """SGLang's transfer of one pool's pages. ``hit_policy``: for ``batch_exists_v2``."""

    name: object
    keys: list[str] | None
    host_indices: Tensor
    hit_policy: object


class HostPool(Protocol):
    """One of the engine's pools of pages in host memory: where the pages lie that tokens' indices name."""

    page_size: int

    def get_page_buffer_meta(self, indices: Tensor) -> tuple[Sequence[int], Sequence[int]]: ...


def _interface() -> Any:
    """Return SGLang's own abstract class where it is installed: its loader insists on it."""
    try:
        return importlib.import_module("sglang.srt.mem_cache.hicache_storage").HiCacheStorage
    except ImportError:
        return object


def _settings() -> Any:
    """Return the settings of the SGLang engine that this process belongs to; None outside of one."""
    try:
        return importlib.import_module("sglang.srt.runtime_context").get_server_args()
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return None


def _weight_version() -> str:
    """Return what whoever replaced the engine's weights last called them; empty where nothing tells."""
    try:
        return str(importlib.import_module("sglang.srt.runtime_context").get_serving().weight_version)
    except (ImportError, AttributeError, ValueError, RuntimeError):
        return ""


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
        given = BackendSettings.of(getattr(storage_config, "extra_config", None) or {})
        settings = _settings()
        model = getattr(storage_config, "model_name", None)
        if not model:
            raise InvalidRequest("SGLang names no model: start it with --served-model-name or --model-path")
        self._is_mla = bool(getattr(storage_config, "is_mla_model", False))
        self._identity = {name: getattr(storage_config, name, None) for name in _CONFIGURED}
        self._identity["model"] = model
        self._identity["weights"] = given.weights_digest or f"unverified:{model}"
        names = OF_ENGINE if given.weights_digest else (*OF_ENGINE, *OF_WEIGHTS)
        self._identity |= {name: getattr(settings, name, None) for name in names}
        self._identity["kv_cache_dtype"] = given.kv_cache_dtype or self._identity["kv_cache_dtype"]
        self._drafts = {name: getattr(settings, name, None) for name in OF_DRAFTS}
        self._private = ""
        self._thread = threading.local()
        self._client = connect(given.socket, required=False, timeout_s=CALL_S_MAX)
        self._calls = PageCalls(self._client)
        self._pools: dict[str, HostPool] = {}
        self._namespaces: dict[str, str] = {}

    def _namespace(self, name: str) -> str:
        """Return the namespace of a pool: everything that a page's bytes depend on beside its name."""
        namespaces = self._namespaces
        found = namespaces.get(name)
        if found is None:
            facts = json.dumps(self._facts(name), sort_keys=True, default=str)
            found = namespaces[name] = f"sglang/{hashlib.sha256(facts.encode()).hexdigest()}"
        return found

    def _named(self, keys: Sequence[str], version: str | None = None) -> list[str]:
        """Return the pages' names: SGLang's keys, with what tells weights that were replaced under another version
        (None: of now), or before ``clear``. Not in the namespace: with pages of before it keeps its place."""
        era = (_weight_version() if version is None else version, self._private)
        tag = "" if era in _FIRST else hashlib.sha256(json.dumps(era).encode()).hexdigest()
        return [tag + key for key in keys]

    def _kept_as(self, keys: Sequence[str]) -> list[str] | None:
        """Return the names under which this thread keeps pages. None where it has kept pages of other weights: what it
        still has to keep may be of them, too, for SGLang names the new weights first, and ends its threads when it
        flushes its cache."""
        version = _weight_version()
        if getattr(self._thread, "version", version) != version:
            _log.warning("kvstore: pages are not kept until SGLang's cache is flushed: they may be of older weights")
            return None
        self._thread.version = version
        return self._named(keys, version)

    def _facts(self, name: str) -> dict[str, object]:
        pool = self._pools.get(name)
        facts: dict[str, object] = {**self._identity, "pool": name}
        if self._is_mla and name != MAMBA and not _has_heads(pool):  # every rank has the same latents
            facts.update(tp_rank=None, tp_size=None)
        form = {each: str(getattr(pool, each, None)) for each in _OF_POOL}
        facts |= {"kind": type(pool).__name__, "form": form}
        if "draft" in name or form["target_layer_num"] not in ("None", form["layer_num"]):
            facts |= self._drafts  # a pool may keep the draft model's layers behind the model's own
        return facts

    def register_mem_pool_host(self, mem_pool_host: HostPool) -> None:
        """Set the pool whose pages ``host_indices`` name. Raises InvalidRequest for a pool of plain bytes of unknown
        meaning."""
        self.mem_pool_host = mem_pool_host
        self.register_mem_host_pool_v2(mem_pool_host, KV)

    def register_mem_host_pool_v2(self, host_pool: HostPool, host_pool_name: object) -> None:
        """Set a pool by its name. Raises as ``register_mem_pool_host``."""
        if str(getattr(host_pool, "dtype", "")) == "torch.uint8" and self._identity["kv_cache_dtype"] is None:
            raise InvalidRequest(
                "the pool keeps float8 numbers as plain bytes: name their dtype as 'kv_cache_dtype' in "
                "--hicache-storage-backend-extra-config, so that pages of another one are never taken for them"
            )
        if self._is_mla and _has_heads(host_pool) and self._identity["tp_rank"]:
            _log.warning(
                "kvstore: SGLang keeps none of the draft's pages of this rank, and loads no prefix without them: use a "
                "draft with latents, as the model has, or one rank"
            )
        self._pools[str(host_pool_name)] = host_pool
        self._namespaces = {}

    def on_host_pools_registered(self) -> None:
        """Do nothing: pools may come at any time."""

    def close(self) -> None:
        """End the session. Idempotent."""
        self._client.close()

    # ------------------------------------------------------------ pages in the host pools

    def _pages(self, name: str, keys: Sequence[str], host_indices: Tensor) -> list[list[NDArray[np.uint8]]] | None:
        """Return, per key, the buffers of its page in a pool; None where the indices are wrong."""
        try:
            return self._places(name, keys, host_indices)
        except KVStoreError as error:
            warn_missing(error)
            return None

    def _places(self, name: str, keys: Sequence[str], host_indices: Tensor) -> list[list[NDArray[np.uint8]]]:
        """As ``_pages``. Raises: InvalidRequest."""
        pool = self._pools.get(name)
        if pool is None:
            raise InvalidRequest(f"no host pool {name!r}: call register_mem_pool_host first")
        _check_indices(host_indices, len(keys), pool)
        addresses, sizes = pool.get_page_buffer_meta(host_indices)
        if not keys or len(addresses) % len(keys) or len(addresses) != len(sizes):
            raise InvalidRequest(f"the pool names {len(addresses)} buffers for {len(keys)} pages")
        buffers = [memory_at(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        count = len(buffers) // len(keys)
        return [buffers[at : at + count] for at in range(0, len(buffers), count)]

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        """Fetch pages straight into the host pool. Returns one bool per key; a page that is False may be
        overwritten."""
        return self._got(KV, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: object = None) -> list[bool]:
        """Store pages straight from the host pool; stored pages are not sent again. Returns one bool per key."""
        return self._set(KV, keys, host_indices)

    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[object, list[bool]]:
        """``batch_get_v1`` for several pools: name -> one bool per key."""
        return {each.name: self._got(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[object, list[bool]]:
        """``batch_set_v1`` for several pools: name -> one bool per key."""
        return {each.name: self._set(str(each.name), each.keys or [], each.host_indices) for each in transfers}

    def _got(self, name: str, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        if not keys or (name == KV and self._is_logical):
            return [True] * len(keys)
        targets = self._pages(name, keys, host_indices)
        if targets is None:
            return [False] * len(keys)
        return self._calls.load(self._namespace(name), self._named(keys), targets)

    def _set(self, name: str, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        if not keys or (name == KV and self._is_logical):
            return [True] * len(keys)
        names, pages = self._kept_as(keys), self._pages(name, keys, host_indices)
        if names is None or pages is None:
            return [False] * len(keys)
        return self._calls.store(self._namespace(name), names, pages)

    @property
    def _is_logical(self) -> bool:
        """True where the model's pool of K and V only counts pages, whose bytes all lie in other pools."""
        return getattr(self._pools.get(KV), "kv_buffer", KV) is None

    # ------------------------------------------------------------ what is there

    def exists(self, key: str) -> bool:
        """Return True when a page is stored."""
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Return the number of leading pages that are stored."""
        if self._is_logical:
            return len(keys)
        return self._calls.count_leading(self._namespace(KV), self._named(keys))

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Sequence[PoolTransfer] | None = None, extra_info: object = None
    ) -> Any:
        """Return SGLang's ``PoolTransferResult``: the longest prefix that all pools have, how far each pool has it, and
        the lengths at which an engine can go on. Of a pool with ``trailing_pages`` only the last pages before such a
        length count, as many as its transfer has keys; of others all of them."""
        sglang = importlib.import_module("sglang.srt.mem_cache.hicache_storage")
        count = self.batch_exists(keys)
        hits: dict[object, int] = {sglang.PoolName.KV: count} if count else {}
        lengths = list(range(1, count + 1))
        for each in pool_transfers or ():
            if each.hit_policy == BLOCK_GROUPS:
                continue  # it limits nothing, and a pool without an answer is asked for all the same
            window = max(1, len(each.keys or ())) if each.hit_policy == TRAILING_PAGES else count
            there = self._calls.has(self._namespace(str(each.name)), self._named(keys[:count]))
            restorable = _restorable(there, window)
            if restorable:
                hits[each.name] = restorable[-1]
            lengths = sorted(set(restorable).intersection(lengths))
        return sglang.PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    # ------------------------------------------------------------ tensors

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> Tensor:
        """Fetch a page into a flat tensor, and return it; None when the page is not stored. Without a tensor: return
        new bytes."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Sequence[Tensor] | None = None, target_sizes: object = None
    ) -> list[Tensor]:
        """Return, per key, the tensor that was filled, or None."""
        namespace, names = self._namespace(KV), self._named(keys)
        if target_locations is None:
            return [_tensor(self._calls.read(namespace, name)) for name in names]
        targets = list(target_locations)
        done = self._calls.load(namespace, names, targets)
        return [targets[number] if is_done else None for number, is_done in enumerate(done)]

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
        given, names = target_locations if values is None else values, self._kept_as(keys)
        if given is None or not hasattr(given, "__len__") or len(given) != len(keys):
            warn_missing(InvalidRequest(f"{len(keys)} keys need as many tensors"))
            return False
        return names is not None and all(self._calls.store(self._namespace(KV), names, list(given)))

    def clear(self) -> None:
        """Have this engine find none of the pages that are stored now: it may have other weights. Its pages are its own
        until it starts anew. They are not removed, for other engines have them, too; unread ones are evicted in
        time."""
        self._private = SystemRandom().bytes(16).hex()
        _log.warning("kvstore: this rank's pages are named anew after clear(), and shared with none until a restart")

    def get_stats(self) -> None:
        """Return nothing: ``kvstore status`` and the sidecar's metrics page have the statistics."""
        return


def _has_heads(pool: HostPool | None) -> bool:
    """Return True for a pool of heads, of which each rank has its own; of latents all have the same."""
    return hasattr(pool, "head_num")


def _restorable(is_there: Sequence[bool], window: int) -> list[int]:
    """Return the lengths of prefixes whose last ``window`` pages, or all, are there."""
    found, run = [], 0
    for length, each in enumerate(is_there, 1):
        run = run + 1 if each else 0
        if run >= min(window, length):
            found.append(length)
    return found


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


def _tensor(value: NDArray[np.uint8] | None) -> Tensor:
    return None if value is None else importlib.import_module("torch").from_numpy(value)
