"""Chunks into pages, by the kernel: on a GPU where there is one, else interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kvstore_kernels.gpu.chunks import ChunksOfHalf, PagesOfHalf, launch_chunks

from tests.kernels.device import DEVICE, triton_here

CASES = [
    # heads, tokens, row bytes, chunks, page size, layout, negative slots
    (2, 16, 16, 3, 8, "slot head", False),
    (2, 16, 16, 3, 8, "head slot", True),
    (1, 10, 256, 1, 16, "slot head", False),
    (3, 33, 48, 2, 5, "slot head", True),
    (2, 7, 6, 2, 4, "head slot", False),
    (1, 9, 3, 2, 4, "slot head", False),
]


def moved(heads: int, tokens: int, row_bytes: int, chunks: int, page_size: int, layout: str, gaps: bool) -> None:
    """Copy random chunks into poisoned pages, and compare every byte there."""
    layers, random = 3, np.random.default_rng(tokens)
    head_step = -(-tokens * row_bytes // 64) * 64
    layer_step = head_step * heads + 128
    chunk_step = layer_step * layers + 4096
    memory = torch.from_numpy(random.integers(0, 128, chunk_step * chunks, dtype=np.int8)).to(DEVICE)
    page_count = -(-tokens * chunks // page_size) + 2
    axes = {"slot": page_size, "head": heads}
    shape = [page_count, *(axes[name] for name in layout.split()), row_bytes]
    pages = [torch.full(shape, -1, dtype=torch.int8, device=DEVICE) for _ in range(layers)]
    slots = random.permutation(page_count * page_size)[: tokens * chunks + 5]
    if gaps:
        slots[::3] = -1
    views = [each if layout == "slot head" else each.transpose(1, 2) for each in pages]
    expected = [each.clone() for each in views]
    for layer in range(layers):
        for token, slot in enumerate(slots[5:].tolist()):
            chunk, place = divmod(token, tokens)
            if slot >= 0:
                for head in range(heads):
                    begin = layer * layer_step + chunk * chunk_step + head * head_step + place * row_bytes
                    expected[layer][slot // page_size, slot % page_size, head] = memory[begin : begin + row_bytes]
    page_step, slot_step, plane_head_step, _ = views[0].stride()
    addresses = [each.data_ptr() for each in pages]
    alignment = next(size for size in (16, 8, 4, 2, 1) if not any(each % size for each in addresses))
    order = random.permutation(chunks)
    launch_chunks(
        ChunksOfHalf(
            memory, torch.from_numpy(order * chunk_step).to(DEVICE), 64,
            torch.from_numpy(5 + order * tokens).to(DEVICE), layer_step, head_step, layers, heads, tokens, row_bytes,
        ),
        PagesOfHalf(
            torch.tensor(addresses, device=DEVICE), alignment, torch.from_numpy(slots).to(DEVICE),
            page_count * page_size, page_size, page_step, slot_step, plane_head_step,
        ),
    )  # fmt: skip
    for found, wanted in zip(views, expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("case", CASES)
def test_every_byte_is_in_its_place(case: tuple[int, int, int, int, int, str, bool]) -> None:
    with triton_here():
        moved(*case)
