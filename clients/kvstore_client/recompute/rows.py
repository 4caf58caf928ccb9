"""Rows: the tokens that are being computed, each with its residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvstore_client.recompute.runs import Run

STEP_ROWS = 512
"""Rows that a layer computes at a time on the CPU, which bounds the memory of its inner activations."""
GPU_STEP_ROWS = 4096
"""The same on a GPU, where fewer rows take as long, and kernels that are launched one by one take longer."""


def step_rows(device: torch.device) -> int:
    """Return the rows that a layer computes at a time on this device."""
    return STEP_ROWS if device.type == "cpu" else GPU_STEP_ROWS


@dataclass(frozen=True, eq=False)
class Rows:
    """``positions`` int64 [rows], ascending; ``hidden`` [rows, hidden_size], the input of the next layer. No one else
    uses that memory, so a layer's output may overwrite its input."""

    positions: torch.Tensor
    hidden: torch.Tensor

    def __len__(self) -> int:
        return len(self.positions)

    def kept(self, keep: torch.Tensor) -> Rows:
        """Return the rows for which ``keep``, bool [rows], is true."""
        return self if bool(keep.all()) else Rows(self.positions[keep], self.hidden[keep])

    def joined(self, positions: torch.Tensor, pieces: Iterable[torch.Tensor]) -> Rows:
        """Return these rows and those at ``positions``, all in order. ``pieces``: the next layer's input for the
        latter, in order, each [some of them, hidden_size]; taken one by one, so that no two need be in memory at
        once."""
        every, order = torch.cat((self.positions, positions)).sort()
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        hidden = self.hidden.new_empty(len(every), self.hidden.shape[1])
        hidden[place[: len(self)]] = self.hidden
        start = len(self)
        for piece in pieces:
            hidden[place[start : start + len(piece)]] = piece
            start += len(piece)
        assert start == len(every), "every row has its hidden states"
        return Rows(every, hidden)

    def last(self, count: int) -> Rows:
        return Rows(self.positions[len(self) - count :], self.hidden[len(self) - count :])

    def steps(self) -> Iterator[slice]:
        step = step_rows(self.hidden.device)
        for start in range(0, len(self), step):
            yield slice(start, start + step)


def drained(pieces: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield each in turn, and keep none longer than its turn."""
    while pieces:
        yield pieces.pop(0)


@dataclass(frozen=True, eq=False)
class Split:
    """A prompt's tokens, by how they are computed; positions int64, ascending.

    ``context``: tokens of runs that are not exact, which may be computed again. ``suffix``: tokens of no run, which are
    always computed; the last ``tail_count`` of them lie behind all runs. ``run_starts``: the place in ``context`` where
    each run begins.
    """

    context: torch.Tensor
    suffix: torch.Tensor
    tail_count: int
    run_starts: torch.Tensor

    @staticmethod
    def of(runs: Sequence[Run], token_count: int, device: torch.device) -> Split:
        covered = torch.zeros(token_count, dtype=torch.bool, device=device)
        inexact = torch.zeros_like(covered)
        starts, count = [], 0
        for run in runs:
            covered[run.token_start : run.token_stop] = True
            if not run.is_exact:
                inexact[run.token_start : run.token_stop] = True
                starts.append(count)
                count += run.token_count
        return Split(
            context=inexact.nonzero().flatten(),
            suffix=(~covered).nonzero().flatten(),
            tail_count=token_count - (runs[-1].token_stop if runs else 0),
            run_starts=torch.tensor(starts, dtype=torch.int64, device=device),
        )
