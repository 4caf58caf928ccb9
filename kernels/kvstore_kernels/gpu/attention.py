"""Launches of attention: of selected rows, and of the attention that rows give each key."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvstore_kernels.gpu import on_device, power_of_two

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DIM_MAX = 256


@dataclass(frozen=True)
class AttentionBlocks:
    """A program's rows, the keys that it takes at a time, its warps, and the blocks of keys on their way."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys and values, and the place of each key. ``k``, ``v``: planes [kv_heads, tokens, dim], or with ``slots``,
    int64 [tokens], pages [pages, page_size, kv_heads, dim]."""

    k: torch.Tensor
    v: torch.Tensor
    slots: torch.Tensor | None = None

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0] if self.slots is None else self.k.shape[2]

    @property
    def page_size(self) -> int:
        return 0 if self.slots is None else self.k.shape[1]

    def strides(self, plane: torch.Tensor) -> tuple[int, int, int, int]:
        """Return the distances of pages, heads, tokens and dims of K or V."""
        if self.slots is None:
            return (0, *plane.stride())  # type: ignore[return-value]  # three axes
        page, token, head, dim = plane.stride()
        return page, head, token, dim


def takes(q: torch.Tensor, keys: Keys, scale: float) -> bool:
    """Return True for dtypes, dims and a scale that the kernel is made for."""
    dims = q.shape[-1], keys.v.shape[-1]
    same = q.dtype == keys.k.dtype == keys.v.dtype and q.dtype in DTYPES
    return same and max(dims) <= DIM_MAX and min(dims) > 0 and scale > 0 and keys.k.numel() > 0


def blocks_of(q: torch.Tensor, v_dim: int) -> AttentionBlocks:
    """Return the blocks that serve best for rows of this number, dim and dtype."""
    wide = max(power_of_two(q.shape[2]), power_of_two(v_dim))
    if q.dtype == torch.float32:
        return AttentionBlocks(32, 32, 4, 1)
    if q.shape[1] <= 64:
        return AttentionBlocks(64, 64 if wide <= 128 else 32, 4, 2)
    return AttentionBlocks(128, 64, 8, 3) if wide <= 128 else AttentionBlocks(128, 32, 8, 2)


def launch_attention(
    q: torch.Tensor, keys: Keys, seen: tuple[torch.Tensor, torch.Tensor], scale: float, out: torch.Tensor,
    logs: torch.Tensor | None = None, blocks: AttentionBlocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Write the output of the rows to ``out``, [heads, rows, v_dim], and return it.

    Shapes: ``seen``: (starts, stops) of the keys that each row sees, int32 [rows], ascending. ``logs``: fp32
    [heads, rows], receives each row's sum of powers as a logarithm.
    """
    from kvstore_kernels.gpu.programs.attention import attend_program

    heads, rows, dim = q.shape
    if not rows:
        return out
    v_dim = keys.v.shape[-1]
    blocks = blocks or blocks_of(q, v_dim)
    k_page, k_head, k_token, k_dim = keys.strides(keys.k)
    v_page, v_head, v_token, v_dims = keys.strides(keys.v)
    with on_device(q):
        attend_program[(-(-rows // blocks.rows), heads)](
            q, keys.k, keys.v, out, out if logs is None else logs, *seen, seen[0] if keys.slots is None else keys.slots,
            scale * math.log2(math.e), rows, heads // keys.kv_heads, *q.stride(),
            k_page, k_head, k_token, k_dim, v_page, v_head, v_token, v_dims, out.stride(0), out.stride(1),
            PAGE_SIZE=keys.page_size, DIM=dim, V_DIM=v_dim, BLOCK_D=max(16, power_of_two(dim)),
            BLOCK_V=max(16, power_of_two(v_dim)), BLOCK_M=blocks.rows, BLOCK_N=blocks.keys, LOGS=logs is not None,
            **_arithmetic(q), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return out


def launch_mass(
    q: torch.Tensor, keys: Keys, seen: tuple[torch.Tensor, torch.Tensor], scale: float, logs: torch.Tensor, tokens: int,
    blocks: AttentionBlocks | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the attention that the rows of each head give each key, fp32 [heads, tokens]. ``logs``: from
    ``launch_attention`` of the same rows."""
    from kvstore_kernels.gpu.programs.attention import mass_program

    heads, rows, dim = q.shape
    mass = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    if blocks is None:
        narrow = q.dtype == torch.float32 or dim > 128
        blocks = AttentionBlocks(32, 64, 4, 1) if narrow else AttentionBlocks(64, 128, 8, 2)
    with on_device(q):
        mass_program[(-(-tokens // blocks.keys), heads)](
            q, keys.k, mass, logs, *seen, seen[0] if keys.slots is None else keys.slots, scale * math.log2(math.e),
            rows, tokens, heads // keys.kv_heads, *q.stride(), logs.stride(0), *keys.strides(keys.k),
            PAGE_SIZE=keys.page_size, DIM=dim, BLOCK_D=max(16, power_of_two(dim)), BLOCK_M=blocks.rows,
            BLOCK_N=blocks.keys, **_arithmetic(q), num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    return mass


def runs_seen(q_positions: torch.Tensor, k_positions: torch.Tensor, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the run of keys that each row sees, as (starts, stops): int32 [rows] each, ascending."""
    stops = torch.searchsorted(k_positions, q_positions, right=True, out_int32=True)
    if not window:
        return torch.zeros_like(stops), stops
    starts = torch.searchsorted(k_positions, q_positions - window, right=True, out_int32=True)
    return starts, stops


def _arithmetic(q: torch.Tensor) -> dict[str, object]:
    """Return how products are made: those of fp32 in three parts of TF32, nearly as exact as fp32; off the GPU, in the
    interpreter, all are fp32."""
    return {"UPCAST": not q.is_cuda, "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32"}
