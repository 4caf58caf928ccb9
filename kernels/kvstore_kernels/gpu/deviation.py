"""The launch of the deviation kernel."""

from __future__ import annotations

import torch

from kvstore_kernels.gpu import on_device, power_of_two

BLOCK_TOKENS = 16
WARPS = 4

Pair = tuple[torch.Tensor, torch.Tensor]


def launch_deviation(
    fresh: Pair, cached: Pair, planes: tuple[int, ...], block_tokens: int = BLOCK_TOKENS, warps: int = WARPS
) -> torch.Tensor:
    """Return what ``deviation_of`` does, of these planes: 0 is K, 1 is V."""
    from kvstore_kernels.gpu.programs.deviation import deviation_program

    heads, tokens, _ = fresh[planes[0]].shape
    out = torch.empty(tokens, dtype=torch.float32, device=fresh[planes[0]].device)
    if not tokens:
        return out
    dims = [fresh[which].shape[2] if which in planes else 0 for which in (0, 1)]
    strides = [stride for which in (0, 1) for pair in (fresh, cached) for stride in pair[which].stride()]
    with on_device(out):
        deviation_program[(-(-tokens // block_tokens),)](
            fresh[0], cached[0], fresh[1], cached[1], out, tokens, heads, *strides,
            K_DIM=dims[0], V_DIM=dims[1], BLOCK_K=power_of_two(dims[0]), BLOCK_V=power_of_two(dims[1]),
            BLOCK_T=block_tokens, num_warps=warps,
        )  # fmt: skip
    return out
