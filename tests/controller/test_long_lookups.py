"""Lookups of long chains: they are walked in steps, and what leaves between two of them is a miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from kvstore.catalog import ROOT_ROW
from kvstore.controller.fetches import lookup as lookups
from kvstore.seams import Pauses
from kvstore.spec import ChunkState, MissReason
from tests.controller.service import Service

PATH = (1, 2, 3, 4, 5)
STEP = 2


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    """All chunks of PATH but the last are stored."""
    monkeypatch.setattr(lookups, "STEP_CHUNKS", STEP)
    found = Service()
    await found.store(found.controller.open_session(), *PATH[:-1])
    return found


def after(monkeypatch: pytest.MonkeyPatch, step: int, happens: Callable[[], object]) -> None:
    """Have something happen in the pause after so many steps."""
    count = 0

    async def between(_: Pauses) -> None:
        nonlocal count
        count += 1
        if count == step:
            happens()

    monkeypatch.setattr(Pauses, "between", between)


def leave(service: Service, *numbers: int) -> Callable[[], None]:
    """The chunks at these numbers of PATH, the last first, leave the node."""

    def happens() -> None:
        movement, space = service.parts.movement, service.parts.catalog.spaces.numbered[0]
        for number in numbers:
            movement.removal.remove(space.index[service.query(*PATH).digests[number]], MissReason.EVICTED)

    return happens


async def test_a_long_chain_is_walked_once(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """All hits were walked again at the end, in one step: of 131,072 chunks that took 15 ms more."""
    walk, walked = service.parts.catalog.walk, list[int]()
    monkeypatch.setattr(
        service.parts.catalog, "walk", lambda spaces, digests: walked.append(len(digests)) or walk(spaces, digests)
    )
    found = await service.controller.lookup_wide(service.query(*PATH), 1)
    assert walked == [2, 2, 1]
    monkeypatch.undo()
    assert found._replace(ticket=b"") == service.controller.lookups.lookup(service.query(*PATH), 1)._replace(ticket=b"")
    counters = service.parts.counters.snapshot()
    assert (counters["lookup_hit_chunks"], counters["lookup_miss_chunks"]) == (8, 2)


@pytest.mark.parametrize(("step", "gone"), [(1, (3, 2)), (1, (3, 2, 1)), (2, (3,)), (3, (3, 2, 1, 0))])
async def test_what_leaves_between_two_steps_is_a_miss_and_no_ticket_holds_it(
    service: Service, monkeypatch: pytest.MonkeyPatch, step: int, gone: Iterable[int]
) -> None:
    after(monkeypatch, step, leave(service, *gone))
    left = min(gone)
    found = await service.controller.lookup_wide(service.query(*PATH), 1)
    assert found.hit_count == left
    assert [run.state for run in found.runs for _ in range(run.chunk_count)] == (
        [ChunkState.HIT] * left + [ChunkState.MISS] * (len(PATH) - left)
    )
    monkeypatch.undo()
    ticket = service.controller.tickets.find(found.ticket)
    assert (ticket is None) == (not left)
    if ticket is not None:
        assert ticket.query.digests == service.query(*PATH).digests[:left]
        session = service.controller.open_session()
        assert (await service.controller.redeem(session, found.ticket)).hit_count == left


async def test_a_row_that_another_chunk_has_by_then_is_not_held(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk of the prefix leaves after its step, and another chunk is given its row."""
    catalog, other = service.parts.catalog, service.query(9).digests[0]
    row, taken = catalog.spaces.numbered[0].index[service.query(*PATH).digests[3]], list[int]()

    def happens() -> None:
        leave(service, 3)()
        taken.append(catalog.table.add(0, other, ROOT_ROW, 16))

    after(monkeypatch, 2, happens)
    found = await service.controller.lookup_wide(service.query(*PATH), 1)
    ticket = service.controller.tickets.find(found.ticket)
    assert ticket is not None
    assert taken == [row]
    assert row not in ticket.rows
    assert len(ticket.rows) == found.hit_count == 3
