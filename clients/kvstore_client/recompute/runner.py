"""The interface that recompute needs of an engine: one layer at a time, of any rows at any positions."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from kvstore_kernels import Rotary

from kvstore.spec import ModelSpec


class ModelRunner(Protocol):
    """A decoder taken apart, so that rows can be left out of some of its layers.

    Rows are tokens of one sequence, in ascending order, named by their positions, int64 [rows]. Results are on
    ``device``, in the model's dtype, and the caller may keep them. A layer ``l`` of some rows is

        q, k, v = project(l, hidden, positions)       # k, v into the cache, then attention over the cache by position
        hidden = finish(l, hidden, attention)

    ``spec``: the model's, with each layer's kind and window; ``rotary``: the rotation of its keys, by which they move
    to other positions; ``scale``: the factor of scores before the softmax.
    """

    spec: ModelSpec
    rotary: Rotary
    scale: float
    device: torch.device

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens, int64 [rows], to the residual stream that enters layer 0: [rows, hidden_size]."""

    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a layer's attention inputs from the rows that enter it, [rows, hidden_size]: q [heads, rows, k_dim], k
        [kv_heads, rows, k_dim], both rotated to their absolute positions, and v [kv_heads, rows, v_dim]."""

    def finish(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Compute the rest of a layer, from the rows that entered it, [rows, hidden_size], and their attention's
        output, [heads, rows, v_dim]. Returns the rows that leave it, [rows, hidden_size]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map rows that left the last layer, [rows, hidden_size], to logits, [rows, vocab_size]."""


@runtime_checkable
class Checked(Protocol):
    """A runner that can tell if its model is still the one that its spec names."""

    def check(self) -> None:
        """Raise InvalidRequest when it is not. Called before and after a prompt is computed."""


def check_runner(runner: object) -> None:
    """Raise InvalidRequest when the runner's model has changed, as far as it can tell."""
    if isinstance(runner, Checked):
        runner.check()
