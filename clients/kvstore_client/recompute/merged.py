"""The merged cache: one plane of K and one of V per layer, in which runs land and rows are written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvstore.spec import ModelSpec, item_size
from kvstore_client.arrays import as_tensor
from kvstore_client.fetch.owned import owned_arrays


def dense_planes(
    spec: ModelSpec, token_count: int, device: torch.device | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return memory for a cache, not initialised: per layer (K, V), each [kv_heads, token_count, dim]. On the host it
    is one run, in huge pages where the system has any."""
    shapes = [
        (layer.kv_heads, token_count, dim) for layer in spec.layers for dim in (layer.k_dim, layer.v_dim)
    ]  # fmt: skip
    planes = _planes(shapes, spec.cache_dtype, device)
    return list(zip(planes[::2], planes[1::2], strict=True))


def hidden_planes(spec: ModelSpec, token_count: int, device: torch.device | None = None) -> list[torch.Tensor]:
    """Return memory as ``dense_planes`` does, for E of every layer: [token_count, hidden_size] each."""
    shapes = [(token_count, spec.hidden_size)] * spec.layer_count
    return _planes(shapes, spec.hidden_dtype, device)


def _planes(shapes: Sequence[tuple[int, ...]], dtype: str, device: torch.device | None) -> list[torch.Tensor]:
    with torch.inference_mode(False):  # the caller must be able to write to the planes
        if device is not None and device.type != "cpu":
            return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape in shapes]
        return [as_tensor(each, dtype) for each in owned_arrays(shapes, item_size(dtype))]
