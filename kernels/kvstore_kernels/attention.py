"""Attention of selected rows: queries at any positions over all merged KV, masked by absolute position.

A query sees the keys whose position is not above its own and, with a window, less than ``window`` below it. The index
of a row or key in its tensor plays no part. A query that sees no key gets zeros.

Source: CacheBlend (EuroSys '25), section 4.2.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvstore.errors import InvalidRequest
from kvstore_kernels import gpu
from kvstore_kernels.gpu.attention import Keys, launch_attention, launch_mass, runs_seen, takes

BLOCK_ROWS = 128
BLOCK_KEYS = 4096
SCORES_MAX = 1 << 22
ROWS_MIN = 8


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    *,
    window: int = 0,
    scale: float | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention output of the given rows, [heads, rows, v_dim], of ``q``'s dtype.

    Shapes: ``q`` [heads, rows, dim], ``k`` [kv_heads, tokens, dim], ``v`` [kv_heads, tokens, v_dim], heads a multiple
    of kv_heads; positions int64 [rows] and [tokens], both ascending. ``window`` 0: none; ``scale``: dim ** -0.5. With
    ``slots``, int64 [tokens], keys and values lie in pages, [pages, page_size, kv_heads, dim], each in its slot: page *
    page_size + its place there.
    On a GPU: one pass without further memory; weights are rounded to ``q``'s dtype, sums are fp32. What would wait for
    the device is not checked: the order of positions, and slots.
    Memory elsewhere: a mask of 128 rows by the keys they can see, 1 byte and one of ``q``'s dtype each, and none where
    every token is a row; keys and values are not repeated for their groups. Cost: keys beyond a block's last position
    (and before its window) are not touched.
    Raises: InvalidRequest for shapes that do not fit.
    """
    _check(q, k, v, q_positions, k_positions, slots)
    given, factor = (q, k, v, q_positions, k_positions, slots), q.shape[2] ** -0.5 if scale is None else scale
    if gpu.serves(*given) and takes(q, Keys(k, v, slots), factor):
        found = gpu.attempt("attention", lambda: _launched(*given, window, factor))
        if found is not None:
            return found
    k, v = _planes(k, v, slots)
    _check_order(q_positions, k_positions)
    if q.shape[1]:
        stop = int(torch.searchsorted(k_positions, q_positions[-1:], right=True))
        k, v, k_positions = k[:, : max(1, stop)], v[:, : max(1, stop)], k_positions[: max(1, stop)]
    if not window and _are_all(q_positions, k_positions):
        query = _by_group(q, k.shape[0])
        key, value = (_grouped(plane, query.shape[1]) for plane in (k, v))
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).flatten(0, 1)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    for start in range(0, q.shape[1], BLOCK_ROWS):
        rows = slice(start, start + BLOCK_ROWS)
        seen = _seen(q_positions[rows], k_positions, window)
        mask = visible(q_positions[rows], k_positions[seen], window)
        query = _by_group(q[:, rows], k.shape[0])
        key, value = (_grouped(plane[:, seen], query.shape[1]) for plane in (k, v))
        result = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        out[:, rows] = result.flatten(0, 1)
    blind = _blind(q_positions, k_positions, window)
    if bool(blind.any()):
        out[:, blind] = 0
    return out


def attend_with_mass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_positions: torch.Tensor,
    k_positions: torch.Tensor,
    *,
    suffix_rows: int,
    window: int = 0,
    scale: float | None = None,
    peak: bool = False,
    slots: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of ``attend``, and the attention that the last ``suffix_rows`` rows give each key: fp32
    [tokens], summed over these rows and over the heads. With ``peak`` it is the sum in the head where it is largest.
    Scores, softmax and sums of those rows are fp32. ``slots``: as for ``attend``.

    Memory on a GPU: fp32 [heads, tokens]; scores are computed twice. Memory elsewhere: as ``attend``; for the suffix
    also two runs of fp32 scores, of as many rows as fit in 16 MiB or of 8 rows, and keys and values in fp32, 4,096
    tokens at a time.
    Raises: InvalidRequest for shapes that do not fit.
    """
    _check(q, k, v, q_positions, k_positions, slots)
    if not 0 <= suffix_rows <= q.shape[1]:
        raise InvalidRequest(f"suffix_rows {suffix_rows} must be in 0..{q.shape[1]}")
    given, factor = (q, k, v, q_positions, k_positions, slots), q.shape[2] ** -0.5 if scale is None else scale
    if gpu.serves(*given) and takes(q, Keys(k, v, slots), factor):
        found = gpu.attempt("mass", lambda: _launched_with_mass(*given, window, factor, suffix_rows, peak))
        if found is not None:
            return found
    k, v = _planes(k, v, slots)
    _check_order(q_positions, k_positions)
    out, mass = _with_mass(q, k, v, q_positions, k_positions, suffix_rows, window, factor)
    return out, mass.amax(0) if peak else mass.sum(0)


def _with_mass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor,
    suffix_rows: int, window: int, factor: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output, and the mass per head."""
    split, tokens = q.shape[1] - suffix_rows, k.shape[1]
    mass = torch.zeros(q.shape[0], tokens, dtype=torch.float32, device=q.device)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    out[:, :split] = attend(q[:, :split], k, v, q_positions[:split], k_positions, window=window, scale=factor)
    step = max(ROWS_MIN, SCORES_MAX // (q.shape[0] * tokens))
    for start in range(split, q.shape[1], step):
        rows = slice(start, start + step)
        mask = visible(q_positions[rows], k_positions, window)
        query = _by_group(q[:, rows].float() * factor, k.shape[0])
        scores = query.new_empty(*query.shape[:3], tokens)
        for first in range(0, tokens, BLOCK_KEYS):
            keys = slice(first, first + BLOCK_KEYS)
            scores[..., keys] = torch.einsum("ghrd,gtd->ghrt", query, k[:, keys].float())
        weights = scores.masked_fill_(~mask, -math.inf).softmax(-1).masked_fill_(~mask, 0)
        mass += weights.sum(dim=2).flatten(0, 1)
        result = query.new_zeros(*query.shape[:3], v.shape[2])
        for first in range(0, tokens, BLOCK_KEYS):
            keys = slice(first, first + BLOCK_KEYS)
            result += torch.einsum("ghrt,gtd->ghrd", weights[..., keys], v[:, keys].float())
        out[:, rows] = result.flatten(0, 1).to(q.dtype)
    return out, mass


def _launched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor,
    slots: torch.Tensor | None, window: int, factor: float,
) -> torch.Tensor:  # fmt: skip
    seen = runs_seen(q_positions, k_positions, window)
    return launch_attention(q, Keys(k, v, slots), seen, factor, q.new_empty(*q.shape[:2], v.shape[-1]))


