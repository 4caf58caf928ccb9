"""The race: while a load keeps its prompt waiting, the prompt's front is computed beside it. The first to finish is
used. So a tier that is slower than its plan, or stops, costs a few hundredths of a plain prefill, not a whole second
one."""

from __future__ import annotations

import math
from contextlib import suppress

import torch
from kvstore_kernels import Rotation

from kvstore.errors import DataLoss
from kvstore.planning import Plan, Recompute
from kvstore.seams import Clock
from kvstore_client.recompute.fused import recompute
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.request import Request
from kvstore_client.recompute.runs import InPlace, Run
from kvstore_client.recompute.sources import FetchedRun

STEPS = 32
"""Number of steps in which a front is computed."""


class _HasCome(Exception):
    """The layer that a step races with has come: the rest of the step is not computed."""


class Race:
    """The front of one prompt, computed step by step. ``token_count``: tokens computed so far; ``planes``: their
    memory, the prompt's whole cache, for the tokens computed behind them; ``has_won``: all tokens to load were computed
    first.
    Memory: a second cache, once a load is late.

    A step begins when a layer has been waited for as long as a step takes, and ends where it is when the layer comes: a
    late load is delayed by one layer of a step. After each layer that came after a step began, that wait doubles: so
    layers that always come a little late do not cost a step each time.
    """

    def __init__(self, request: Request, plan: Plan, clock: Clock) -> None:
        loading = plan.loading
        assert loading is not None, "without a plan nobody knows what a step takes"
        self._request, self._clock = request, clock
        step, whole = request.runner.spec.chunk_tokens, loading.token_count
        self._step_tokens = step * max(1, math.ceil(whole / STEPS / step))
        self._step_s = loading.prefill.ttft_s * self._step_tokens / whole
        self._stop = plan.runs[0].token_stop
        self._delays = 0
        self.has_won = False
        self.token_count = 0
        self.planes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def wait(self, source: FetchedRun, layer: int) -> None:
        """Return when a layer has come. Raises DataLoss when all tokens to load are computed first."""
        idle_s = self._step_s * 2**self._delays
        while not source.comes(layer, idle_s):
            if self.token_count >= self._stop:
                self.has_won = True
                raise DataLoss("loading took longer than computing")
            self._step(source, layer)
            if not idle_s:
                continue
            idle_s, self._delays = 0.0, self._delays + 1

    def _step(self, source: FetchedRun, layer: int) -> None:
        """Compute the next tokens of the front, unless the layer comes meanwhile."""
        runner, done = self._request.runner, self.token_count
        if not self.planes:
            self.planes = dense_planes(runner.spec, len(self._request.tokens), runner.device)
        stop = min(done + self._step_tokens, self._stop)
        runs = [Run(0, done, InPlace(), is_exact=True)] if done else []
        planes = [(k[:, :stop], v[:, :stop]) for k, v in self.planes]
        tokens = self._request.tokens[:stop].astype("int64")

        def look() -> None:
            if source.has_come(layer):
                raise _HasCome

        with suppress(_HasCome):
            recompute(runner, tokens, runs, Recompute.reuse(), kv=planes, clock=self._clock, before_layer=look)
            self.token_count = stop


class RacedRun:
    """A run whose load races with its computation."""

    def __init__(self, source: FetchedRun, race: Race) -> None:
        self._source, self._race = source, race

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        """See ``Source.land``. Also raises DataLoss when computing was faster."""
        self._race.wait(self._source, layer)
        self._source.land(layer, k, v, turn)

    def hidden(self) -> torch.Tensor:
        """See ``Source.hidden``."""
        return self._source.hidden()
