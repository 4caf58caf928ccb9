"""A stand-in for SGLang's side, after its documented interface: the host pools, the loader of a dynamic backend, and
what its controller does with the answers. It shares no code with SGLang, and SGLang is not run here."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StorageConfig:
    """What a backend is told of the engine."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = True
    model_name: str | None = "org/model"
    extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Transfer:
    """Pages of one pool."""

    name: str
    keys: list[str]
    host_indices: Any


class HostPool:
    """[2, tokens, layers, heads, dim] (page_first) or [2, layers, tokens, heads, dim] (layer_first) in host memory; a
    page of the one is a run of K and a run of V, of the other such a pair per layer."""

    layers, heads, dim = 3, 2, 8

    def __init__(
        self, layout: str = "page_first", dtype: Any = torch.bfloat16, pages: int = 12, page_size: int = 4,
        start_layer: int = 0,
    ) -> None:  # fmt: skip
        self.layout, self.dtype, self.page_size, self.size = layout, dtype, page_size, pages * page_size
        self.start_layer, self.end_layer = start_layer, start_layer + self.layers
        inner = (self.size, self.layers) if layout == "page_first" else (self.layers, self.size)
        self.kv_buffer = torch.zeros((2, *inner, self.heads, self.dim), dtype=dtype)

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape))

    def page(self, index: int) -> Any:
        """A page's bytes, copied out."""
        stop = index + self.page_size
        found = self.kv_buffer[:, index:stop] if self.layout == "page_first" else self.kv_buffer[:, :, index:stop]
        return found.clone()

    def indices(self, *pages: int) -> Any:
        return torch.tensor([page * self.page_size + at for page in pages for at in range(self.page_size)])

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        row = self.heads * self.dim * self.kv_buffer.element_size()
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].nbytes
        addresses: list[int] = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "page_first":
                addresses += [base + index * self.layers * row, base + index * self.layers * row + half]
                continue
            for layer in range(self.layers):
                place = base + (layer * self.size + index) * row
                addresses += [place, place + half]
        size = self.page_size * row * (self.layers if self.layout == "page_first" else 1)
        return addresses, [size] * len(addresses)


class LatentPool(HostPool):
    """MLA: one run of latents a page."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_buffer = torch.zeros((self.size, self.layers, 1, 20), dtype=self.dtype)

    def page(self, index: int) -> Any:
        return self.kv_buffer[index : index + self.page_size].clone()

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        row = self.kv_buffer[0].nbytes
        firsts = indices.tolist()[:: self.page_size]
        return [self.kv_buffer.data_ptr() + index * row for index in firsts], [self.page_size * row] * len(firsts)


def load(config: StorageConfig, pool: Any) -> Any:
    """As SGLang's factory makes a dynamic backend and its controller begins."""
    extra = config.extra_config
    made = getattr(importlib.import_module(extra["module_path"]), extra["class_name"])(config, {})
    made.register_mem_pool_host(pool)
    return made


def prefetch(backend: Any, keys: list[str], indices: Any, page_size: int) -> int:
    """How many leading tokens the controller takes after ``batch_get_v1``."""
    results = backend.batch_get_v1(keys, indices, None)
    assert isinstance(results, list)
    taken = 0
    for number in range(len(keys)):
        if not results[number]:
            break
        taken += page_size
    return taken
