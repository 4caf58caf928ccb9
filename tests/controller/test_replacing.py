"""Values that take the place of others: who reads, stores or replaces the same key meanwhile."""

from __future__ import annotations

from tests.tiers.values import ValueService


def test_a_reader_that_stands_still_keeps_no_value_for_ever() -> None:
    service = ValueService()

    async def scenario() -> None:
        await service.put(1)
        reader = service.controller.open_session()
        service.controller.fetch(reader, service.of_key("k"))
        await service.clock.sleep(service.parts.limits.lease_age_s_max + 1)
        await service.put(2)
        assert await service.get() == 2

    service.run(scenario)
