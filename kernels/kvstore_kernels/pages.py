"""Pieces of a run of slots: whole pages of an engine, which move in one call, and single slots.

A slot is page * page_size + place. An engine's block table gives a run that begins and ends within a page and fills
the pages between. Slots in any other order work, too, but slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidRequest


@dataclass(frozen=True, eq=False)
class Piece:
    """Tokens ``start`` to ``stop`` of a run. ``numbers``: the pages that they fill; None: they move slot by slot."""

    start: int
    stop: int
    numbers: torch.Tensor | None


def check_slots(slots: torch.Tensor, tokens: int, pages: torch.Tensor) -> None:
    """Raise InvalidRequest unless ``slots`` is int64 [tokens], each within ``pages`` [pages, page_size, ...]."""
    if slots.dtype != torch.int64 or tuple(slots.shape) != (tokens,):
        raise InvalidRequest(f"slots must be int64 [{tokens}], not {slots.dtype} of shape {tuple(slots.shape)}")
    room = pages.shape[0] * pages.shape[1]
    low, high = (int(each) for each in slots.aminmax()) if tokens else (0, -1)
    if low < 0 or high >= room:
        raise InvalidRequest(f"slots reach from {low} to {high}, the pages have 0..{room - 1}")


def pieces(slots: torch.Tensor, pages: torch.Tensor, block_tokens: int = 0) -> Iterator[Piece]:
    """Yield the run's pieces in order: the slots before the first whole page, whole pages (about ``block_tokens`` at a
    time, if that is given), and the remaining slots."""
    page_size = pages.shape[1]
    head, numbers = _whole_pages(slots, page_size)
    tail = head + len(numbers) * page_size
    if head:
        yield Piece(0, head, None)
    step = max(1, block_tokens // page_size if block_tokens else len(numbers))
    for first in range(0, len(numbers), step):
        run = numbers[first : first + step]
        yield Piece(head + first * page_size, head + (first + len(run)) * page_size, run)
    if tail < len(slots):
        yield Piece(tail, len(slots), None)


def _whole_pages(slots: torch.Tensor, page_size: int) -> tuple[int, torch.Tensor]:
    """Return (number of tokens before the first whole page, the pages filled from there on). There are no pages unless
    the run fills every page that it could fill."""
    head = -int(slots[0]) % page_size if len(slots) else 0
    count = max(0, len(slots) - head) // page_size
    rows = slots[head : head + count * page_size].view(count, page_size)
    firsts = rows[:, 0]
    filled = (rows - firsts[:, None] == torch.arange(page_size, device=slots.device)).all()
    if not count or not (filled & (firsts % page_size == 0).all()):
        return len(slots), slots[:0]
    return head, firsts // page_size


def place_of(pages: torch.Tensor, slots: torch.Tensor, piece: Piece) -> tuple[torch.Tensor, ...]:
    """Return the index of a piece's rows in the pages: (pages,) or (pages, places)."""
    if piece.numbers is not None:
        return (piece.numbers,)
    rows = slots[piece.start : piece.stop]
    return rows // pages.shape[1], rows % pages.shape[1]


def by_page(run: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Return a view of a piece's rows [heads, tokens, dim] in the order of its index: [pages, page_size, heads, dim],
    or [tokens, heads, dim]."""
    if piece.numbers is None:
        return run.transpose(0, 1)
    heads, tokens, dim = run.shape
    count = len(piece.numbers)
    return run.view(heads, count, tokens // count, dim).permute(1, 2, 0, 3)


def widest(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors in the widest item type that fits all of them, because torch copies items of 16 bytes
    twice as fast as items of two.

    The tensors must have one dtype. The views may only be copied: their values mean nothing.
    """
    size = tensors[0].element_size()
    for dtype in (torch.complex128, torch.int64, torch.int32):
        ratio = dtype.itemsize // size
        if ratio > 1 and all(_fits(tensor, ratio) for tensor in tensors):
            return tuple(tensor.view(dtype) for tensor in tensors)
    return tensors


def _fits(tensor: torch.Tensor, ratio: int) -> bool:
    steps = (*tensor.stride()[:-1], tensor.storage_offset(), tensor.shape[-1])
    aligned = tensor.data_ptr() % (ratio * tensor.element_size()) == 0
    return tensor.stride(-1) == 1 and aligned and not any(step % ratio for step in steps)
