"""Arrival and gather: everything asked for is written, nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from kvstore_kernels.arrival import arrive, arrive_pages
from kvstore_kernels.gather import gather_pages
from kvstore_kernels.rotary import rotary_of, rotation

from kvstore.errors import InvalidRequest
from kvstore.spec import RopeSpec
from tests.kernels.reference import DIMS, DTYPES, HEADS, PAGE_SIZES, TOKENS, close, plane, rotated, wide


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def slots_of(tokens: int, page_size: int, pages: int, seed: int) -> torch.Tensor:
    """Whole pages in random order from a random place of the first page on, as an engine's block table has them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(pages, generator=generator)
    rows = (order[:, None] * page_size + torch.arange(page_size)).reshape(-1)
    start = int(torch.randint(page_size, (1,), generator=generator))
    return rows[start : start + tokens]


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


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", ["page slot head dim", "page head slot dim"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dim", DIMS)
def test_arrival_in_pages_and_back(heads: int, dim: int, page_size: int, layout: str) -> None:
    for tokens in TOKENS:
        arrives_in_pages(tokens, heads, dim, page_size, layout)


def arrives_in_pages(tokens: int, heads: int, dim: int, page_size: int, layout: str) -> None:
    """In every slot that was named, in its place, and nowhere else."""
    dtype = DTYPES[(TOKENS.index(tokens) + HEADS.index(heads) + DIMS.index(dim) + PAGE_SIZES.index(page_size)) % 3]
    rotary = rotary_of(RopeSpec(rotary_dim=dim))
    page_count = (tokens + page_size) // page_size + 3
    slots = slots_of(tokens, page_size, page_count, tokens)
    source = plane(heads, tokens, dim, dtype, tokens)
    number = TOKENS.index(tokens)
    is_turned = (heads, dim) == (HEADS[number % 4], DIMS[(number + PAGE_SIZES.index(page_size)) % 4])
    for turn in (None, rotation(rotary, -3)) if is_turned else (None,):
        if layout == "page slot head dim":
            pages = poisoned(page_count, page_size, heads, dim, dtype=dtype)
        else:
            pages = poisoned(page_count, heads, page_size, dim, dtype=dtype).transpose(1, 2)
        arrive_pages(source, pages, slots, turn=turn)
        out = poisoned(heads, tokens, dim, dtype=dtype)
        assert gather_pages(pages, slots, out=out) is out
        if turn is None:
            assert torch.equal(out, source)
        else:
            turned = rotated(wide(source), rotary.frequencies.double().numpy(), torch.tensor(-3).numpy())
            close(out, turned, dtype, 2)
        rows = pages.reshape(page_count * page_size, heads, dim)
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[slots] = False
        assert rows[untouched].isnan().all()
        assert not rows[slots].isnan().any()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_blocks_meet_without_a_seam(page_size: int, rotary_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 7 tokens, and of a page or two: the same bits as in one block."""
    source, rotary = plane(5, 257, 64, torch.bfloat16), rotary_of(RopeSpec(rotary_dim=rotary_dim))
    turn = rotation(rotary, torch.arange(257) * 3, torch.arange(257))
    slots = slots_of(257, page_size, 257 // page_size + 3, 1)
    shape = (257 // page_size + 3, page_size, 5, 64)
    results = []
    for blocks in (
        {},
        {"rotary.BLOCK_ELEMENTS": 7 * 5 * 64, "arrival.BLOCK_ELEMENTS": 2300, "gather.BLOCK_BYTES": 9999},
    ):
        for name, value in blocks.items():
            monkeypatch.setattr(f"kvstore_kernels.{name}", value)
        dense, pages = torch.zeros_like(source), poisoned(*shape, dtype=torch.bfloat16)
        arrive(source, dense, turn=turn)
        arrive_pages(source, pages, slots, turn=turn)
        assert int(pages.isnan().sum()) == pages.numel() - source.numel()
        results += [dense, gather_pages(pages, slots)]
    assert all(torch.equal(results[0], each) for each in results)


def test_slots_in_any_order() -> None:
    """Whole pages are only a faster way: a page filled backwards, and slots all over, arrive where they should."""
    orders = [torch.arange(31, -1, -1), torch.randperm(80, generator=torch.Generator().manual_seed(1))[:33]]
    orders.append(torch.cat([torch.arange(16, 32), torch.arange(8, 16), torch.arange(48, 56)]))
    orders.append(torch.cat([torch.arange(16, 32), torch.arange(40, 56)]))  # a page's worth that begins inside one
    for slots in orders:
        source = plane(2, len(slots), 64, torch.bfloat16, 5)
        pages = poisoned(5, 16, 2, 64, dtype=torch.bfloat16)
        arrive_pages(source, pages, slots)
        assert torch.equal(pages.view(80, 2, 64)[slots], source.transpose(0, 1))
        assert int(pages.isnan().sum()) == (80 - len(slots)) * 128
        assert torch.equal(gather_pages(pages, slots), source)


def test_a_scaled_fp8_source_is_decoded_on_arrival() -> None:
    rotary = rotary_of(RopeSpec(rotary_dim=64))
    source = plane(2, 17, 64, torch.float32).to(torch.float8_e4m3fn)
    cache = poisoned(2, 17, 64, dtype=torch.bfloat16)
    arrive(source, cache, scale=0.25)
    assert torch.equal(cache, (source.float() * 0.25).to(torch.bfloat16))
    pages = poisoned(2, 16, 2, 64, dtype=torch.bfloat16)
    slots = torch.arange(17)
    arrive_pages(source, pages, slots, turn=rotation(rotary, 5), scale=0.25)
    expected = rotated(wide(source.float()) * 0.25, rotary.frequencies.double().numpy(), torch.tensor(5).numpy())
    close(gather_pages(pages, slots), expected, torch.bfloat16, 2)


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


def test_slots_outside_the_pages_and_shapes_that_differ_are_refused() -> None:
    source, pages = plane(2, 3, 64, torch.float32), poisoned(2, 4, 2, 64, dtype=torch.float32)
    for slots in (torch.tensor([0, 1, 8]), torch.tensor([-1, 0, 1]), torch.tensor([0, 1])):
        with pytest.raises(InvalidRequest, match="slots"):
            arrive_pages(source, pages, slots)
    with pytest.raises(InvalidRequest, match="slots"):
        gather_pages(pages, torch.tensor([8]))
    with pytest.raises(InvalidRequest, match="shape"):
        arrive(source, pages[0])
    assert pages.isnan().all()
