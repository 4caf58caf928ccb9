"""Chunks in a GPU's memory into an engine's pages there: all layers and chunks of a half in one
launch.

Nothing here is needed: where there is no Triton, or it cannot compile, the caller copies with torch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import gcd

import torch

BLOCK_BYTES = 16 << 10
"""Bytes that a program copies, about: a few times what a multiprocessor needs in flight."""
WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_log = logging.getLogger(__name__)
_failures: list[str] = []


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


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def serves(memory: torch.Tensor) -> bool:
    """Return True when chunks in this memory are copied by a kernel."""
    return memory.is_cuda and _has_triton() and not _failures


def copy_chunks(chunks: ChunksOfHalf, pages: PagesOfHalf) -> bool:
    """Copy chunks into pages, on the current stream of their device. False where the kernel does not run here: nothing
    was copied then. It is not tried again."""
    try:
        with torch.cuda.device(chunks.memory.device):
            launch(chunks, pages)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - Triton, its compilers and the driver raise errors of many kinds
        _failures.append(f"{type(error).__name__}: {error}")
        _log.warning("the kernel that copies chunks does not run here, torch copies instead: %s", _failures[-1])
        return False
    return True


def launch(chunks: ChunksOfHalf, pages: PagesOfHalf) -> None:
    """Copy chunks into pages in one launch. The interpreter runs it on the host's tensors, too."""
    from kvstore_kernels.runs_program import copy_chunks_program

    steps = (chunks.layer_step, chunks.head_step, chunks.row_bytes, chunks.alignment, chunks.memory.data_ptr())
    common = gcd(16, *steps, pages.page_step, pages.slot_step, pages.head_step, pages.alignment)
    width = min(common, 8)
    row = chunks.row_bytes // width
    block_row = 1 << (row - 1).bit_length()
    tokens = max(1, min(1 << (chunks.token_count - 1).bit_length(), BLOCK_BYTES // (block_row * width)))
    blocks = -(-chunks.token_count // tokens)
    chunk_count = len(chunks.offsets)
    memory = chunks.memory[: chunks.memory.numel() // width * width].view(WIDTHS[width])
    copy_chunks_program[(chunks.layer_count * chunk_count * chunks.head_count * blocks,)](
        memory, chunks.offsets, chunks.starts, pages.addresses, pages.slots, chunks.layer_step // width,
        chunks.head_step // width, chunk_count, chunks.head_count, chunks.token_count, blocks, pages.slot_stop,
        pages.page_step // width, pages.slot_step // width, pages.head_step // width,
        WIDTH=width, ROW=row, BLOCK_ROW=block_row, PAGE_SIZE=pages.page_size, ALIGN=common, BLOCK_TOKENS=tokens,
        num_warps=4,
    )  # fmt: skip
