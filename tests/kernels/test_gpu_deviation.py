"""The deviation kernel, and choosing on the device."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from kvstore_kernels import Metric, arrive, attend, attend_with_mass, deviation_of, highest
from kvstore_kernels.gpu import failures
from kvstore_kernels.gpu.deviation import launch_deviation

from tests.kernels.device import DEVICE, HAS_GPU, triton_here
from tests.kernels.reference import DTYPES, plane, wide


@pytest.fixture(autouse=True)
def _launches() -> Iterator[None]:
    with triton_here():
        yield


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "k_dim", "v_dim"), [(2, 64, 64), (3, 80, 48), (1, 128, 256)])
def test_deviation_equals_the_formula(heads: int, k_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    """The cached planes are views of rows between others that hold NaN."""
    for tokens in (1, 16, 61):
        fresh = [plane(heads, tokens, dim, dtype, seed) for seed, dim in enumerate((k_dim, v_dim), tokens)]
        room = [torch.full((heads, tokens + 3, dim), torch.nan, dtype=dtype) for dim in (k_dim, v_dim)]
        for number, each in enumerate(room):
            each[:, 2:-1] = plane(heads, tokens, each.shape[2], dtype, 100 + number)
        squares = [
            ((wide(new) - wide(old[:, 2:-1])) ** 2).sum((0, 2)) for new, old in zip(fresh, room, strict=True)
        ]  # fmt: skip
        given = tuple(each.to(DEVICE) for each in fresh)
        cached = tuple(each.to(DEVICE)[:, 2:-1] for each in room)
        for planes, expected in (((0, 1), sum(squares)), ((0,), squares[0]), ((1,), squares[1])):
            found = launch_deviation(given, cached, planes).cpu()
            assert found.dtype == torch.float32
            np.testing.assert_allclose(wide(found), expected, rtol=1e-5)


def test_no_tokens_have_no_deviation() -> None:
    nothing = torch.empty(2, 0, 64, device=DEVICE)
    assert launch_deviation((nothing, nothing), (nothing, nothing), (0, 1)).shape == (0,)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU, for which the host could wait")
def test_nothing_waits_for_the_device() -> None:
    fresh = tuple(plane(2, 300, 64, torch.bfloat16, seed).cuda() for seed in (1, 2))
    cached = tuple(plane(2, 300, 64, torch.bfloat16, seed).cuda() for seed in (3, 4))
    places, target = torch.arange(300).cuda(), torch.zeros(2, 300, 64, dtype=torch.bfloat16).cuda()
    q = plane(4, 300, 64, torch.bfloat16, 5).cuda()

    def everything() -> torch.Tensor:
        arrive(cached[0], target)
        attend(q, *cached, places, places, window=50)
        attend_with_mass(q, *cached, places, places, suffix_rows=9)
        return highest(deviation_of(fresh, cached, Metric.BOTH), 40, places)

    first = everything()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, again)
    assert torch.equal(target, cached[0])
    assert not failures


@pytest.mark.skipif(not HAS_GPU, reason="test_selection has the same on the CPU")
def test_ties_and_nan_on_the_device() -> None:
    scores = torch.tensor([1.0, torch.nan, 3.0, torch.inf, 3.0, 3.0, torch.nan, 0.0]).cuda()
    assert highest(scores, 4).tolist() == [1, 2, 3, 6]
    assert highest(scores, 6, torch.arange(8).cuda() * 2).tolist() == [2, 4, 6, 8, 10, 12]
