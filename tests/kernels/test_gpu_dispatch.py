"""Which way a call takes: the kernel on a GPU, torch elsewhere and where a kernel does not run; both say the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kvstore_kernels import (
    Moves,
    Rotation,
    arrive,
    arrive_strips,
    attend,
    attend_with_mass,
    deviation_of,
    gather_strips,
    gpu,
    rotary_of,
    rotation,
    slots_of,
)
from kvstore_kernels.strips import dequantised

from kvstore.spec import RopeSpec
from tests.kernels.device import DEVICE, triton_here
from tests.kernels.reference import plane

TOKENS = 90


@pytest.fixture(autouse=True)
def _launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gpu, "failures", {})
    with triton_here():
        yield


def planes(heads: int, tokens: int, seed: int) -> torch.Tensor:
    return plane(heads, tokens, 64, torch.float16, seed).to(DEVICE)


def turn_of(tokens: int) -> Rotation:
    turn = rotation(rotary_of(RopeSpec(rotary_dim=64)), torch.arange(tokens) + 7)
    return Rotation(turn.cos.to(DEVICE), turn.sin.to(DEVICE))


def arrived() -> list[torch.Tensor]:
    target = torch.zeros(3, TOKENS, 64, dtype=torch.float16, device=DEVICE)
    arrive(planes(3, TOKENS, 1), target, turn=turn_of(TOKENS), scale=0.5)
    return [target]


def moved() -> list[torch.Tensor]:
    """Strips into pages, and from there, quantised, into strips again."""
    source, back = planes(2, TOKENS, 2), torch.zeros(2, TOKENS, 64, dtype=torch.int8, device=DEVICE)
    pages, scales = torch.zeros(8, 16, 2, 64, dtype=torch.float16, device=DEVICE), torch.zeros(1, 2, 3, device=DEVICE)
    slots = slots_of(torch.tensor([5, 0, 7, 2, 1, 4], device=DEVICE), 16, TOKENS)
    arrive_strips(Moves([source], [pages], [0], [True]), slots=slots, turn=turn_of(TOKENS))
    gather_strips(Moves([back], [pages], [0], [False]), slots=slots, scales=scales, run_tokens=32)
    return [pages, dequantised(back, scales[0], 32)]


def attended() -> list[torch.Tensor]:
    places = torch.arange(TOKENS, device=DEVICE)
    rows = torch.tensor([0, 9, 40, 41, 88, 89], device=DEVICE)
    q, k, v = planes(4, len(rows), 3), planes(2, TOKENS, 4), planes(2, TOKENS, 5)
    found = [attend(q, k, v, rows, places), attend(q, k, v, rows, places, window=20, scale=0.3)]
    slots = torch.arange(TOKENS - 1, -1, -1, device=DEVICE)
    pages = (torch.zeros(6, 16, 2, 64, dtype=torch.float16, device=DEVICE) for _ in range(2))
    for kept, each in zip((k, v), pages, strict=True):
        each.flatten(0, 1)[slots] = kept.transpose(0, 1)
        found.append(each)
    found += [attend(q, *found[2:4], rows, places, slots=slots)]
    for peak in (False, True):
        found += attend_with_mass(q, k, v, rows, places, suffix_rows=2, window=30, peak=peak)
    found += attend_with_mass(q, k, v, rows, places, suffix_rows=0)
    return found


def deviated() -> list[torch.Tensor]:
    fresh, cached = (planes(2, TOKENS, 6), planes(2, TOKENS, 7)), (planes(2, TOKENS, 8), planes(2, TOKENS, 9))
    return [deviation_of(fresh, cached)]


CALLS = {"arrival": arrived, "strips": moved, "attention": attended, "deviation": deviated}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_kernel_says_what_torch_says(call: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "serves", lambda *tensors: False)
    expected = call()
    launched = []
    attempt = gpu.attempt
    monkeypatch.setattr(gpu, "serves", lambda *tensors: True)
    monkeypatch.setattr(gpu, "attempt", lambda name, launch: (launched.append(name), attempt(name, launch))[1])
    found = call()
    assert launched
    assert not gpu.failures
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_where_a_kernel_does_not_run_torch_serves(
    call: Callable[[], list[torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **named: Any) -> None:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(gpu, "serves", lambda *tensors: False)
    expected = call()
    for module in ("arrival.launch_arrival", "strips.launch_arrivals", "strips.launch_gather",
                   "attention.launch_attention", "deviation.launch_deviation"):  # fmt: skip
        monkeypatch.setattr(f"kvstore_kernels.{module}", broken)
    monkeypatch.setattr(gpu, "serves", lambda *tensors: True)
    for one, other in zip(call(), expected, strict=True):
        assert torch.equal(one, other)
    assert all(why == "RuntimeError: no compiler here" for why in gpu.failures.values())
    assert gpu.failures


def test_a_kernel_that_failed_is_not_tried_again() -> None:
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise RuntimeError("once")

    assert gpu.attempt("some", fails) is None
    assert gpu.attempt("some", fails) is None
    assert gpu.attempt("other", lambda: 7) == 7
    assert len(tries) == 1


def test_memory_that_ran_out_is_no_reason_for_another_way() -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        gpu.attempt("some", fails)
    assert not gpu.failures


def test_tensors_of_the_host_are_not_for_a_kernel() -> None:
    assert not gpu.serves(torch.zeros(1), None)
