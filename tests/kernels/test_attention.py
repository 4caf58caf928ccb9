"""Attention of selected rows against the formula; masks by position, never by place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_kernels import attention as kernels
from kvstore_kernels.attention import attend, attend_with_mass

from kvstore.errors import InvalidRequest
from tests.kernels.reference import DIMS, DTYPES, HEADS, TOKENS, attention, close, plane, wide


def rows_of(tokens: int, count: int, seed: int) -> torch.Tensor:
    """Selected positions: some of the context, and the last ones."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(tokens, generator=generator)[:count]
    return torch.cat([chosen, torch.arange(max(0, tokens - 3), tokens)]).unique()


def case(heads: int, kv_heads: int, tokens: int, dim: int, dtype: torch.dtype, rows: torch.Tensor) -> tuple[Any, ...]:
    q = plane(heads, len(rows), dim, dtype, 1)
    k, v = plane(kv_heads, tokens, dim, dtype, 2), plane(kv_heads, tokens, dim, dtype, 3)
    return q, k, v, rows, torch.arange(tokens)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("window", [0, 20])
def test_attention_equals_the_formula(kv_heads: int, dim: int, dtype: torch.dtype, window: int) -> None:
    heads = kv_heads * (3 if dim == 64 else 1)
    for tokens in TOKENS:
        inputs = case(heads, kv_heads, tokens, dim, dtype, rows_of(tokens, 12, dim))
        expected, weights = attention(
            *(each.numpy() if each.dtype == torch.int64 else wide(each) for each in inputs), window
        )
        close(attend(*inputs, window=window), expected, dtype, 4)
        suffix = min(3, tokens)
        out, mass = attend_with_mass(*inputs, suffix_rows=suffix, window=window)
        close(out, expected, dtype, 4)
        assert mass.dtype == torch.float32
        np.testing.assert_allclose(wide(mass), weights[:, -suffix:].sum((0, 1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 300])
def test_many_rows_go_block_by_block(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK_KEYS", 256)
    monkeypatch.setattr(kernels, "SCORES_MAX", 4 * 700 * 16)
    monkeypatch.setattr(kernels, "ROWS_MIN", 1)
    inputs = case(4, 2, 700, 64, torch.float32, torch.arange(700))
    expected, weights = attention(
        *(each.numpy() if each.dtype == torch.int64 else wide(each) for each in inputs), window
    )
    close(attend(*inputs, window=window), expected, torch.float32, 4)
    out, mass = attend_with_mass(*inputs, suffix_rows=40, window=window)
    close(out, expected, torch.float32, 4)
    np.testing.assert_allclose(wide(mass), weights[:, -40:].sum((0, 1)), rtol=1e-4, atol=1e-5)


def test_where_all_tokens_are_rows_a_repeated_position_still_counts() -> None:
    """Two tokens at one position see each other: no mask by place says that."""
    positions = torch.tensor([0, 1, 1, 2, 5])
    q, k, v = (plane(2, 5, 64, torch.float32, seed) for seed in (1, 2, 3))
    expected, _ = attention(wide(q), wide(k), wide(v), positions.numpy(), positions.numpy())
    close(attend(q, k, v, positions, positions), expected, torch.float32, 4)


def test_positions_may_have_gaps_and_begin_anywhere() -> None:
    k_positions = torch.tensor([3, 4, 9, 10, 50])
    q, k, v = (plane(2, count, 64, torch.float32, count) for count in (4, 5, 5))
    q_positions = torch.tensor([2, 4, 11, 60])
    windowed, _ = attention(wide(q), wide(k), wide(v), q_positions.numpy(), k_positions.numpy(), 7)
    assert (windowed[:, [0, 3]] == 0).all()
    close(attend(q, k, v, q_positions, k_positions, window=7), windowed, torch.float32, 4)
    expected, _ = attention(wide(q), wide(k), wide(v), q_positions.numpy(), k_positions.numpy())
    found = attend(q, k, v, q_positions, k_positions)
    close(found, expected, torch.float32, 4)
    assert (found[:, 0] == 0).all(), "a query before every key sees nothing"
    out, mass = attend_with_mass(q, k, v, q_positions, k_positions, suffix_rows=4)
    close(out, expected, torch.float32, 4)
    assert float(mass.sum()) == pytest.approx(2 * 3)


def bottom_right(q_positions: Any, k_positions: Any, window: int = 0) -> torch.Tensor:
    """The usual mistake: rows are taken for the last positions."""
    rows, tokens = len(q_positions), len(k_positions)
    return torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)


def unmasked(q_positions: Any, k_positions: Any, window: int = 0) -> torch.Tensor:
    return torch.ones(len(q_positions), len(k_positions), dtype=torch.bool)


@pytest.mark.parametrize("mask", [bottom_right, unmasked])
def test_a_mask_by_place_is_caught(mask: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = case(2, 2, 64, 64, torch.float32, torch.tensor([5, 9, 30, 62, 63]))
    expected, _ = attention(*(each.numpy() if each.dtype == torch.int64 else wide(each) for each in inputs))
    close(attend(*inputs), expected, torch.float32, 4)
    monkeypatch.setattr(kernels, "visible", mask)
    for found in (attend(*inputs), attend_with_mass(*inputs, suffix_rows=5)[0]):
        with pytest.raises(AssertionError):
            close(found, expected, torch.float32, 4)


def test_what_lies_behind_the_mask_does_not_matter() -> None:
    """Keys beyond a query's position may be anything, also not yet written."""
    inputs = case(2, 1, 300, 64, torch.float32, torch.tensor([3, 100, 280]))
    q, k, v, rows, positions = inputs
    expected = attend(*inputs)
    k[:, 290:], v[:, 290:] = torch.nan, torch.nan
    assert torch.equal(attend(q, k, v, rows, positions), expected)


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, rows, positions = case(2, 2, 20, 64, torch.float32, torch.tensor([3, 10]))
    with pytest.raises(InvalidRequest, match="shapes"):
        attend(q[:, :, :32], k, v, rows, positions)
    with pytest.raises(InvalidRequest, match="q_positions"):
        attend(q, k, v, rows[:1], positions)
    with pytest.raises(InvalidRequest, match="ascend"):
        attend(q, k, v, rows, positions.flip(0))
    with pytest.raises(InvalidRequest, match="suffix_rows"):
        attend_with_mass(q, k, v, rows, positions, suffix_rows=3)
