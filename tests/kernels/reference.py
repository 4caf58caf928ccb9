"""The formulas in numpy and float64, importing nothing of the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HEADS = (1, 2, 5, 8)
DIMS = (64, 80, 128, 256)
TOKENS = (1, 17, 255, 256, 257)
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2e-5}
"""Relative error of one rounding to each dtype; fp32 has room for its sums, and for angles that the model rounds."""


def plane(heads: int, tokens: int, dim: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, tokens, dim, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wide(tensor: torch.Tensor) -> Any:
    return tensor.double().numpy()


def rotated(x: Any, frequencies: Any, turns: Any) -> Any:
    """R(turns) x, a pair of dims at a time. ``x`` [heads, tokens, dim], ``turns`` [tokens] positions."""
    out = x.copy()
    pairs = len(frequencies)
    for pair in range(pairs):
        angle = turns * frequencies[pair]
        first, second = x[..., pair], x[..., pair + pairs]
        out[..., pair] = first * np.cos(angle) - second * np.sin(angle)
        out[..., pair + pairs] = first * np.sin(angle) + second * np.cos(angle)
    return out


def attention(q: Any, k: Any, v: Any, q_positions: Any, k_positions: Any, window: int = 0) -> tuple[Any, Any]:
    """(output, weights [heads, rows, tokens]), head by head."""
    group = len(q) // len(k)
    distance = q_positions[:, None] - k_positions[None, :]
    seen = (distance >= 0) & ((distance < window) | (window == 0))
    outputs, weights = [], []
    for head in range(len(q)):
        scores = q[head] @ k[head // group].T / np.sqrt(q.shape[2])
        powers = np.where(seen, np.exp(scores - scores.max(axis=1, keepdims=True)), 0.0)
        sums = powers.sum(axis=1, keepdims=True)
        weights.append(np.divide(powers, sums, out=np.zeros_like(powers), where=sums > 0))
        outputs.append(weights[-1] @ v[head // group])
    return np.stack(outputs), np.stack(weights)


def close(found: torch.Tensor, expected: Any, dtype: torch.dtype, slack: float = 1.0) -> None:
    """Equal up to one rounding to ``dtype`` (times ``slack``), relative to the largest value of the row."""
    scale = np.abs(expected).max(axis=-1, keepdims=True) + 1e-6
    error = np.abs(wide(found) - expected) / scale
    assert not np.isnan(error).any()
    assert error.max() <= slack * ROUNDING[dtype], error.max()
