"""Prompts that only a tier has which can be stopped, and what a client knows of it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import CachedModel

from kvstore.planning.loading import TierFacts, TierRate
from kvstore.spec import Durability
from tests.e2e.third_tier import KIND, ThirdTierSidecar
from tests.engines.test_planned_loads import COUNT
from tests.engines.test_transformers import STEP, logits, prompt
from tests.server.raw import eventually

Cold = tuple[torch.Tensor, torch.Tensor]
"""A prompt, and its logits."""


def patient_sidecar() -> ThirdTierSidecar:
    """Whose deadline is beyond what a client waits for."""
    running = ThirdTierSidecar("files")
    assert running.environment is not None
    running.environment["KVSTORE__CONTROLLER__DEADLINE_S"] = "30"
    return running


def cold_prompts(sidecar: ThirdTierSidecar, model: torch.nn.Module, seeds: Iterable[int]) -> list[Cold]:
    """Prompts that only the files have."""
    found = []
    with connect(sidecar.address) as writer:
        cached = CachedModel(model, writer, chunk_tokens=STEP)
        for seed in seeds:
            ids = prompt(COUNT, seed)
            expected, report = logits(cached, ids)
            assert report.wait_stored(10.0) is Durability.LOCAL
            found.append((ids, expected))
    sidecar.stop()
    sidecar.start()
    return found


def is_tier(client: Client) -> None:
    """The sidecar has told that its files are fast."""
    client.planner._tiers = {KIND: TierFacts(TierRate(0.0, 1e-12, 1.0, 9))}
    client.planner._asked_s = client.planner.clock.monotonic() + 3600.0


def is_free(client: Client) -> None:
    """No lease, ticket or stream is left."""

    def held() -> int:
        sessions = client.stats().sessions
        return sessions.lease_count + sessions.ticket_count + sessions.stream_count

    eventually(lambda: not held())
