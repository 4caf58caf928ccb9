"""Shared by the benchmarks of a GPU: the device, the clock of its work, and the rate of its link to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvstore.errors import Unavailable
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result

PINNED_BYTES_MAX = 1 << 30
"""The pinned memory that a copy limit is measured with: to pin more takes longer than the copies."""


def device_of(scale: str) -> str:
    """Return the device of a GPU's benchmark: "cuda"; at the scale tiny the CPU where there is none. Raises
    Unavailable where there is none at another scale."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if scale == "tiny":
        return "cpu"
    raise Unavailable("torch finds no CUDA device: this benchmark measures a GPU (at --tiny it runs on the CPU)")


def has_gpu() -> bool:
    """Return True when torch finds a GPU. This process may be forked afterwards: CUDA is not begun."""
    import torch

    return torch.cuda.device_count() > 0


def settle(device: str) -> None:
    """Wait until the GPU has done all that was asked of it."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, action: Callable[[], object]) -> float:
    """Return the seconds from the call of ``action`` to the end of the work that it gave the GPU."""

    def settled() -> None:
        action()
        settle(device)

    settle(device)
    return shared.timed(settled)


class PinnedCopy:
    """One copy between pinned host memory and the device, of as many bytes as asked for: the limit of every copy in
    that direction. Its memory is reused where there are more bytes than ``PINNED_BYTES_MAX``."""

    def __init__(self, device: str, byte_count: int, *, to_device: bool) -> None:
        import torch

        self._device, self._byte_count = device, byte_count
        size = min(byte_count, PINNED_BYTES_MAX)
        host = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")
        there = torch.ones(size, dtype=torch.uint8, device=device)
        self._target, self._source = (there, host) if to_device else (host, there)

    def seconds(self) -> float:
        """Copy all bytes, and return the seconds that this takes."""
        count = -(-self._byte_count // self._target.numel())

        def copy_all() -> None:
            for _ in range(count):
                self._target.copy_(self._source, non_blocking=True)

        return timed(self._device, copy_all) * self._byte_count / (count * self._target.numel())


def poisoned(shape: tuple[int, ...], device: str) -> Any:
    """Return bfloat16 memory of a pattern that no stored cache here has: NaN."""
    import torch

    return torch.full(shape, -1, dtype=torch.int16, device=device).view(torch.bfloat16)


def random_bits(shape: tuple[int, ...], device: str) -> Any:
    """Return bfloat16 memory of random finite numbers."""
    import torch

    return torch.randint(0, 0x7F00, shape, dtype=torch.int16, device=device).view(torch.bfloat16)


def same_bits(one: Any, other: Any) -> bool:
    """Return True when two bfloat16 tensors of one device have the same bits."""
    import torch

    return bool(torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16)))


def joined(name: str, cases: Mapping[str, Result], judged: str) -> Result:
    """Return one result of several cases: the figure of the one named ``judged``, met where all of them are. The
    conditions have all ``cases``."""
    worst = cases[judged]
    told = {case: {**_told(found), "target": found.target} for case, found in cases.items()}
    return Result(
        name=name, value=worst.value, unit=worst.unit, limit=worst.limit, ratio=worst.ratio,
        target="; ".join(f"{case}: {found.target}{'' if found.met else ', missed'}" for case, found in cases.items()),
        met=all(found.met for found in cases.values()), runs=worst.runs, spread=worst.spread,
        conditions={**worst.conditions, "judged_case": judged, "cases": told},
    )  # fmt: skip


def _told(found: Result) -> dict[str, Any]:
    fields = found.as_dict()
    return {each: fields[each] for each in ("value", "limit", "ratio", "met", "spread", "runs", "conditions")}


def least(cases: Mapping[str, Result], share: Callable[[Result], float] = lambda found: found.ratio) -> str:
    """Return the name of the case with the least ``share``."""
    return min(cases, key=lambda case: share(cases[case]))