def _launched_with_mass(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor,
    slots: torch.Tensor | None, window: int, factor: float, suffix_rows: int, peak: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    keys, seen = Keys(k, v, slots), runs_seen(q_positions, k_positions, window)
    logs = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    out = launch_attention(q, keys, seen, factor, q.new_empty(*q.shape[:2], v.shape[-1]), logs)
    split = q.shape[1] - suffix_rows
    last = seen[0][split:], seen[1][split:]
    mass = launch_mass(q[:, split:], keys, last, factor, logs[:, split:], len(k_positions))
    return out, mass.amax(0) if peak else mass.sum(0)


def visible(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int = 0) -> torch.Tensor:
    """Return the mask of the keys that each query sees, by position: bool [rows, tokens]."""
    seen = q_positions[:, None] >= k_positions  # compared as they are: differences would take 8 bytes each
    if window:
        seen &= (q_positions - window)[:, None] < k_positions
    return seen


def _are_all(q_positions: torch.Tensor, k_positions: torch.Tensor) -> bool:
    """True when queries and keys have the same positions, none of them twice: then a causal mask by index is right."""
    return torch.equal(q_positions, k_positions) and bool((k_positions.diff() > 0).all())


def _blind(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int) -> torch.Tensor:
    """Return the mask of the queries that see no key: bool [rows]."""
    stops = torch.searchsorted(k_positions, q_positions, right=True)
    return stops <= (torch.searchsorted(k_positions, q_positions - window, right=True) if window else 0)


def _seen(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int) -> slice:
    """Return the run of keys that any of these queries sees; at least one key."""
    stop = int(torch.searchsorted(k_positions, q_positions[-1:], right=True))
    start = int(torch.searchsorted(k_positions, q_positions[:1] - window, right=True)) if window else 0
    return slice(min(start, len(k_positions) - 1), max(stop, start + 1))


def _by_group(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return the queries by KV head: [kv_heads, group, rows, dim]."""
    return q.reshape(kv_heads, -1, *q.shape[1:])


def _grouped(plane: torch.Tensor, group: int) -> torch.Tensor:
    """Return the plane repeated for each query of a group, [kv_heads, group, tokens, dim], without a copy."""
    return plane[:, None].expand(-1, group, -1, -1)


def _planes(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values as planes."""
    if slots is None:
        return k, v
    page, place = slots // k.shape[1], slots % k.shape[1]
    return k[page, place].transpose(0, 1), v[page, place].transpose(0, 1)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_positions: torch.Tensor, k_positions: torch.Tensor,
    slots: torch.Tensor | None,
) -> None:  # fmt: skip
    kv_heads, axes = (k.shape[0], 2) if slots is None else (k.shape[2], 3)
    if k.shape[:axes] != v.shape[:axes] or q.shape[2] != k.shape[-1] or q.shape[0] % kv_heads:
        raise InvalidRequest(f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    tokens = k.shape[1] if slots is None else len(slots)
    if q_positions.shape != (q.shape[1],) or k_positions.shape != (tokens,):
        raise InvalidRequest(
            f"q_positions and k_positions have shapes {tuple(q_positions.shape)} and {tuple(k_positions.shape)}, "
            f"expected {(q.shape[1],)} and {(tokens,)}"
        )


def _check_order(q_positions: torch.Tensor, k_positions: torch.Tensor) -> None:
    for name, positions in (("q_positions", q_positions), ("k_positions", k_positions)):
        if bool((positions.diff() < 0).any()):
            raise InvalidRequest(f"{name} must ascend")
