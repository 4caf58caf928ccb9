"""The merged cache: one plane of K and one of V per layer, in which runs land and rows are written."""

from __future__ import annotations

from itertools import accumulate
from math import prod

import torch

from kvstore.spec import ModelSpec
from kvstore_client.arrays import as_tensor, carve, destination

ALIGNMENT = 64


def dense_planes(
    spec: ModelSpec, token_count: int, device: torch.device | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Memory for a cache, not initialised: per layer (K, V), each [kv_heads, token_count, dim]; on the host one run of
    it, in huge pages where there are any."""
    shapes = [
        (layer.kv_heads, token_count, dim) for layer in spec.layers for dim in (layer.k_dim, layer.v_dim)
    ]  # fmt: skip
    with torch.inference_mode(False):  # what leaves must be the caller's to write to
        if device is None or device.type == "cpu":
            sizes = [-(-prod(shape) * spec.item_size // ALIGNMENT) * ALIGNMENT for shape in shapes]
            memory = destination(sum(sizes))
            offsets = accumulate(sizes[:-1], initial=0)
            planes = [
                as_tensor(carve(memory, offset, shape, spec.item_size), spec.cache_dtype)
                for offset, shape in zip(offsets, shapes, strict=True)
            ]
        else:
            planes = [torch.empty(shape, dtype=getattr(torch, spec.cache_dtype), device=device) for shape in shapes]
    return list(zip(planes[::2], planes[1::2], strict=True))
