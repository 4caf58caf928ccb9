"""The launch that copies chunks in a GPU's memory into pages there: all layers and chunks of a half at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from kvstore_kernels.gpu import attempt, on_device, power_of_two, serves

BLOCK_BYTES = 16 << 10
"""Bytes that a program copies, about: a few times what a multiprocessor needs in flight."""
WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class ChunksOfHalf:
    """One half, K or V, of some layers of chunks of one layout. All steps are in bytes.

    Shapes: ``memory`` int8 [bytes]; ``offsets`` int64 [chunks], of each chunk's first strip there, multiples of
    ``alignment``; ``starts`` int64 [chunks], the place of each chunk's first token among the slots. A strip is
    [tokens, row_bytes], without gaps.
    """

    memory: torch.Tensor
    offsets: torch.Tensor
    alignment: int
    starts: torch.Tensor
    layer_step: int
    head_step: int
    layer_count: int
    head_count: int
    token_count: int
    row_bytes: int


@dataclass(frozen=True)
class PagesOfHalf:
    """One half of the layers' pages on a device, all of one shape and one stride. Steps are in bytes.

    Shapes: ``addresses`` int64 [layers], of each layer's first page, multiples of ``alignment``; ``slots`` int64
    [tokens]: a token whose slot is negative, or not below ``slot_stop``, is left out.
    """

    addresses: torch.Tensor
    alignment: int
    slots: torch.Tensor
    slot_stop: int
    page_size: int
    page_step: int
    slot_step: int
    head_step: int


def copy_chunks(chunks: ChunksOfHalf, pages: PagesOfHalf) -> bool:
    """Copy chunks into pages, on the current stream of their device. False where the kernel does not serve: nothing was
    copied then."""
    if not serves(chunks.memory, chunks.offsets, pages.slots):
        return False
    return attempt("chunks", lambda: launch_chunks(chunks, pages)) is not None


def launch_chunks(chunks: ChunksOfHalf, pages: PagesOfHalf) -> bool:
    """Copy chunks into pages in one launch. Returns True."""
    from kvstore_kernels.gpu.programs.chunks import copy_chunks_program

    steps = (chunks.layer_step, chunks.head_step, chunks.row_bytes, chunks.alignment, chunks.memory.data_ptr())
    common = gcd(16, *steps, pages.page_step, pages.slot_step, pages.head_step, pages.alignment)
    width = min(common, 8)
    row = chunks.row_bytes // width
    tokens = max(1, min(power_of_two(chunks.token_count), BLOCK_BYTES // (power_of_two(row) * width)))
    blocks = -(-chunks.token_count // tokens)
    chunk_count = len(chunks.offsets)
    memory = chunks.memory[: chunks.memory.numel() // width * width].view(WIDTHS[width])
    with on_device(memory):
        copy_chunks_program[(chunks.layer_count * chunk_count * chunks.head_count * blocks,)](
            memory, chunks.offsets, chunks.starts, pages.addresses, pages.slots, chunks.layer_step // width,
            chunks.head_step // width, chunk_count, chunks.head_count, chunks.token_count, blocks, pages.slot_stop,
            pages.page_step // width, pages.slot_step // width, pages.head_step // width,
            WIDTH=width, ROW=row, BLOCK_ROW=power_of_two(row), PAGE_SIZE=pages.page_size, ALIGN=common,
            BLOCK_TOKENS=tokens, num_warps=4,
        )  # fmt: skip
    return True
