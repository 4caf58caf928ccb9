"""Arrival: strips as they were stored become rows of the engine's cache. Decoded, turned to their new position,
scattered; nothing else of the destination is touched.

A source is one plane (K or V) of one layer, [kv_heads, tokens, dim]; V passes without a rotation.
"""

from __future__ import annotations

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels.rotary import Rotation, rotate


def arrive(source: torch.Tensor, target: torch.Tensor, *, turn: Rotation | None = None, scale: float = 1.0) -> None:
    """Write a plane into rows of a dense cache.

    Shapes: ``source`` and ``target`` [kv_heads, tokens, dim]; ``target`` is a view of the rows to write, of any
    strides and dtype. ``scale``: a scaled (fp8) source's value times this is what it stands for.
    Raises: InvalidRequest for shapes that differ.
    """
    if source.shape != target.shape:
        raise InvalidRequest(f"source has shape {tuple(source.shape)}, target {tuple(target.shape)}")
    if scale != 1.0:
        source = source.float() * scale
    if turn is None:
        target.copy_(source)
    else:
        rotate(source, turn, out=target)


def arrive_pages(
    source: torch.Tensor,
    pages: torch.Tensor,
    slots: torch.Tensor,
    *,
    turn: Rotation | None = None,
    scale: float = 1.0,
) -> None:
    """Write a plane into the pages of an engine.

    Shapes: ``source`` [kv_heads, tokens, dim]; ``pages`` a view [pages, page_size, kv_heads, dim] of any strides;
    ``slots`` int64 [tokens], page * page_size + place, each at most once.
    Raises: InvalidRequest for shapes that do not fit and slots outside the pages.
    """
    heads, tokens, dim = source.shape
    if tuple(pages.shape[2:]) != (heads, dim):
        raise InvalidRequest(f"pages have (heads, dim) {tuple(pages.shape[2:])}, source {(heads, dim)}")
    check_slots(slots, tokens, pages)
    if turn is not None or scale != 1.0:
        decoded = torch.empty(source.shape, dtype=pages.dtype, device=source.device)
        arrive(source, decoded, turn=turn, scale=scale)
        source = decoded
    page_size = pages.shape[1]
    pages[slots // page_size, slots % page_size] = source.transpose(0, 1).to(pages.dtype)


def check_slots(slots: torch.Tensor, tokens: int, pages: torch.Tensor) -> None:
    """Raises InvalidRequest unless there is one slot per token, each within the pages."""
    if slots.dtype != torch.int64 or tuple(slots.shape) != (tokens,):
        raise InvalidRequest(f"slots must be int64 [{tokens}], not {slots.dtype} of shape {tuple(slots.shape)}")
    room = pages.shape[0] * pages.shape[1]
    if tokens and not (int(slots.min()) >= 0 and int(slots.max()) < room):
        raise InvalidRequest(f"slots reach from {int(slots.min())} to {int(slots.max())}, the pages have 0..{room - 1}")
