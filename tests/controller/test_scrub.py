"""What the scrub does with bytes that went bad in memory."""

from __future__ import annotations

import pytest

from kvstore.spec import MissReason
from tests.controller.service import Service


@pytest.mark.parametrize("piece", [0, 1, 2])
async def test_rot_in_memory_is_found_and_goes(piece: int) -> None:
    """A flipped bit in a header or a slab: until then nobody asked for it, afterwards nobody gets it."""
    service = Service()
    session = service.controller.open_session()
    await service.store(session, 1, 2)
    memory, checks = service.controller.parts.movement.memory, service.controller.parts.movement.checks
    first, second = sorted(memory.rows())
    assert await checks.check(memory, first)
    memory.placement(second).pieces[piece][7] ^= 16
    assert not await checks.check(memory, second)
    result = service.controller.fetch(session, service.query(1, 2))
    assert (result.hit_count, result.reason) == (1, MissReason.CORRUPT)
    service.controller.release(session, [result.lease_id])
    await service.store(session, 1, 2)
    assert service.controller.fetch(session, service.query(1, 2)).hit_count == 2
