"""Values that take the place of others: who reads, stores or replaces the same key meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from kvstore_client.opaque.value import Key

from kvstore.controller import ChainQuery, ReserveRequest
from kvstore.errors import Unavailable
from kvstore.spec import StoreState
from tests.scenario import scenario
from tests.tiers.values import ValueService


@scenario(lambda: ValueService())
async def test_a_reader_that_stands_still_keeps_no_value_for_ever(service: ValueService) -> None:
    await service.put(1)
    reader = service.controller.open_session()
    service.controller.fetches.fetch(reader, service.of_key("k"))
    await service.clock.sleep(service.parts.limits.lease_age_s_max + 1)
    await service.put(2)
    assert await service.get() == 2


@scenario(lambda: ValueService(arena_chunks=24))
async def test_of_two_values_that_wait_for_room_under_the_names_of_one_key_one_is_taken(
    service: ValueService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value of one chunk and one of several have different names. Memory is full of chunks that wait for the
    device."""
    monkeypatch.setattr(service.nvme._writers._chance, "uniform", lambda *_: 1000.0)  # type: ignore[attr-defined]  # the tier's own
    for number in range(24):
        await service.put(number, str(number), is_settled=False)
    key = Key.of("k")

    async def reserve(name: bytes) -> StoreState | Unavailable:
        query = ChainQuery(service.model, [name])
        request = ReserveRequest(query, [name], replaces=[key.whole, key.first])
        try:
            return (await service.controller.reserve(service.session, request)).states[0]
        except Unavailable as error:
            return error

    assert service.parts.movement.is_making_room
    one, other = await asyncio.gather(reserve(key.whole), reserve(key.first))
    assert one is StoreState.WANTED
    assert isinstance(other, Unavailable)
