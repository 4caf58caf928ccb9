"""Runs: the parts of a prompt whose cache is reused, and their sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from kvstore_kernels import Rotation, arrive

from kvstore.errors import InvalidRequest
from kvstore.planning import check_sender
from kvstore.spec import Exactness, ModelSpec
from kvstore_client.derived import exactness_of


class Source(Protocol):
    """A run's cache, layer by layer."""

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        """Return when the layer is in its place: views of the merged cache, [kv_heads, token_count, dim]. Rotates K by
        ``turn`` unless it is None. Called at most once per layer, in ascending order. Raises: KVStoreError when the
        layer does not come."""

    def hidden(self) -> torch.Tensor:
        """Return E that enters the transition layer, [token_count, hidden_size]; asked for at most once. Raises:
        KVStoreError when there is none."""


class GivenKV:
    """A source over tensors: per layer (K, V), each [kv_heads, token_count, dim]; None for a layer that is not loaded.
    ``hidden``: E of the transition layer."""

    def __init__(
        self, kv: Sequence[tuple[torch.Tensor, torch.Tensor] | None], hidden: torch.Tensor | None = None
    ) -> None:
        self._kv = kv
        self._hidden = hidden
        self.exactness = exactness_of(kv)

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        pair = self._kv[layer]
        if pair is None:
            raise InvalidRequest(f"kv[{layer}] is None, and this setting loads layer {layer}")
        arrive(pair[0], k, turn=turn)
        arrive(pair[1], v)

    def hidden(self) -> torch.Tensor:
        if self._hidden is None:
            raise InvalidRequest("hidden is missing: this setting starts from E of its first layer")
        return self._hidden


class InPlace:
    """A source of a cache that is already in the merged cache."""

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        """Do nothing: the layer is in its place."""

    def hidden(self) -> torch.Tensor:
        raise InvalidRequest("what stands in the merged cache has no hidden states")


@dataclass(frozen=True, eq=False)
class Run:
    """Consecutive tokens of the prompt whose cache is reused.

    ``rotated_from``: the position that K of its first token was rotated for. ``sender``: the model of the cache, if it
    is not this one. ``is_exact``: the cache is what the model itself computes here, so nothing of it is computed again.
    Only exact runs and computed tokens come before such a run.
    """

    token_start: int
    token_count: int
    source: Source
    rotated_from: int = 0
    sender: ModelSpec | None = None
    is_exact: bool = False

    @property
    def token_stop(self) -> int:
        return self.token_start + self.token_count


def check_runs(runs: Sequence[Run], token_count: int, spec: ModelSpec, logit_count: int) -> None:
    """Raise InvalidRequest for runs out of order, or that overlap, leave the prompt or cover tokens whose logits are
    wanted; for an exact run behind one that is not, or rotated for another place; for a sender of another
    architecture."""
    last, is_lossy = 0, False
    for index, run in enumerate(runs):
        if run.token_start < last or run.token_count < 1 or run.rotated_from < 0:
            raise InvalidRequest(f"runs[{index}] ({run.token_start}, {run.token_count}) must lie behind the one before")
        last = run.token_stop
        if run.is_exact and (is_lossy or run.rotated_from != run.token_start or run.sender is not None):
            raise InvalidRequest(
                f"runs[{index}] is exact: it must be the model's own, rotated for where it stands, and behind no run "
                "that is not exact"
            )
        is_lossy = is_lossy or not run.is_exact
        if run.is_exact and isinstance(run.source, GivenKV) and run.source.exactness is not Exactness.EXACT:
            raise InvalidRequest(f"runs[{index}] is exact, and its tensors hold a derived cache: leave out is_exact")
        if run.sender is not None:
            check_sender(spec, run.sender)
    if not 1 <= logit_count <= token_count - last:
        raise InvalidRequest(
            f"the runs end at {last} of {token_count} tokens, logits of {logit_count} are wanted: these are computed, "
            "so the last run must end before them"
        )
