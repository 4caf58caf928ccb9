"""Arrival: stored strips become rows of the engine's cache. They are decoded, rotated to their new position and
scattered; no other row of the destination is touched.

A source is one plane (K or V) of one layer, [kv_heads, tokens, dim]; V is not rotated.
"""

from __future__ import annotations

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels.pages import by_page, check_slots, pieces, place_of, widest
from kvstore_kernels.rotary import Rotation, check_turn, turn_into
from kvstore_kernels.scratch import Scratch

BLOCK_ELEMENTS = 1 << 20
_decoded = Scratch()


def arrive(source: torch.Tensor, target: torch.Tensor, *, turn: Rotation | None = None, scale: float = 1.0) -> None:
    """Write a plane into rows of a dense cache.

    Shapes: ``source`` and ``target`` [kv_heads, tokens, dim]; ``target`` is a view of the rows to write, of any
    strides and dtype. ``scale``: the factor by which the values of a scaled (fp8) source are multiplied.
    Cost: one copy; with a turn, as ``rotate``.
    Raises: InvalidRequest for shapes that differ.
    """
    if source.shape != target.shape:
        raise InvalidRequest(f"source has shape {tuple(source.shape)}, target {tuple(target.shape)}")
    with torch.no_grad():
        _decode(source, target, turn, scale)


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
    Cost: as ``arrive``; rows that must be decoded go through a block of 2 MiB (bf16) that the calling thread keeps.
    Raises: InvalidRequest for shapes that do not fit and slots outside the pages, before anything is written.
    """
    heads, tokens, dim = source.shape
    if pages.dim() != 4 or tuple(pages.shape[2:]) != (heads, dim):
        raise InvalidRequest(f"pages have shape {tuple(pages.shape)}, expected [pages, page_size, {heads}, {dim}]")
    if turn is not None:
        check_turn(source, turn)
    plain = turn is None and scale == 1.0 and source.dtype == pages.dtype
    step = max(1, tokens if plain else BLOCK_ELEMENTS // (heads * dim))
    check_slots(slots, tokens, pages)
    with torch.no_grad():
        for start in range(0, tokens, step):
            stop = min(start + step, tokens)
            run = source[:, start:stop]
            if not plain:
                decoded = _decoded.tensor(tuple(run.shape), pages.dtype, source.device)
                _decode(run, decoded, turn and turn.of(start, stop), scale)
                run = decoded
            _scatter(run, pages, slots[start:stop])


def _scatter(run: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor) -> None:
    target, rows = widest(pages, run)
    for piece in pieces(slots, pages):
        target[place_of(pages, slots, piece)] = by_page(rows[:, piece.start : piece.stop], piece)


def _decode(source: torch.Tensor, target: torch.Tensor, turn: Rotation | None, scale: float) -> None:
    if turn is not None:
        check_turn(source, turn)
        turn_into(target, source, turn, scale)
    else:
        target.copy_(source if scale == 1.0 else source.float() * scale)
