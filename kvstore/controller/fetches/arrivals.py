"""Reports of a fetch's slabs, as they land in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvstore.controller.values import Arrival, FetchResult
from kvstore.seams import Deadline
from kvstore.spec import MissReason


async def arrivals_of(result: FetchResult, deadline: Deadline) -> AsyncIterator[list[Arrival]]:
    """Give the arrivals of a fetch's chunks, in batches, until each chunk has landed or was lost. A chunk that has not
    landed at the deadline counts as lost for this fetch."""
    waiting = {position: chunk.loading for position, chunk in enumerate(result.chunks) if chunk.loading}
    told = {position: (0, loading.is_provisional) for position, loading in waiting.items()}
    event = asyncio.Event()
    for loading in waiting.values():
        loading.listeners[event] = None
    try:
        while waiting:
            event.clear()
            news = [
                Arrival(position, loading.landed, loading.slab_count, loading.lost, loading.is_provisional)
                for position, loading in waiting.items()
                if (loading.landed, loading.is_provisional) != told[position] or loading.lost
            ]
            for each in news:
                told[each.position] = each.landed, each.is_provisional
                if each.lost or waiting[each.position].has_landed:
                    waiting.pop(each.position).listeners.pop(event, None)
            if news:
                yield news
            elif waiting:
                async with asyncio.timeout(deadline.left_s):  # not around a yield: it would cancel the listener
                    await event.wait()
    except TimeoutError:
        yield [
            Arrival(position, told[position][0], loading.slab_count, MissReason.UNAVAILABLE)
            for position, loading in waiting.items()
        ]
    finally:
        for loading in waiting.values():
            loading.listeners.pop(event, None)
