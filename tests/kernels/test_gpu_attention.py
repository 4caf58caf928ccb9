"""The attention kernels against the formula: any dtype and dim, pages and planes, windows, odd tails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_kernels import attend, attend_with_mass
from kvstore_kernels.gpu import failures
from kvstore_kernels.gpu.attention import AttentionBlocks, Keys, launch_attention, launch_mass, runs_seen, takes

from tests.kernels.device import DEVICE, HAS_GPU, triton_here
from tests.kernels.reference import DTYPES, attention, close, plane, wide

TOKENS = 150 if not HAS_GPU else 700
SMALL = AttentionBlocks(32, 32, 4, 2)


@pytest.fixture(autouse=True)
def _launches() -> Iterator[None]:
    with triton_here():
        yield


def rows_of(tokens: int, count: int, seed: int) -> torch.Tensor:
    """Selected positions, ascending, with the last ones among them."""
    chosen = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.cat([chosen, torch.arange(max(0, tokens - 3), tokens)]).unique()


def expected_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, places: torch.Tensor,
                window: int) -> tuple[Any, Any]:  # fmt: skip
    return attention(*(wide(each) for each in (q, k, v)), rows.numpy(), places.numpy(), window)


def paged(planes: torch.Tensor, page_size: int, slots: torch.Tensor, page_count: int, hnd: bool) -> torch.Tensor:
    """Return pages [pages, page_size, heads, dim] that hold NaN wherever no key lies."""
    heads, _, dim = planes.shape
    shape = (page_count, heads, page_size, dim) if hnd else (page_count, page_size, heads, dim)
    pages = torch.full(shape, torch.nan, dtype=planes.dtype)
    view = pages.transpose(1, 2) if hnd else pages
    view[slots // page_size, slots % page_size] = planes.transpose(0, 1)
    return view


def on(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [each.to(DEVICE) for each in tensors]


def run(q: torch.Tensor, keys: Keys, rows: torch.Tensor, places: torch.Tensor, window: int, suffix: int = 0,
        blocks: AttentionBlocks = SMALL) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return (output, mass per head), on the CPU. The output's neighbours are poisoned, and must stay so."""
    heads, count, scale = q.shape[0], q.shape[1], q.shape[2] ** -0.5
    assert takes(q, keys, scale)
    room = torch.full((heads, count + 2, keys.v.shape[-1]), torch.nan, dtype=q.dtype, device=DEVICE)
    logs = torch.full((heads, count), torch.nan, device=DEVICE)
    seen = runs_seen(*on(rows, places), window)
    launch_attention(q, keys, seen, scale, room[:, 1:-1], logs, blocks)
    assert room[:, 0].isnan().all()
    assert room[:, -1].isnan().all()
    split = count - suffix
    mass = launch_mass(
        q[:, split:], keys, (seen[0][split:], seen[1][split:]), scale, logs[:, split:], len(places), blocks
    )
    return room[:, 1:-1].cpu(), mass.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "v_dim"), [(4, 2, 64, 64), (3, 1, 80, 48), (2, 2, 128, 128)])
