"""What the kernel that copies chunks does, by addresses of the host."""

from __future__ import annotations

import ctypes
from itertools import product

from kvstore_kernels.gpu.chunks import ChunksOfHalf, PagesOfHalf


def copied(chunks: ChunksOfHalf, pages: PagesOfHalf) -> bool:
    """Copy each row of each strip to its slot."""
    addresses, slots = pages.addresses.tolist(), pages.slots.tolist()
    places = list(zip(chunks.offsets.tolist(), chunks.starts.tolist(), strict=True))
    counts = chunks.layer_count, chunks.head_count, chunks.token_count
    for (layer, head, token), (offset, start) in product(product(*map(range, counts)), places):
        slot = slots[start + token]
        if 0 <= slot < pages.slot_stop:
            begin = offset + layer * chunks.layer_step + head * chunks.head_step + token * chunks.row_bytes
            assert begin + chunks.row_bytes <= chunks.memory.numel()
            page, place = divmod(slot, pages.page_size)
            there = addresses[layer] + page * pages.page_step + place * pages.slot_step + head * pages.head_step
            ctypes.memmove(there, chunks.memory.data_ptr() + begin, chunks.row_bytes)
    return True
