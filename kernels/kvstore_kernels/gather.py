"""Gather: rows of an engine's pages become strips, in order of their tokens."""

from __future__ import annotations

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels.arrival import check_slots


def gather_pages(pages: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """One plane of one layer out of its pages.

    Shapes: ``pages`` a view [pages, page_size, kv_heads, dim] of any strides; ``slots`` int64 [tokens], page *
    page_size + place; returns ``out``, [kv_heads, tokens, dim] of the pages' dtype.
    Raises: InvalidRequest for slots outside the pages and an ``out`` of another shape or dtype.
    """
    shape = (pages.shape[2], slots.numel(), pages.shape[3])
    check_slots(slots, slots.numel(), pages)
    if out is None:
        out = torch.empty(shape, dtype=pages.dtype, device=pages.device)
    if tuple(out.shape) != shape or out.dtype != pages.dtype:
        raise InvalidRequest(f"out is {out.dtype} of shape {tuple(out.shape)}, expected {pages.dtype} {shape}")
    page_size = pages.shape[1]
    out.copy_(pages[slots // page_size, slots % page_size].transpose(0, 1))
    return out
