"""Operators' calls that are cut short: cancelled in each turn of the event loop, from their start to their end. They
end as cancelled, no chunk stays held, pins are of all chunks or of none, and the same change made again comes to its
end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvstore.v1alpha import admin_pb2
from tests.server.cut_short import KEPT, Bench, CutShort, Scenario, chain_of, cut_in_each_turn, fresh, named, sent

STALLED_S = 5.0
"""Seconds for which a tier answers nothing: longer than a change may be silent."""
MANY = 7
"""A change that takes hundreds of turns is cut in every so many of them only."""


async def in_memory(bench: Bench) -> None:
    await bench.reads(KEPT)


async def on_the_device(bench: Bench) -> None:
    await bench.on_the_device(KEPT)


async def beyond_the_node(bench: Bench) -> None:
    await bench.gone_from_node(KEPT)


async def pinned(bench: Bench) -> None:
    await bench.reads(KEPT)
    await bench.changed(pin=admin_pb2.Pin(), selection=named(KEPT))


def change(prepare: Callable[[Bench], Awaitable[None]], **wanted: Any) -> Scenario:
    """Return the scenario of a change, which begins where the chunks of KEPT are as ``prepare`` says."""

    async def changes(bench: Bench, cut: CutShort) -> None:
        await prepare(bench)
        seen: list[admin_pb2.ChangeResponse] = []
        await cut(sent(bench.call("Change", admin_pb2.ChangeRequest(**wanted)), seen))
        assert cut.was_cancelled or (seen[-1].is_last and not seen[-1].problem)
        if "pin" in wanted:
            assert len(bench.life.parts.pins) in (0, len(KEPT.digests)), "all are pinned, or none"
        again = await bench.changed(**wanted)
        assert again.done_count == again.total_count
        if "pin" in wanted:
            await bench.changed(unpin=admin_pb2.Unpin())
        if "drain" in wanted:
            drain = admin_pb2.Drain(end=True, service=wanted["drain"].service)
            await bench.changed(**{**wanted, "drain": drain})

    return changes


CHANGES = {
    "evict": change(in_memory, evict=admin_pb2.Evict(), selection=named(KEPT)),
    "pin": change(in_memory, pin=admin_pb2.Pin(), selection=named(KEPT)),
    "unpin": change(pinned, unpin=admin_pb2.Unpin()),
    "move to the device": change(in_memory, move=admin_pb2.Move(tier="nvme"), selection=named(KEPT)),
    "move to memory": change(on_the_device, move=admin_pb2.Move(tier="memory"), selection=named(KEPT)),
    "move to objects": change(in_memory, move=admin_pb2.Move(tier="s3"), selection=named(KEPT)),
    "verify": change(in_memory, verify=admin_pb2.Verify(), selection=named(KEPT)),
    "prefetch": change(beyond_the_node, prefetch=admin_pb2.Prefetch(query=chain_of(KEPT))),
    "drain a tier": change(in_memory, drain=admin_pb2.Drain(), selection=admin_pb2.Selection(tier="nvme")),
    "drain the service": change(in_memory, drain=admin_pb2.Drain(service=True)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change(name: str) -> None:
    cut_in_each_turn(CHANGES[name], step=MANY if name == "verify" else 1)


async def move_to_a_tier_that_stalls(bench: Bench, cut: CutShort) -> None:
    chain = fresh(cut)
    await bench.put(chain)
    bench.cloud.objects.weather = "stalled"
    asyncio.get_running_loop().call_later(STALLED_S, bench.cloud.calm)
    seen: list[admin_pb2.ChangeResponse] = []
    request = admin_pb2.ChangeRequest(move=admin_pb2.Move(tier="s3"), selection=named(chain))
    await cut(sent(bench.call("Change", request), seen))
    await asyncio.sleep(6 * STALLED_S)
    await bench.reads(chain)


async def verify_tiers_that_stall(bench: Bench, cut: CutShort) -> None:
    bench.life.readers.stall_s = STALLED_S
    seen: list[admin_pb2.ChangeResponse] = []
    request = admin_pb2.ChangeRequest(verify=admin_pb2.Verify(), selection=named(KEPT))
    await cut(sent(bench.call("Change", request), seen))
    bench.life.readers.stall_s = 0.0
    await asyncio.sleep(6 * STALLED_S)


@pytest.mark.parametrize("scenario", [move_to_a_tier_that_stalls, verify_tiers_that_stall])
def test_a_change_that_waits_long(scenario: Scenario) -> None:
    """It reports meanwhile."""
    cut_in_each_turn(scenario, step=MANY)


async def list_chunks(bench: Bench, cut: CutShort) -> None:
    await cut(sent(bench.call("ListChunks", admin_pb2.ListChunksRequest(limit=100)), []))


async def show_chunk(bench: Bench, cut: CutShort) -> None:
    await bench.on_the_device(KEPT)
    reply = await cut(bench.call("ShowChunk", admin_pb2.ShowChunkRequest(digest=KEPT.digests[1].hex()[:16])))
    assert reply is None or len(reply.parts) == 1


@pytest.mark.parametrize("scenario", [list_chunks, show_chunk])
def test_a_look(scenario: Scenario) -> None:
    cut_in_each_turn(scenario)
