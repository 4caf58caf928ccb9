"""KV deviation: the distance between a token's cached KV and the KV that the receiver computes now, at the same
position.

Source: CacheBlend (EuroSys '25), section 4.2. Cached and fresh K are compared after their rotation to the same
position. Some implementations compare one plane only: ``Metric`` chooses the planes.
"""

from __future__ import annotations

from enum import StrEnum

import torch

from kvstore.errors import InvalidRequest
from kvstore_kernels import gpu
from kvstore_kernels.gpu.deviation import launch_deviation

BLOCK_TOKENS = 512


class Metric(StrEnum):
    """The planes whose deviation counts."""

    K = "k"
    V = "v"
    BOTH = "both"


_PLANES: dict[Metric, tuple[int, ...]] = {Metric.K: (0,), Metric.V: (1,), Metric.BOTH: (0, 1)}


def deviation_of(
    fresh: tuple[torch.Tensor, torch.Tensor],
    cached: tuple[torch.Tensor, torch.Tensor],
    metric: Metric = Metric.BOTH,
) -> torch.Tensor:
    """Return the squared L2 distance per token, summed over heads and dims: fp32 [tokens].

    Shapes: (K, V) of one layer each, [kv_heads, tokens, dim]. Cost: one fp32 temporary of 512 tokens per plane; on a
    GPU one launch, without temporaries.
    Raises: InvalidRequest for planes of different shapes.
    """
    planes = _PLANES[metric]
    for which in planes:
        if fresh[which].shape != cached[which].shape:
            raise InvalidRequest(
                f"fresh {'KV'[which]} has shape {tuple(fresh[which].shape)}, cached {tuple(cached[which].shape)}"
            )
    if gpu.serves(*fresh, *cached):
        found = gpu.attempt("deviation", lambda: launch_deviation(fresh, cached, planes))
        if found is not None:
            return found
    total = torch.zeros(fresh[0].shape[1], dtype=torch.float32, device=fresh[0].device)
    for which in planes:
        for start in range(0, len(total), BLOCK_TOKENS):
            rows = slice(start, start + BLOCK_TOKENS)
            difference = fresh[which][:, rows].float() - cached[which][:, rows].float()
            total[rows] += difference.square_().sum(dim=(0, 2))
    return total
