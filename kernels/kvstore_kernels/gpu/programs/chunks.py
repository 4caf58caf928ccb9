"""Chunks to an engine's pages. A program copies some tokens of one strip, which lie together, to their slots."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["chunks", "heads", "tokens", "blocks", "slot_stop"])
def copy_chunks_program(
    memory, offsets, starts, addresses, slots, layer_step, head_step, chunks, heads, tokens, blocks, slot_stop,
    page_step, slot_step, plane_head_step,
    WIDTH: tl.constexpr, ROW: tl.constexpr, BLOCK_ROW: tl.constexpr, PAGE_SIZE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK_TOKENS tokens of one head, chunk and layer. The heads of the same tokens are neighbours: in most pages
    their rows lie side by side. Steps count items of ``memory``, of WIDTH bytes; rows begin at multiples of ALIGN
    bytes."""
    program = tl.program_id(0)
    head, rest = (program % heads).to(tl.int64), program // heads
    block, rest = rest % blocks, rest // blocks
    chunk, layer = rest % chunks, (rest // chunks).to(tl.int64)
    token = block * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    inside = token < tokens
    slot = tl.load(slots + (tl.load(starts + chunk) + token), mask=inside, other=-1)
    inside = inside & (slot >= 0) & (slot < slot_stop)
    row = (slot // PAGE_SIZE) * page_step + (slot % PAGE_SIZE) * slot_step
    items = tl.arange(0, BLOCK_ROW)
    mask = inside[:, None] & (items < ROW)[None, :]
    strip = memory + (tl.load(offsets + chunk) // WIDTH + layer * layer_step + head * head_step)
    plane = tl.load(addresses + layer).to(tl.pointer_type(memory.dtype.element_ty)) + head * plane_head_step
    read = tl.multiple_of(strip + (token.to(tl.int64)[:, None] * ROW + items[None, :]), (ALIGN, ALIGN))
    written = tl.multiple_of(plane + (row[:, None] + items[None, :]), (ALIGN, ALIGN))
    tl.store(written, tl.load(read, mask=mask), mask=mask)
