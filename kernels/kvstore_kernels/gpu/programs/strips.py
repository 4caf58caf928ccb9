"""Strips to rows of an engine's cache and back: one launch for all planes of a fetch.

A table has a row per strip: its address, the address of its plane, the stride of the strip's heads, the place of its
first token, its number of tokens, and whether its keys rotate. A program takes some tokens of one strip, and goes from
head to head, so that it reads their slots, cosines and sines once.
"""

import triton
import triton.language as tl

COLUMNS = 6


@triton.jit
def _row_offsets(slots, place, token, count, slot_stop, page, row, PAGE_SIZE: tl.constexpr):
    """Return the offset of each token's row in its plane, and whether it has one. A slot outside the pages is none."""
    inside = token < count
    if PAGE_SIZE > 0:
        slot = tl.load(slots + place, mask=inside, other=-1)
        inside = inside & (slot >= 0) & (slot < slot_stop)
        offset = (slot // PAGE_SIZE) * page + (slot % PAGE_SIZE) * row
    else:
        offset = place * row
    return offset, inside


@triton.jit
def _pointers(base, rows, dims, dim_stride, ALIGN: tl.constexpr):
    """Return the addresses of a tile, whose rows begin at multiples of ALIGN bytes."""
    return tl.multiple_of(base + (rows[:, None] + dims[None, :] * dim_stride), (ALIGN, ALIGN))


@triton.jit
def _scaled(x, scales, scale, run, inside, SCALES: tl.constexpr):
    """Return a tile in fp32, times one factor for all, or one for each run of a head's tokens."""
    x = x.to(tl.float32)
    if SCALES == 1:
        x = x * scale
    if SCALES == 2:
        x = x * tl.load(scales + run, mask=inside, other=0.0)[:, None]
    return x


@triton.jit
def _copy_heads(
    strip, plane, scales, scale, run, source, target, inside, begin, end, strip_head, strip_dim, plane_head, plane_dim,
    runs, DIM: tl.constexpr, RAW: tl.constexpr, SCALES: tl.constexpr, ALIGN_STRIP: tl.constexpr,
    ALIGN_PLANE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    mask = inside[:, None] & (dims < DIM)[None, :]
    for _ in range(begin, end):
        x = tl.load(_pointers(strip, source, dims, strip_dim, ALIGN_STRIP), mask=mask)
        if not RAW:
            x = _scaled(x, scales, scale, run, inside, SCALES).to(plane.dtype.element_ty)
        tl.store(_pointers(plane, target, dims, plane_dim, ALIGN_PLANE), x, mask=mask)
        strip += strip_head
        plane += plane_head
        scales += runs


@triton.jit
def _turn_heads(
    strip, plane, cos, sin, angle, scales, scale, run, source, target, inside, begin, end, strip_head, strip_dim,
    plane_head, plane_dim, runs, DIM: tl.constexpr, PAIRS: tl.constexpr, SCALES: tl.constexpr,
    ALIGN_STRIP: tl.constexpr, ALIGN_PLANE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK_P)
    mask = inside[:, None] & (pairs < PAIRS)[None, :]
    c = tl.load(cos + (angle[:, None] + pairs[None, :]), mask=mask, other=0.0)
    s = tl.load(sin + (angle[:, None] + pairs[None, :]), mask=mask, other=0.0)
    for _ in range(begin, end):
        x = tl.load(_pointers(strip, source, pairs, strip_dim, ALIGN_STRIP), mask=mask)
        y = tl.load(_pointers(strip, source, pairs + PAIRS, strip_dim, ALIGN_STRIP), mask=mask)
        x = _scaled(x, scales, scale, run, inside, SCALES)
        y = _scaled(y, scales, scale, run, inside, SCALES)
        if 2 * PAIRS < DIM:
            rest = 2 * PAIRS + tl.arange(0, BLOCK_R)
            resting = inside[:, None] & (rest < DIM)[None, :]
            z = tl.load(_pointers(strip, source, rest, strip_dim, ALIGN_STRIP), mask=resting)
            if strip.dtype.element_ty != plane.dtype.element_ty or SCALES > 0:
                z = _scaled(z, scales, scale, run, inside, SCALES).to(plane.dtype.element_ty)
            tl.store(_pointers(plane, target, rest, plane_dim, ALIGN_PLANE), z, mask=resting)
        one = (x * c - y * s).to(plane.dtype.element_ty)
        two = (y * c + x * s).to(plane.dtype.element_ty)
        tl.store(_pointers(plane, target, pairs, plane_dim, ALIGN_PLANE), one, mask=mask)
        tl.store(_pointers(plane, target, pairs + PAIRS, plane_dim, ALIGN_PLANE), two, mask=mask)
        strip += strip_head
        plane += plane_head
        scales += runs


@triton.jit(do_not_specialize=["count", "heads", "blocks", "groups", "runs", "slot_stop"])
def arrive_program(
    strip, plane, table, slots, cos, sin, scales, scale, count, heads, blocks, groups, runs, slot_stop,
    strip_head, strip_token, strip_dim, page, row, plane_head, plane_dim, turn_token,
    DIM: tl.constexpr, PAIRS: tl.constexpr, PAGE_SIZE: tl.constexpr, TABLED: tl.constexpr, RAW: tl.constexpr,
    SCALES: tl.constexpr, RUN: tl.constexpr, ALIGN_STRIP: tl.constexpr, ALIGN_PLANE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Decode and rotate strips into rows. RAW: without a table's rotation, they are copied as they are. SCALES: 0 none,
    1 one for all, 2 by run. Of a head's DIM dims the first PAIRS pair up with the next PAIRS, and the rest stays."""
    program = tl.program_id(0)
    block, group, entry = program % blocks, (program // blocks) % groups, (program // blocks // groups).to(tl.int64)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    place = token.to(tl.int64)
    if TABLED:
        line = table + entry * 6
        strip = tl.load(line).to(tl.pointer_type(strip.dtype.element_ty))
        plane = tl.load(line + 1).to(tl.pointer_type(plane.dtype.element_ty))
        strip_head = tl.load(line + 2)
        place += tl.load(line + 3)
        count = tl.load(line + 4).to(tl.int32)
    target, inside = _row_offsets(slots, place, token, count, slot_stop, page, row, PAGE_SIZE)
    source = token.to(tl.int64) * strip_token
    begin, end = group * HEADS, tl.minimum(heads, (group + 1) * HEADS)
    strip += begin.to(tl.int64) * strip_head
    plane += begin.to(tl.int64) * plane_head
    scales += (entry * heads + begin) * runs
    run = token // RUN
    if PAIRS == 0:
        _copy_heads(
            strip, plane, scales, scale, run, source, target, inside, begin, end, strip_head, strip_dim, plane_head,
            plane_dim, runs, DIM, RAW, SCALES, ALIGN_STRIP, ALIGN_PLANE, BLOCK_D,
        )  # fmt: skip
    else:
        turned = True
        if TABLED:
            turned = tl.load(line + 5) != 0
        if turned:
            _turn_heads(
                strip, plane, cos, sin, place * turn_token, scales, scale, run, source, target, inside, begin, end,
                strip_head, strip_dim, plane_head, plane_dim, runs, DIM, PAIRS, SCALES, ALIGN_STRIP, ALIGN_PLANE,
                BLOCK_P, BLOCK_R,
            )  # fmt: skip
        else:
            _copy_heads(
                strip, plane, scales, scale, run, source, target, inside, begin, end, strip_head, strip_dim, plane_head,
                plane_dim, runs, DIM, RAW, SCALES, ALIGN_STRIP, ALIGN_PLANE, BLOCK_D,
            )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "blocks", "groups", "runs", "slot_stop"])
def gather_program(
    strip, plane, table, slots, scales, heads, blocks, groups, runs, slot_stop, strip_token, page, row, plane_head,
    plane_dim, limit,
    DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, QUANTISED: tl.constexpr, LEAST: tl.constexpr,
    ALIGN_STRIP: tl.constexpr, ALIGN_PLANE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Copy rows to strips, as they are. QUANTISED 1: as integers, 2: as floats of 8 bits, with a scale for each BLOCK_T
    tokens of a head: the largest value becomes ``limit``. A run with a value that is not finite gets the scale NaN."""
    program = tl.program_id(0)
    block, group, entry = program % blocks, (program // blocks) % groups, (program // blocks // groups).to(tl.int64)
    line = table + entry * 6
    strip = tl.load(line).to(tl.pointer_type(strip.dtype.element_ty))
    plane = tl.load(line + 1).to(tl.pointer_type(plane.dtype.element_ty))
    strip_head = tl.load(line + 2)
    place = tl.load(line + 3)
    count = tl.load(line + 4).to(tl.int32)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    source, inside = _row_offsets(slots, place + token, token, count, slot_stop, page, row, PAGE_SIZE)
    target = token.to(tl.int64) * strip_token
    dims = tl.arange(0, BLOCK_D)
    whole = inside[:, None] & (dims < DIM)[None, :]
    begin, end = group * HEADS, tl.minimum(heads, (group + 1) * HEADS)
    strip += begin.to(tl.int64) * strip_head
    plane += begin.to(tl.int64) * plane_head
    scales += (entry * heads + begin) * runs + block
    for _ in range(begin, end):
        x = tl.load(_pointers(plane, source, dims, plane_dim, ALIGN_PLANE), mask=whole)
        if QUANTISED > 0:
            x = tl.where(whole, x.to(tl.float32), 0.0)
            size = tl.abs(x)
            broken = tl.max(tl.max(tl.where(size < float("inf"), 0, 1), 1), 0) > 0
            scale = tl.div_rn(tl.maximum(tl.max(tl.max(tl.where(size < float("inf"), size, 0.0), 1), 0), LEAST), limit)
            x = tl.div_rn(tl.where(broken, 0.0, x), tl.zeros_like(x) + scale)
            x = tl.minimum(tl.maximum(x, -limit), limit)
            if QUANTISED == 1:
                x = (x + 12582912.0) - 12582912.0  # 1.5 * 2**23: rounds to a whole number, halves to even
            if block * BLOCK_T < count:
                tl.store(scales, tl.where(broken, float("nan"), scale))
            x = x.to(strip.dtype.element_ty)
        tl.store(_pointers(strip, target, dims, 1, ALIGN_STRIP), x, mask=whole)
        strip += strip_head
        plane += plane_head
        scales += runs