@pytest.mark.parametrize("window", [0, 41])
def test_planes(heads: int, kv_heads: int, dim: int, v_dim: int, dtype: torch.dtype, window: int) -> None:
    """Planes are views inside larger memory, and rows and keys end in the middle of a block."""
    rows, places, seed = rows_of(TOKENS, 37, dim), torch.arange(TOKENS), dim + window
    q = plane(heads, len(rows), dim, dtype, seed)
    k, v = plane(kv_heads, TOKENS + 9, dim, dtype, seed + 1), plane(kv_heads, TOKENS + 9, v_dim, dtype, seed + 2)
    here = slice(4, 4 + TOKENS)
    expected, weights = expected_of(q, k[:, here], v[:, here], rows, places, window)
    q, k, v = on(q, k, v)
    out, mass = run(q, Keys(k[:, here], v[:, here]), rows, places, window, suffix=3)
    close(out, expected, dtype, 4)
    np.testing.assert_allclose(wide(mass), weights[:, -3:].sum(1), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("hnd", [False, True], ids=["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 48])
@pytest.mark.parametrize("window", [0, 41])
def test_pages(page_size: int, hnd: bool, window: int) -> None:
    """Keys lie in slots in any order; all other slots hold NaN."""
    rows, places = rows_of(TOKENS, 37, page_size), torch.arange(TOKENS)
    q, k, v = (plane(heads, count, 64, torch.float16, page_size + heads) for heads, count in
               ((4, len(rows)), (2, TOKENS), (2, TOKENS)))  # fmt: skip
    page_count = TOKENS // page_size + 5
    slots = torch.randperm(page_count * page_size, generator=torch.Generator().manual_seed(page_size))[:TOKENS]
    expected, weights = expected_of(q, k, v, rows, places, window)
    k_pages, v_pages = (paged(each, page_size, slots, page_count, hnd).to(DEVICE) for each in (k, v))
    q, at = on(q, slots)
    out, mass = run(q, Keys(k_pages, v_pages, at), rows, places, window, suffix=len(rows))
    close(out, expected, torch.float16, 4)
    np.testing.assert_allclose(wide(mass), weights.sum(1), rtol=2e-4, atol=2e-5)


def test_rows_that_see_no_key_get_zeros() -> None:
    """Positions with gaps; some rows lie before every key, others behind every window."""
    places = torch.cat([torch.arange(40, 80), torch.arange(500, 530)])
    rows = torch.tensor([3, 39, 40, 61, 79, 120, 300, 499, 500, 529, 600])
    q, k, v = (plane(2, count, 64, torch.bfloat16, count) for count in (len(rows), len(places), len(places)))
    expected, weights = expected_of(q, k, v, rows, places, 25)
    blind = weights.sum(-1)[0] == 0
    assert blind.tolist() == [True, True, False, False, False, True, True, True, False, False, True]
    q, k, v = on(q, k, v)
    out, mass = run(q, Keys(k, v), rows, places, 25, suffix=len(rows))
    close(out, expected, torch.bfloat16, 4)
    assert (out[:, blind] == 0).all()
    np.testing.assert_allclose(wide(mass), weights.sum(1), rtol=2e-4, atol=2e-5)


@pytest.mark.filterwarnings("ignore:invalid value")
def test_what_no_row_sees_may_be_anything() -> None:
    rows, places = torch.tensor([70, 90, 100]), torch.arange(TOKENS)
    q, k, v = (plane(2, count, 64, torch.float16, count) for count in (3, TOKENS, TOKENS))
    expected, _ = expected_of(q, k, v, rows, places, 30)
    for each in (k, v):
        each[:, :41], each[:, 101:] = torch.nan, torch.inf
    q, k, v = on(q, k, v)
    out, mass = run(q, Keys(k, v), rows, places, 30, suffix=3)
    close(out, expected, torch.float16, 4)
    assert not mass.isnan().any()


def test_a_value_that_is_nan_is_not_hidden() -> None:
    """A row that sees NaN gets NaN: it does not pass for a row that sees nothing."""
    rows, places = torch.arange(TOKENS - 40, TOKENS), torch.arange(TOKENS)
    q, k, v = (plane(1, count, 64, torch.float16, count) for count in (40, TOKENS, TOKENS))
    k[:, 5] = torch.nan
    q, k, v = on(q, k, v)
    out, _ = run(q, Keys(k, v), rows, places, 0)
    assert out.isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU: the interpreter takes blocks of any size")
@pytest.mark.parametrize(
    ("dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float16), (128, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("count", [5, 900])
def test_the_blocks_that_are_used(count: int, dim: int, dtype: torch.dtype) -> None:
    rows, places = rows_of(2500, count, dim), torch.arange(2500)
    q, k, v = plane(4, len(rows), dim, dtype, 1), plane(2, 2500, dim, dtype, 2), plane(2, 2500, dim, dtype, 3)
    expected, weights = expected_of(q, k, v, rows, places, 0)
    given = on(q, k, v, rows, places)
    out, mass = attend_with_mass(*given, suffix_rows=4, peak=True)
    close(out.cpu(), expected, dtype, 4)
    np.testing.assert_allclose(wide(mass.cpu()), weights[:, -4:].sum(1).max(0), rtol=1e-3, atol=1e-5)
    assert torch.equal(attend(*given), out)
    assert not failures
