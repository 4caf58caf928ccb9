"""Canaries in a bucket: one that came through though its answer was lost is no damage when it is met again."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.catalog import Catalog
from kvstore.config import PolicySettings
from kvstore.errors import Unavailable
from kvstore.movement.canary import Canaries
from kvstore.movement.shared import SharedCopies
from kvstore.seams import SystemClock, SystemMemory, SystemRandom
from kvstore.telemetry import Counters
from kvstore.tiers import SharedUse, WritePolicy
from tests.contracts.shared.s3_stand import S3Stand
from tests.scenario import scenario


@scenario()
async def test_a_canary_whose_answer_was_lost_is_met_again_and_goes(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog, counters = Catalog(1, SystemMemory(), 1), Counters()
    use = SharedUse(tier=stand.tier, lookup_s_max=20.0, write=WritePolicy.BACK)
    shared = SharedCopies(use, catalog, SystemClock(), counters, 0)
    counters.add_tier(shared.tier.name, is_shared=True)
    canaries = Canaries(catalog.table, [shared], SystemClock(), SystemRandom(), counters, PolicySettings())
    write = stand.tier.write

    async def taken(*arguments: Any) -> None:
        await write(*arguments)
        raise Unavailable("no answer came")

    async def away(*_: Any) -> None:
        raise Unavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(stand.tier, "write", taken)
        patch.setattr(stand.tier, "remove", away)
        assert await canaries.shared_canary(shared) is False
    for _ in range(2):
        assert await canaries.shared_canary(shared)
