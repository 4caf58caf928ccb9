"""Engines of SGLang without a model: its settings, host pools and controller, and the backend that its loader makes."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, SLOTS, LAYERS = 16, 256, 3
WAIT_S = 20.0
BACKEND = {
    "backend_name": "kvstore", "module_path": "kvstore_client.engines.sglang", "class_name": "KVStoreHiCache",
    "interface_v1": 1,
}  # fmt: skip


def attention(dtype: torch.dtype = torch.bfloat16, layout: str = "page_first", first_layer: int = 0) -> tuple[Any, Any]:
    """Return (device pool, host pool) of a model with K and V. No GPU is there: the device's pool is on the CPU."""
    last = first_layer + LAYERS
    pool = MHATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=dtype, head_num=2, head_dim=32, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False, start_layer=first_layer, end_layer=last,
    )  # fmt: skip
    sizes = {"device_capacity_tokens": SLOTS, "start_layer": first_layer, "end_layer": last}
    info = pool._mha_buffer_info()
    return pool, MHATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, pin_memory=False, **sizes)


def latent() -> tuple[Any, Any]:
    """Return (device pool, host pool) of a model with latents."""
    pool = MLATokenToKVPool(
        size=SLOTS, page_size=PAGE, dtype=torch.bfloat16, kv_lora_rank=48, qk_rope_head_dim=16, layer_num=LAYERS,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    sizes = {"device_capacity_tokens": SLOTS, "start_layer": 0, "end_layer": LAYERS, "target_layer_num": LAYERS}
    info = pool._mla_buffer_info()
    return pool, MLATokenToKVPoolHost(info, 2.0, 0, PAGE, "page_first", pin_memory=False, **sizes)


@dataclass
class Engine:
    """One engine. ``host``: its pool of K and V; ``beside``: another pool, of a hybrid model's windows."""

    controller: Any
    host: Any
    beside: Any

    @property
    def backend(self) -> Any:
        return self.controller.storage_backend

    def save(self, tokens: Sequence[int]) -> torch.Tensor:
        """Fill pages with random bytes, back them up, and return them."""
        indices = self.write(tokens)
        done = self.controller.ack_backup_queue.get(timeout=WAIT_S)
        assert done.completed_tokens == len(tokens)
        return self.pages(indices)

    def write(self, tokens: Sequence[int]) -> torch.Tensor:
        """Fill pages with random bytes, begin to back them up, and return their places."""
        indices: torch.Tensor = self.host.alloc(len(tokens))
        taken = self.host.kv_buffer.view(torch.uint8)
        taken.copy_(torch.randint(0, 256, taken.shape, dtype=torch.uint8))
        self.controller.write_storage(indices, list(tokens), hashes(tokens), None)
        return indices

    def load(self, tokens: Sequence[int]) -> torch.Tensor:
        """Prefetch as the scheduler does, and return the pages that came."""
        self.host.kv_buffer.zero_()
        self.controller.prefetch(CacheRequestHandle("request", 0), key_of(tokens), None, None)
        operation = self.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        if not operation.storage_hit_count:
            return torch.empty(0)
        operation.host_indices = self.host.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        came = 0
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=WAIT_S)).completed_req:
            came = max(came, ack.completed_tokens)
        return self.pages(operation.host_indices[:came])

    def pages(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the pages' bytes, [pages, bytes]."""
        found = [self.host.get_data_page(int(at)).clone().view(torch.uint8).flatten() for at in indices[::PAGE]]
        return torch.stack(found) if found else torch.empty(0)


def key_of(tokens: Sequence[int], salt: str | None = None) -> Any:
    """Return SGLang's key of a prompt."""
    return RadixKey(array("q", tokens), extra_key=salt)


def hashes(tokens: Sequence[int], salt: str | None = None) -> list[str]:
    """Return SGLang's hashes of a prompt's pages."""
    found: list[str] = get_storage_hash_str(key_of(tokens, salt), None, page_size=PAGE)
    return found


@contextmanager
def engine(
    address: str, pools: tuple[Any, Any] | None = None, *, extra: dict[str, Any] | None = None, model: str = "org/m",
    **settings: Any,
) -> Iterator[Engine]:  # fmt: skip
    """Run an engine with these settings of SGLang's command line. The last one that began is the process's."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE, **settings))
    pool, host = pools or attention()
    beside = attention()[1]
    entries = [
        PoolEntry(PoolName.KV, host, pool, lambda layer: layer, is_primary_index_anchor=True),
        PoolEntry(PoolName.SWA, beside, pool, lambda layer: layer),
    ]
    allocator = TokenToKVPoolAllocator(SLOTS, dtype=host.dtype, device="cpu", kvcache=pool, need_sort=False)
    controller = HybridCacheController(
        allocator, HostPoolGroup(entries), PAGE, dist.group.WORLD, threading.Event(), storage_backend="dynamic",
        prefetch_threshold=PAGE, model_name=model,
        storage_backend_extra_config={**BACKEND, "socket": address, **(extra or {})},
    )  # fmt: skip
    try:
        yield Engine(controller, host, beside)
    finally:
        controller.detach_storage_backend()
