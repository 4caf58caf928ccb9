"""Arrival and gather of many strips: the kernels and the torch paths against the formula, bit for bit where bytes are
only copied; what is not asked for stays poisoned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from kvstore_kernels import rotary_of, rotation
from kvstore_kernels.gpu.strips import TokenBlocks, launch_arrival, launch_arrivals, launch_gather, takes
from kvstore_kernels.rotary import Rotation, rotate
from kvstore_kernels.strips import (
    LIMITS,
    RUN_TOKENS,
    Moves,
    arrive_strips,
    dequantised,
    gather_strips,
    quantised,
    slots_of,
)

from kvstore.errors import InvalidRequest
from kvstore.spec import RopeSpec
from tests.conftest import IS_FULL
from tests.kernels.device import DEVICE, HAS_GPU, triton_here
from tests.kernels.reference import DTYPES, close, plane, wide

LENGTHS = (64, 64, 17)
"""Tokens of the strips of one plane, like chunks and a partial tail."""
PLACES = (0, 64, 131)
TOKENS = 150
BLOCKS = TokenBlocks(16, 4)
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _launches() -> Iterator[None]:
    with triton_here():
        yield


def kernel_arrival(moves: Moves, slots: torch.Tensor | None = None, turn: Rotation | None = None, scale: float = 1.0,
                   scales: torch.Tensor | None = None, run_tokens: int = RUN_TOKENS) -> None:  # fmt: skip
    assert takes(moves.strips[0].dtype, moves.planes[0].dtype, turned=turn is not None,
                 scaled=scales is not None or scale != 1.0)  # fmt: skip
    launch_arrivals(moves, slots, turn, scale, scales, run_tokens, BLOCKS)


def kernel_gather(moves: Moves, slots: torch.Tensor | None = None, scales: torch.Tensor | None = None,
                  run_tokens: int = RUN_TOKENS) -> None:  # fmt: skip
    launch_gather(moves, slots, scales, run_tokens, LIMITS.get(moves.strips[0].dtype, 1.0), BLOCKS)


ARRIVALS = {"kernel": kernel_arrival, "torch": arrive_strips}
GATHERS = {"kernel": kernel_gather, "torch": gather_strips}
Way = Callable[..., None]
ways = partial(pytest.mark.parametrize, "way")


def in_pairs(ones: Sequence[Any], others: Sequence[Any], two: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return combinations in which each two values of two lists meet: half of all, for the interpreter is slow. On a
    GPU, and at full scale, return all."""
    if HAS_GPU or IS_FULL:
        return list(product(ones, others, two))
    return [(one, other, two[(i + j) % 2]) for i, one in enumerate(ones) for j, other in enumerate(others)]


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory of which every byte is set: NaN in every float."""
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)[..., 0].to(DEVICE)


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor is as ``poisoned`` made it."""
    return (
        (tensor.contiguous().cpu()[..., None].view(torch.uint8) == 0xFF)
        .unflatten(-1, (-1, tensor.itemsize))
        .all(-1)[..., 0]
    )


def strips_of(heads: int, dim: int, dtype: torch.dtype, planes: int, seed: int) -> list[torch.Tensor]:
    """Return strips of so many planes, as a slab holds them: heads apart by more than their tokens."""
    found = []
    for number in range(planes * len(LENGTHS)):
        tokens = LENGTHS[number % len(LENGTHS)]
        values = plane(heads, tokens, dim, torch.float32, seed + number).to(dtype) if dtype != torch.int8 else (
            torch.randint(-127, 128, (heads, tokens, dim), generator=torch.Generator().manual_seed(seed + number))
        ).to(torch.int8)  # fmt: skip
        slab = poisoned(heads, 2 * tokens + 32, dim, dtype=dtype)
        slab[:, :tokens] = values.to(DEVICE)
        found.append(slab[:, :tokens])
    return found


