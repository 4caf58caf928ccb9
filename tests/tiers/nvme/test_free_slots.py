"""Writers that need room at the same time."""

from __future__ import annotations

import asyncio

from tests.contracts.chunks import SMALL, VALUE, chunk
from tests.contracts.local.stands import NvmeStand
from tests.scenario import scenario


@scenario(lambda: NvmeStand())
async def test_a_slot_that_one_writer_frees_is_not_taken_by_another(stand: NvmeStand) -> None:
    """Else the first is told that the tier is full, and there are chunks that could leave."""

    async def write(number: int) -> None:
        what = chunk(number, SMALL)
        stand.evictor.there.append(await stand.tier.write(what.header, what.layout, what.pieces))

    values = [chunk(number, VALUE) for number in (1, 2)]
    kept, replaced = [await stand.tier.write(each.header, each.layout, each.pieces) for each in values]
    number = 10
    while stand.tier.has_room(SMALL):
        await write(number)
        number += 1
    stand.evictor.there.append(kept)
    stand.evictor.held.add(kept)
    stand.tier.remove([replaced], erase=True)  # the first writer waits for this erasure
    await asyncio.gather(*(write(number + each) for each in range(3)))
    assert len(stand.evictor.gone) == 3
