"""What leaves a shared tier, or is written anew there, while it is read: a miss, and no damage."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import DataLoss
from kvstore.spec import MissReason
from tests.tiers.shared.world import Wide, run


@pytest.mark.parametrize(
    ("reason", "miss"),
    [("absent", MissReason.EVICTED), ("replaced", MissReason.EVICTED), ("checksum", MissReason.CORRUPT)],
)
def test_an_object_that_goes_while_it_is_read_is_no_damage(tmp_path: Path, reason: str, miss: MissReason) -> None:
    wide = Wide(tmp_path)
    node, other = wide.node(redis="never"), wide.node(redis="never")

    async def scenario() -> None:
        await node.give(1)
        opened = other.shared[1].open

        async def lost(*_: Any) -> None:
            raise DataLoss("it went", reason=reason)

        async def opened_and_lost(name: Any, ahead: Sequence[Any] = ()) -> Any:
            stored = await opened(name, ahead)
            stored.read = lost
            return stored

        other.shared[1].open = opened_and_lost
        assert await other.fetch(1) == (0, miss)
        other.shared[1].open = opened
        assert await node.fetch(1) == (1, MissReason.NONE)

    run([node, other], scenario)