def moves_of(strips: list[torch.Tensor], planes: list[torch.Tensor], turned: bool = True) -> Moves:
    """Return the moves to these planes: every other plane is K."""
    each = len(LENGTHS)
    of_strip = [planes[number // each] for number in range(len(strips))]
    is_k = [turned and number // each % 2 == 0 for number in range(len(strips))]
    return Moves(strips, of_strip, list(PLACES) * len(planes), is_k)


def some_slots(page_size: int, seed: int) -> tuple[torch.Tensor, int]:
    """Return slots in any order, some negative, and the number of pages."""
    pages = TOKENS // page_size + 3
    order = torch.randperm(pages * page_size, generator=torch.Generator().manual_seed(seed))
    slots = order[:TOKENS].clone()
    slots[torch.tensor([0, 70, 71, 147])] = -1
    return slots, pages


def pages_of(pages: int, page_size: int, heads: int, dim: int, dtype: torch.dtype, *, hnd: bool) -> torch.Tensor:
    """Return poisoned pages, inside memory that also holds another half: a view [pages, page_size, heads, dim]."""
    if hnd:
        return poisoned(pages, 2, heads, page_size, dim, dtype=dtype)[:, 1].transpose(1, 2)
    return poisoned(pages, 2, page_size, heads, dim, dtype=dtype)[:, 1]


def dense_rows(plane: torch.Tensor, slots: torch.Tensor | None) -> torch.Tensor:
    """Return the rows of all tokens on the CPU, [heads, tokens, dim]; poison for a token without a slot."""
    if slots is None:
        return plane.cpu()[:, :TOKENS]
    size = plane.shape[1]
    rows = plane.cpu()[slots // size, slots % size].transpose(0, 1).contiguous()
    rows.view(torch.uint8)[:, slots < 0] = 0xFF  # a NaN would be another one
    return rows


def check_arrived(moves: Moves, slots: torch.Tensor | None, expected: Callable[[int, torch.Tensor], Any],
                  check: Callable[[torch.Tensor, Any], None]) -> None:  # fmt: skip
    """Every token that has a place holds what ``expected`` says of (number, strip); the rest is poison."""
    for first in range(0, len(moves.strips), len(LENGTHS)):
        plane = moves.planes[first]
        rows, left = dense_rows(plane, slots), torch.ones(TOKENS, dtype=torch.bool)
        for number in range(first, first + len(LENGTHS)):
            start, strip = moves.starts[number], moves.strips[number].cpu()
            here = torch.arange(start, start + strip.shape[1])
            there = here if slots is None else here[slots[here] >= 0]
            check(rows[:, there], expected(number, strip)[:, there - start])
            left[there] = False
        assert is_poison(rows[:, left]).all()
        written = int((~left).sum()) * plane.shape[-1] * moves.strips[0].shape[0]
        assert int((~is_poison(plane)).sum()) <= written, "nothing else is written"


def equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@ways(ARRIVALS.values(), ids=ARRIVALS)
@pytest.mark.parametrize(
    ("dtype", "page_size", "hnd"), in_pairs([*DTYPES, torch.uint8], [0, 16, 24], [False, True]), ids=str
)
def test_raw_strips_arrive_to_the_bit(way: Way, dtype: torch.dtype, page_size: int, hnd: bool) -> None:
    heads, dim = (3, 80) if page_size == 24 else (2, 64)
    source_dtype = torch.float32 if dtype == torch.uint8 else dtype
    strips = strips_of(heads, dim, source_dtype, 2, page_size)
    strips[0][0, 3, 5] = torch.nan
    if dtype == torch.uint8:
        strips = [each.view(torch.uint8) for each in strips]
        dim *= 4
    slots, count = some_slots(page_size, 1) if page_size else (None, 0)
    planes = [
        pages_of(count, page_size, heads, dim, dtype, hnd=hnd) if page_size
        else poisoned(heads, TOKENS + hnd, dim, dtype=dtype)
        for _ in range(2)
    ]  # fmt: skip
    moves = moves_of(strips, planes, turned=False)
    way(moves, slots=None if slots is None else slots.to(DEVICE))
    check_arrived(moves, slots, lambda number, strip: strip, equal)


@ways(ARRIVALS.values(), ids=ARRIVALS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("dim", "rotary_dim", "page_size", "alike"),
    [(64, 64, 16, False), (64, 32, 0, True), (80, 80, 16, True), (80, 80, 0, False), (128, 96, 0, False)],
)
def test_keys_rotate_on_arrival(
    way: Way, dtype: torch.dtype, dim: int, rotary_dim: int, page_size: int, alike: bool
) -> None:
    rotary, heads = rotary_of(RopeSpec(rotary_dim=rotary_dim)), 2
    turn = rotation(rotary, 7) if alike else rotation(rotary, torch.arange(TOKENS) * 3, torch.arange(TOKENS))
    strips = strips_of(heads, dim, dtype, 2, dim)
    slots, count = some_slots(page_size, 2) if page_size else (None, 0)
    planes = [
        pages_of(count, page_size, heads, dim, dtype, hnd=False) if page_size
        else poisoned(heads, TOKENS, dim, dtype=dtype)
        for _ in range(2)
    ]  # fmt: skip
    moves = moves_of(strips, planes)
    there = Rotation(turn.cos.to(DEVICE), turn.sin.to(DEVICE))
    way(moves, slots=None if slots is None else slots.to(DEVICE), turn=there)

    def expected(number: int, strip: torch.Tensor) -> torch.Tensor:
        if not moves.turned[number]:
            return strip.double()
        start = moves.starts[number]
        return rotate(strip.double().float(), turn.of(start, start + strip.shape[1])).double()

    check_arrived(moves, slots, expected, lambda found, right: close(found, right.numpy(), dtype))


@ways(ARRIVALS.values(), ids=ARRIVALS)
@pytest.mark.parametrize(("dtype", "stored", "by_run"), in_pairs(DTYPES, [E4M3, torch.int8], [False, True]), ids=str)
def test_quantised_strips_are_decoded_on_arrival(
    way: Way, stored: torch.dtype, dtype: torch.dtype, by_run: bool
) -> None:
    heads, dim, run_tokens = 2, 64, 32
    turn = rotation(rotary_of(RopeSpec(rotary_dim=48)), torch.arange(TOKENS) + 9)
    strips = strips_of(heads, dim, stored, 2, 5)
    scales = torch.rand(len(strips), heads, 2, generator=torch.Generator().manual_seed(6)) + 0.1
    planes = [poisoned(heads, TOKENS, dim, dtype=dtype) for _ in range(2)]
    moves = moves_of(strips, planes)
    there = Rotation(turn.cos.to(DEVICE), turn.sin.to(DEVICE))
    given = {"scales": scales.to(DEVICE), "run_tokens": run_tokens} if by_run else {"scale": 0.37}
    way(moves, turn=there, **given)

    def expected(number: int, strip: torch.Tensor) -> torch.Tensor:
        values = dequantised(strip, scales[number], run_tokens) if by_run else strip.float() * 0.37
        start = moves.starts[number]
        return rotate(values, turn.of(start, start + strip.shape[1])) if moves.turned[number] else values

    check_arrived(moves, None, expected, lambda found, right: close(found, wide(right), dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("turned", [False, True])
def test_one_plane(dtype: torch.dtype, turned: bool) -> None:
    """Rows of a cache whose axes lie in another order, with dims apart."""
    heads, tokens, dim = 5, 37, 64
    turn = rotation(rotary_of(RopeSpec(rotary_dim=dim)), torch.arange(tokens) + 40) if turned else None
    source = plane(heads, tokens, dim, dtype, 3)
    cache = poisoned(tokens + 3, heads, dim, 2, dtype=dtype)
    target = cache[2 : 2 + tokens, :, :, 1].transpose(0, 1)
    there = None if turn is None else Rotation(turn.cos.to(DEVICE), turn.sin.to(DEVICE))
    launch_arrival(source.to(DEVICE), target, there, 1.0, BLOCKS)
    expected = source if turn is None else rotate(source.float(), turn)
    close(target.cpu(), wide(expected), dtype)
    assert int((~is_poison(cache)).sum()) <= source.numel()


def test_a_plane_may_be_turned_and_scaled_where_it_lies() -> None:
    turn = rotation(rotary_of(RopeSpec(rotary_dim=32)), 9)
    source = plane(3, 70, 64, torch.float32)
    cache = source.to(DEVICE, copy=True)
    launch_arrival(cache, cache, Rotation(turn.cos.to(DEVICE), turn.sin.to(DEVICE)), 0.5, BLOCKS)
    close(cache.cpu(), wide(rotate(source * 0.5, turn)), torch.float32)


@ways(GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize(("dtype", "page_size", "hnd"), in_pairs(DTYPES, [0, 16, 24], [False, True]), ids=str)
def test_rows_are_gathered_to_the_bit(way: Way, dtype: torch.dtype, page_size: int, hnd: bool) -> None:
    """What arrived comes back, and nothing around the strips is touched."""
    heads, dim = (3, 80) if page_size == 24 else (2, 64)
    strips = strips_of(heads, dim, dtype, 2, 11)
    slots, count = some_slots(page_size, 3) if page_size else (None, 0)
    planes = [
        pages_of(count, page_size, heads, dim, dtype, hnd=hnd) if page_size
        else poisoned(heads, TOKENS, dim, dtype=dtype)
        for _ in range(2)
    ]  # fmt: skip
    at = None if slots is None else slots.to(DEVICE)
    arrive_strips(moves_of(strips, planes, turned=False), slots=at)
    slabs = [poisoned(heads, each.shape[1] + 5, dim, dtype=dtype) for each in strips]
    back = [slab[:, 2 : 2 + each.shape[1]] for slab, each in zip(slabs, strips, strict=True)]
    moves = moves_of(back, planes, turned=False)
    way(moves, slots=at)
    for start, slab, found, right in zip(moves.starts, slabs, back, strips, strict=True):
        here = torch.arange(start, start + right.shape[1])
        kept = torch.ones_like(here, dtype=torch.bool) if slots is None else slots[here] >= 0
        equal(found.cpu()[:, kept], right.cpu()[:, kept])
        assert is_poison(found)[:, ~kept].all()
        assert is_poison(slab)[:, :2].all()
        assert is_poison(slab)[:, 2 + right.shape[1] :].all()


@ways(GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize(("dtype", "stored", "run_tokens"), in_pairs(DTYPES, list(LIMITS), [16, 64]), ids=str)
def test_rows_are_quantised(way: Way, stored: torch.dtype, dtype: torch.dtype, run_tokens: int) -> None:
    heads, dim, page_size = 3, 80, 16
    strips = strips_of(heads, dim, dtype, 2, 13)
    strips[0][1, :16] *= 1000  # one run is much larger than its neighbours
    strips[1][2] = 0
    slots, count = some_slots(page_size, 4)
    planes = [pages_of(count, page_size, heads, dim, dtype, hnd=True) for _ in range(2)]
    arrive_strips(moves_of(strips, planes, turned=False), slots=slots.to(DEVICE))
    back = [poisoned(heads, each.shape[1], dim, dtype=torch.int16).to(stored) for each in strips]
    scales = poisoned(len(strips), heads, -(-64 // run_tokens), dtype=torch.float32)
    moves = moves_of(back, planes, turned=False)
    way(moves, slots=slots.to(DEVICE), scales=scales, run_tokens=run_tokens)
    for number, (start, found, strip) in enumerate(zip(moves.starts, back, strips, strict=True)):
        here = torch.arange(start, start + strip.shape[1])
        kept = slots[here] >= 0
        source = strip.cpu().clone()
        source[:, ~kept] = 0
        values, expected = quantised(source, stored, run_tokens)
        runs = expected.shape[1]
        assert torch.equal(scales[number, :, :runs].cpu(), expected)
        assert is_poison(scales[number, :, runs:]).all()
        equal(found.cpu()[:, kept], values[:, kept])
        step = expected.repeat_interleave(run_tokens, 1)[:, : strip.shape[1], None]
        error = (dequantised(found.cpu(), expected, run_tokens) - source.float()).abs()[:, kept]
        within = step * 0.5001 if stored == torch.int8 else torch.maximum(source.float().abs() / 16, step * 2**-9)
        assert (error <= (within * torch.ones_like(source.float()))[:, kept] * 1.001).all()


@ways(GATHERS.values(), ids=GATHERS)
@pytest.mark.parametrize("stored", LIMITS, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_run_that_is_not_finite_decodes_to_nan(way: Way, stored: torch.dtype, bad: float) -> None:
    strips = strips_of(2, 64, torch.bfloat16, 1, 17)
    planes = [poisoned(2, TOKENS, 64, dtype=torch.bfloat16)]
    strips[0][1, 20, 3] = bad
    arrive_strips(moves_of(strips, planes, turned=False))
    back = [torch.empty(each.shape, dtype=stored, device=DEVICE) for each in strips]
    scales = torch.zeros(len(strips), 2, 4, device=DEVICE)
    way(moves_of(back, planes, turned=False), scales=scales, run_tokens=16)
    assert scales.isnan().nonzero().tolist() == [[0, 1, 1]]
    decoded = dequantised(back[0].cpu(), scales[0].cpu(), 16)
    assert decoded[1, 16:32].isnan().all()
    assert int(decoded.isnan().sum()) == 16 * 64


def test_a_slot_outside_the_pages_is_not_written() -> None:
    strips = strips_of(2, 64, torch.float32, 1, 19)
    memory = poisoned(40, 16, 2, 64, dtype=torch.float32)
    slots = torch.arange(TOKENS)
    slots[3], slots[100] = 16 * 16, 1 << 40
    kernel_arrival(moves_of(strips, [memory[:16]], turned=False), slots=slots.to(DEVICE))
    assert is_poison(memory[16:]).all()
    assert is_poison(memory.flatten(0, 1)[3]).all()


def test_slots_of_a_block_table() -> None:
    assert slots_of(torch.tensor([7, 0, 3], dtype=torch.int32), 4, 10).tolist() == [28, 29, 30, 31, 0, 1, 2, 3, 12, 13]


def test_what_does_not_fit_is_refused() -> None:
    strips, planes = strips_of(2, 64, torch.float32, 1, 23), [poisoned(2, TOKENS, 64, dtype=torch.float32)]
    moves = moves_of(strips, planes)
    with pytest.raises(InvalidRequest, match="slots"):
        arrive_strips(moves, slots=torch.arange(TOKENS))
    with pytest.raises(InvalidRequest, match="turn"):
        arrive_strips(moves)
    with pytest.raises(InvalidRequest, match="rows"):
        moves_of(strips, [planes[0][:, :140]])
    with pytest.raises(InvalidRequest, match="differ"):
        moves_of([*strips[:2], strips[2].half()], planes)
    with pytest.raises(InvalidRequest, match="scales"):
        gather_strips(moves_of([each.half() for each in strips], planes))
    with pytest.raises(InvalidRequest, match="run_tokens"):
        gather_strips(moves, run_tokens=20)
    assert is_poison(planes[0]).all()
