"""Attention of selected rows: online softmax over the keys that a row sees.

Positions ascend, so the keys that a row sees are one run of the keys, ``starts`` to ``stops`` of that row. A program
takes BLOCK_M rows of one head. Keys that no row sees are skipped, and where every row sees all keys of a block, nothing
is masked. A block's keys and values that no row sees are not read: they may be anything.

Source: Dao, FlashAttention-2 (2023).
"""

import triton
import triton.language as tl


@triton.jit
def _product(a, b, acc, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    if UPCAST:  # the interpreter's product of bf16 is wrong
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _rows_of(slots, key, inside, page, token, PAGE_SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return the offset of each key's row: by its slot in pages, else relative to the block's first."""
    if PAGE_SIZE > 0:
        if MASKED:
            slot = tl.load(slots + key, mask=inside, other=0)
        else:
            slot = tl.load(slots + key)
        offset = (slot // PAGE_SIZE) * page + (slot % PAGE_SIZE) * token
    else:
        offset = tl.arange(0, key.shape[0]) * token
    return offset


@triton.jit
def _over(
    acc, total, peak, q, k, v, slots, start, stop, low, high, begin, end, exponent,
    k_page, k_token, k_dim, v_page, v_token, v_dim,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the blocks of keys from ``begin`` to ``end`` into the running sums of a tile of rows."""
    dims = tl.arange(0, BLOCK_D)
    v_dims = tl.arange(0, BLOCK_V)
    if PAGE_SIZE == 0:
        k += begin.to(tl.int64) * k_token
        v += begin.to(tl.int64) * v_token
    for key0 in range(begin, end, BLOCK_N):
        key = key0 + tl.arange(0, BLOCK_N)
        inside = (key >= low) & (key < high)
        k_rows = _rows_of(slots, key, inside, k_page, k_token, PAGE_SIZE, MASKED)
        v_rows = _rows_of(slots, key, inside, v_page, v_token, PAGE_SIZE, MASKED)
        k_pointers = k + k_rows[None, :] + (dims * k_dim)[:, None]
        v_pointers = v + v_rows[:, None] + (v_dims * v_dim)[None, :]
        if MASKED:
            keys = tl.load(k_pointers, mask=inside[None, :] & (dims < DIM)[:, None], other=0.0)
        elif DIM < BLOCK_D:
            keys = tl.load(k_pointers, mask=(dims < DIM)[:, None], other=0.0)
        else:
            keys = tl.load(k_pointers)
        scores = _product(q, keys, tl.zeros([q.shape[0], BLOCK_N], tl.float32), UPCAST, PRECISION)
        if MASKED:
            seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
            scores = tl.where(seen, scores * exponent, -float("inf"))
            highest = tl.maximum(peak, tl.max(scores, 1))
            safe = tl.where(highest == -float("inf"), 0.0, highest)
            weights = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(peak - safe)
        else:
            highest = tl.maximum(peak, tl.max(scores, 1) * exponent)
            weights = tl.exp2(scores * exponent - highest[:, None])
            shrink = tl.exp2(peak - highest)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        if MASKED:
            values = tl.load(v_pointers, mask=inside[:, None] & (v_dims < V_DIM)[None, :], other=0.0)
        elif V_DIM < BLOCK_V:
            values = tl.load(v_pointers, mask=(v_dims < V_DIM)[None, :], other=0.0)
        else:
            values = tl.load(v_pointers)
        acc = _product(weights.to(values.dtype), values, acc, UPCAST, PRECISION)
        peak = highest
        if PAGE_SIZE == 0:
            k += BLOCK_N * k_token
            v += BLOCK_N * v_token
    return acc, total, peak


@triton.jit(do_not_specialize=["rows", "group"])
def attend_program(
    q, k, v, out, logs, starts, stops, slots, exponent, rows, group,
    q_head, q_row, q_dim, k_page, k_head, k_token, k_dim, v_page, v_head, v_token, v_dim, out_head, out_row,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LOGS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the output of each row and, with LOGS, the logarithm (base 2) of the sum of its powers; infinity where it
    sees no key. ``exponent``: the scores' scale times log2(e), above 0."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles see the most keys: they begin first
    head = tl.program_id(1)
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, rows) - 1
    row = first + tl.arange(0, BLOCK_M)
    known = row < rows
    place = tl.minimum(row, rows - 1)
    start = tl.load(starts + place)
    stop = tl.load(stops + place)
    low, high = tl.load(starts + first), tl.load(stops + last)
    begin = low // BLOCK_N * BLOCK_N
    full = (tl.load(starts + last) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_end = tl.load(stops + first) // BLOCK_N * BLOCK_N
    dims = tl.arange(0, BLOCK_D)
    q += head.to(tl.int64) * q_head
    k += (head // group).to(tl.int64) * k_head
    v += (head // group).to(tl.int64) * v_head
    q_pointers = q + (place.to(tl.int64) * q_row)[:, None] + (dims * q_dim)[None, :]
    queries = tl.load(q_pointers, mask=(dims < DIM)[None, :], other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.zeros([BLOCK_M], tl.float32) - float("inf")
    acc, total, peak = _over(
        acc, total, peak, queries, k, v, slots, start, stop, low, high, begin, tl.minimum(full, high), exponent,
        k_page, k_token, k_dim, v_page, v_token, v_dim,
        PAGE_SIZE, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_N, True, UPCAST, PRECISION,
    )  # fmt: skip
    acc, total, peak = _over(
        acc, total, peak, queries, k, v, slots, start, stop, low, high, full, full_end, exponent,
        k_page, k_token, k_dim, v_page, v_token, v_dim,
        PAGE_SIZE, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_N, False, UPCAST, PRECISION,
    )  # fmt: skip
    acc, total, peak = _over(
        acc, total, peak, queries, k, v, slots, start, stop, low, high, tl.maximum(full, full_end), high, exponent,
        k_page, k_token, k_dim, v_page, v_token, v_dim,
        PAGE_SIZE, DIM, V_DIM, BLOCK_D, BLOCK_V, BLOCK_N, True, UPCAST, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    v_dims = tl.arange(0, BLOCK_V)
    out_pointers = out + head.to(tl.int64) * out_head + (row.to(tl.int64) * out_row)[:, None] + v_dims[None, :]
    tl.store(out_pointers, acc.to(out.dtype.element_ty), mask=known[:, None] & (v_dims < V_DIM)[None, :])
    if LOGS:
        sums = tl.where(total == 0.0, float("inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(logs + head * rows + row, sums, mask=known)


@triton.jit(do_not_specialize=["rows", "tokens", "group"])
def mass_program(
    q, k, mass, logs, starts, stops, slots, exponent, rows, tokens, group,
    q_head, q_row, q_dim, log_head, k_page, k_head, k_token, k_dim,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the attention that all rows of a head give each key, from the logarithms that ``attend_program`` wrote."""
    key0 = tl.program_id(0) * BLOCK_N
    head = tl.program_id(1)
    key = key0 + tl.arange(0, BLOCK_N)
    inside = key < tokens
    dims = tl.arange(0, BLOCK_D)
    q += head.to(tl.int64) * q_head
    k += (head // group).to(tl.int64) * k_head
    if PAGE_SIZE == 0:
        k += key0.to(tl.int64) * k_token
    k_rows = _rows_of(slots, key, inside, k_page, k_token, PAGE_SIZE, True)
    k_pointers = k + k_rows[None, :] + (dims * k_dim)[:, None]
    keys = tl.load(k_pointers, mask=inside[None, :] & (dims < DIM)[:, None], other=0.0)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in range(0, rows, BLOCK_M):
        last = tl.minimum(first + BLOCK_M, rows) - 1
        if (tl.load(stops + last) > key0) & (tl.load(starts + first) < key0 + BLOCK_N):
            row = first + tl.arange(0, BLOCK_M)
            known = row < rows
            start = tl.load(starts + row, mask=known, other=0)
            stop = tl.load(stops + row, mask=known, other=0)
            log = tl.load(logs + head * log_head + row, mask=known, other=0.0)
            q_pointers = q + (row.to(tl.int64) * q_row)[:, None] + (dims * q_dim)[None, :]
            queries = tl.load(q_pointers, mask=known[:, None] & (dims < DIM)[None, :], other=0.0)
            scores = _product(queries, keys, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST, PRECISION)
            seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
            total += tl.sum(tl.where(seen, tl.exp2(scores * exponent - log[:, None]), 0.0), 0)
    tl.store(mass + head.to(tl.int64) * tokens + key, total, mask=inside)
