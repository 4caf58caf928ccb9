"""E in the place of KV: projects K and V of a layer from its E when that has landed, while later layers' E comes.

Exact for the same model: to the bit where E is projected in the steps in which it was computed, else within the
rounding of other matmul shapes. Source: HCache (EuroSys '25).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from kvstore.errors import DataLoss, DeadlineExceeded, InvalidRequest
from kvstore.keys import Extra
from kvstore_client.caches import Caches
from kvstore_client.fetch.fetched import FetchedKV
from kvstore_client.prompt import GivenTokens
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.runner import ModelRunner, check_runner

_Pair = tuple[torch.Tensor, torch.Tensor]
_LOST = (DataLoss, DeadlineExceeded)


@runtime_checkable
class Projector(Protocol):
    """A runner that computes K and V without the rest of a layer."""

    def project_kv(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a layer from the rows that enter it, [rows, hidden_size], at their absolute positions: each
        [kv_heads, rows, dim], to the bit those of ``project`` for the same rows."""


def projector_of(runner: ModelRunner) -> Projector:
    """Return the runner as a Projector. Raises InvalidRequest for a runner that is none."""
    if not isinstance(runner, Projector):
        raise InvalidRequest(
            f"{type(runner).__name__} has no project_kv, and its spec keeps E in the place of KV (keeps_e): give the "
            "runner that method, or keep KV"
        )
    return runner


def project_into(
    runner: Projector, layer: int, hidden: torch.Tensor, into: _Pair, step_tokens: int, token_start: int = 0
) -> None:
    """Project K and V of consecutive tokens from ``token_start`` on, ``step_tokens`` at a time, into their planes.

    Shapes: ``hidden`` [tokens, hidden_size]; ``into`` (K, V), each [kv_heads, tokens, dim].
    """
    for start in range(0, hidden.shape[0], step_tokens):
        rows = slice(start, min(start + step_tokens, hidden.shape[0]))
        positions = torch.arange(token_start + rows.start, token_start + rows.stop, device=into[0].device)
        k, v = runner.project_kv(layer, hidden[rows].to(into[0].device), positions)
        into[0][:, rows], into[1][:, rows] = k, v


def fetch_projected(
    client: Caches, runner: ModelRunner, tokens: GivenTokens, step_tokens: int | None, extras: Sequence[Extra],
    verify: bool,
) -> FetchedKV:  # fmt: skip
    """See ``Client.fetch_projected``."""
    spec, projector = runner.spec, projector_of(runner)
    check_runner(runner)
    if not spec.keeps_e:
        raise InvalidRequest("fetch_projected is for specs that keep E (keeps_e=True): fetch gives KV that was kept")
    step = spec.chunk_tokens if step_tokens is None else step_tokens
    if step < 1:
        raise InvalidRequest(f"step_tokens {step} must be at least 1")
    stream = client.fetch_layers(spec, tokens, extras=extras, verify=verify)
    planes = dense_planes(spec, stream.token_count, runner.device)
    found = FetchedKV(planes[layer] for layer in spec.slab_layers)
    count, size, tier = stream.token_count, stream.byte_count, stream.tier
    try:
        for layer, hidden in stream:
            project_into(projector, layer, hidden, planes[layer], step)
    except _LOST:
        count = 0
    if not count:
        found = FetchedKV((k[:, :0], v[:, :0]) for k, v in found)
    found.token_count, found.reason, found.hidden = count, stream.reason, {}
    if count:
        found.byte_count, found.tier = size, tier
    return found
