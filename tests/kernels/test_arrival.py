"""Arrival: everything asked for is written, nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from kvstore_kernels.arrival import arrive
from kvstore_kernels.rotary import rotary_of, rotation

from kvstore.errors import InvalidRequest
from kvstore.spec import RopeSpec
from tests.kernels.reference import DIMS, DTYPES, HEADS, TOKENS, close, plane, rotated, wide


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_arrival_in_a_dense_cache(heads: int, dim: int, dtype: torch.dtype) -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=dim // 2 if heads == 2 else dim))
    frequencies = rotary.frequencies.double().numpy()
    for tokens in TOKENS:
        source = plane(heads, tokens, dim, dtype, tokens)
        for turned in (False, True):
            cache = poisoned(heads, tokens + 9, dim, dtype=dtype)
            target = torch.arange(tokens) + 40
            turn = rotation(rotary, target, torch.arange(tokens)) if turned else None
            arrive(source, cache[:, 4 : 4 + tokens], turn=turn)
            assert cache[:, :4].isnan().all()
            assert cache[:, 4 + tokens :].isnan().all()
            if turned:
                close(cache[:, 4 : 4 + tokens], rotated(wide(source), frequencies, torch.tensor(40).numpy()), dtype, 2)
            else:
                assert torch.equal(cache[:, 4 : 4 + tokens], source)


@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_blocks_meet_without_a_seam(rotary_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 tokens: the same bits as in one block."""
    source, rotary = plane(5, 257, 64, torch.bfloat16), rotary_of(RopeSpec(rotary_dim=rotary_dim))
    turn = rotation(rotary, torch.arange(257) * 3, torch.arange(257))
    whole, blocks = torch.zeros_like(source), torch.zeros_like(source)
    arrive(source, whole, turn=turn)
    monkeypatch.setattr("kvstore_kernels.rotary.BLOCK_ELEMENTS", 7 * 5 * 64)
    arrive(source, blocks, turn=turn)
    assert torch.equal(whole, blocks)


def test_a_scaled_fp8_source_is_decoded_on_arrival() -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=64))
    source = plane(2, 17, 64, torch.float32).to(torch.float8_e4m3fn)
    cache = poisoned(2, 17, 64, dtype=torch.bfloat16)
    arrive(source, cache, scale=0.25)
    assert torch.equal(cache, (source.float() * 0.25).to(torch.bfloat16))
    arrive(source, cache, turn=rotation(rotary, 5), scale=0.25)
    expected = rotated(wide(source.float()) * 0.25, rotary.frequencies.double().numpy(), torch.tensor(5).numpy())
    close(cache, expected, torch.bfloat16, 2)


def test_a_cache_may_be_turned_and_scaled_where_it_lies() -> None:
    """Partial rotary, too: the dims that do not turn are scaled as well."""
    rotary = rotary_of(RopeSpec(rotary_dim=32))
    cache = plane(2, 17, 64, torch.float32)
    expected = rotated(wide(cache) * 0.5, rotary.frequencies.double().numpy(), torch.tensor(9).numpy())
    arrive(cache, cache, turn=rotation(rotary, 9), scale=0.5)
    close(cache, expected, torch.float32)


def test_scratch_serves_calls_in_and_out_of_inference_mode() -> None:
    source, turn = plane(2, 257, 64, torch.bfloat16), rotation(rotary_of(RopeSpec(rotary_dim=64)), 3)
    caches = [torch.zeros_like(source) for _ in range(3)]
    for cache, inference in zip(caches, (True, False, True), strict=True):
        with torch.inference_mode(inference):
            arrive(source, cache, turn=turn)
    assert torch.equal(caches[0], caches[1])
    assert torch.equal(caches[0], caches[2])
    assert not torch.equal(caches[0], source)


def test_shapes_that_differ_are_refused() -> None:
    source, rows = plane(2, 3, 64, torch.float32), poisoned(4, 2, 64, dtype=torch.float32)
    with pytest.raises(InvalidRequest, match="shape"):
        arrive(source, rows)
    assert rows.isnan().all()
