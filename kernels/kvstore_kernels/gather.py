"""Gather: rows of an engine's pages are copied to strips, in the order of their tokens."""

from __future__ import annotations

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels.pages import by_page, check_slots, pieces, place_of, widest
from kvstore_kernels.scratch import Scratch

BLOCK_BYTES = 1 << 21
_found = Scratch()


def gather_pages(pages: torch.Tensor, slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy one plane of one layer from its pages.

    Shapes: ``pages`` a view [pages, page_size, kv_heads, dim] of any strides; ``slots`` int64 [tokens], page *
    page_size + place; returns ``out``, [kv_heads, tokens, dim] of the pages' dtype.
    Cost: two copies, the second from the processor's cache. Whole pages go through a block of 2 MiB that the calling
    thread keeps.
    Raises: InvalidRequest for slots outside the pages and an ``out`` of another shape or dtype.
    """
    shape = (pages.shape[2], slots.numel(), pages.shape[3])
    if out is None:
        out = torch.empty(shape, dtype=pages.dtype, device=pages.device)
    if tuple(out.shape) != shape or out.dtype != pages.dtype:
        raise InvalidRequest(f"out is {out.dtype} of shape {tuple(out.shape)}, expected {pages.dtype} {shape}")
    check_slots(slots, slots.numel(), pages)
    with torch.no_grad():
        source, target = widest(pages, out)
        row = source.shape[2] * source.shape[3]
        for piece in pieces(slots, pages, BLOCK_BYTES // (row * source.element_size())):
            if piece.numbers is None:
                found = source[place_of(pages, slots, piece)]
            else:
                shape = (len(piece.numbers), *source.shape[1:])
                found = _found.tensor(shape, source.dtype, source.device)
                torch.index_select(source, 0, piece.numbers, out=found)
            by_page(target[:, piece.start : piece.stop], piece).copy_(found)
    return out
