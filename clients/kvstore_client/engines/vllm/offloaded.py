"""Chunks that vLLM offloads, kept as opaque values: their names, and calls to look up, load and store. Needs no vLLM.

A value is one of vLLM's offloaded chunks, a row of its CPU cache, under vLLM's key for it. Its namespace names all else
that its bytes depend on, as far as vLLM tells a tier.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.seams import SystemClock
from kvstore.seams.memory import Bytes
from kvstore_client.client import Client
from kvstore_client.engines.pause import CallPause
from kvstore_client.engines.vllm.geometry import FP8

KEY_BYTES = 32 + 4
"""Length of a key: a SHA-256 of a block and the number of its group."""
PLAIN = ("float16", "bfloat16", "float32", "half", "float")
STORE_S_MAX = 30.0
COPY_S_MAX = 2.0
"""Seconds that copying may take, beside waiting for the sidecar."""
_PARALLEL = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
_log = logging.getLogger("kvstore.vllm")


def offload_namespace(config: Any, row_bytes: int, weights_digest: str, version: str, fp8: str) -> str:
    """Return the namespace of one engine's offloaded chunks. ``config``: vLLM's OffloadingConfig; ``fp8``: the dtype
    that its fp8 is on this device. Raises InvalidRequest."""
    dtype = fp8 if config.model.dtype in FP8 else config.model.dtype
    if dtype not in (*PLAIN, fp8):
        raise InvalidRequest(f"the cache is {dtype}, which kvstore cannot name: set --kv-cache-dtype fp8, or auto")
    facts = {
        "weights": weights_digest, "vllm": version, "row_bytes": row_bytes, "dtype": dtype,
        "groups": [(each.group_id, each.tokens_per_block, list(each.layer_names)) for each in config.groups],
        "tokens_per_hash": config.cache.tokens_per_hash, "blocks_per_chunk": config.cache.blocks_per_chunk,
        "worker_kv_bytes_per_block": config.worker_kv_bytes_per_block, "layout": config.kv_cache_layout,
        "replicated": config.replicated_layout, "canonical": config.canonical_layout,
        "parallel": {name: getattr(config.parallel, name) for name in _PARALLEL},
    }  # fmt: skip
    return f"vllm-offload/{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()}"


class Offloaded:
    """The offloaded values of one engine. Lookups, loads and stores may each have a thread. No call raises because of
    the sidecar: values that cannot be had count as missing."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        clock = SystemClock()
        self._looking, self._loading, self._storing = CallPause(clock), CallPause(clock), CallPause(clock)
        self._has_told = False

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return, per key, True when its value is stored."""
        return self._asked(self._looking, 0.0, keys, lambda: self._client.exists(self._namespace, keys))

    def load(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Fetch each value into its row. Returns one bool per key; the bytes of a row that is False are undefined."""
        return self._asked(self._loading, COPY_S_MAX, keys, lambda: self._client.get_each(self._namespace, keys, rows))

    def store(self, keys: Sequence[bytes], rows: Sequence[Bytes]) -> list[bool]:
        """Keep the rows that are not stored yet. Returns, per key, True when its value is stored now."""
        put = partial(self._client.put_each, self._namespace, keys, rows, timeout_s=STORE_S_MAX)
        return self._asked(self._storing, COPY_S_MAX, keys, put)

    def _asked(
        self, pause: CallPause, copy_s: float, keys: Sequence[bytes], call: Callable[[], list[bool]]
    ) -> list[bool]:
        """Return a call's answer; False for all keys where it fails, calls are paused, or the keys cannot be names."""
        if self._can_name(keys) and not pause.is_spent:
            try:
                with pause.watch(copy_s):
                    return call()
            except KVStoreError as error:
                _log.warning("kvstore: %s; these offloaded blocks count as missing", error.message)
        return [False] * len(keys)

    def _can_name(self, keys: Sequence[bytes]) -> bool:
        is_known = all(len(key) == KEY_BYTES for key in keys)
        if not is_known and not self._has_told:
            self._has_told = True
            _log.error(
                "kvstore: vLLM's block hashes are not SHA-256, so different blocks may have one name: nothing is "
                "offloaded here; set --prefix-caching-hash-algo sha256 or sha256_cbor"
            )
        return is_known
