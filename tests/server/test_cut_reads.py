"""Calls of readers that are cut short: cancelled in each turn of the event loop, from their start to their end. They
end as cancelled, and leave no lease and no ticket that their client could not give back; then the same call works."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha import prefill_pb2
from tests.server.cut_short import KEPT, Bench, CutShort, Scenario, chain_of, cut_in_each_turn, fresh, sent

LATE_S = 0.5
STALLED_S = 2.5
"""Seconds until a tier answers: longer than lookups wait, and than fetches do."""


async def fetches(bench: Bench, cut: CutShort, request: pb.FetchRequest) -> None:
    """Fetch, and give back the one lease that the client may know."""
    seen: list[pb.FetchResponse] = []
    await cut(sent(bench.call("Fetch", request), seen))
    await asyncio.sleep(0.001)  # a handler that is dropped while its reply is sent ends in a task of its own
    leases = bench.life.parts.leases.of(bench.session)
    assert leases in ([], [each.lease_id for each in seen[:1]]), "a lease that its client does not know"
    bench.controller.release(bench.session, leases)


async def fetch_from_memory(bench: Bench, cut: CutShort) -> None:
    await fetches(bench, cut, pb.FetchRequest(query=chain_of(KEPT)))


async def fetch_from_the_device(bench: Bench, cut: CutShort) -> None:
    await bench.on_the_device(KEPT)
    await fetches(bench, cut, pb.FetchRequest(query=chain_of(KEPT)))


async def fetch_from_shared_tiers(bench: Bench, cut: CutShort) -> None:
    await bench.gone_from_node(KEPT)
    await fetches(bench, cut, pb.FetchRequest(query=chain_of(KEPT)))


async def fetch_beside_another(bench: Bench, cut: CutShort) -> None:
    """The other client gets all."""
    await bench.gone_from_node(KEPT)
    other = asyncio.ensure_future(bench.reads(KEPT))
    seen: list[pb.FetchResponse] = []
    await cut(sent(bench.call("Fetch", pb.FetchRequest(query=chain_of(KEPT))), seen))
    await other
    await asyncio.sleep(0.001)
    bench.controller.release(bench.session, [each.lease_id for each in seen[:1]])


async def fetch_from_tiers_that_stall(bench: Bench, cut: CutShort) -> None:
    await bench.gone_from_node(KEPT)
    stall(bench, STALLED_S)
    await fetches(bench, cut, pb.FetchRequest(query=chain_of(KEPT)))
    await asyncio.sleep(2 * STALLED_S)


async def fetch_by_ticket(bench: Bench, cut: CutShort) -> None:
    await bench.on_the_device(KEPT)
    held = await bench.call("Lookup", pb.LookupRequest(query=chain_of(KEPT), hold=True, readers=2))
    request = pb.FetchRequest(ticket=held.ticket)
    await fetches(bench, cut, request)
    seen: list[pb.FetchResponse] = []
    await sent(bench.call("Fetch", request), seen)
    assert seen[0].hit_count == len(KEPT.digests)
    bench.controller.release(bench.session, [seen[0].lease_id])
    bench.controller.release_ticket(held.ticket)


async def fetch_of_a_store_in_flight(bench: Bench, cut: CutShort) -> None:
    chain = fresh(cut)
    reserved = await bench.reserve(chain)
    step = pb.Commit(reservation_id=reserved.reservation_id, fills=bench.staged(chain, reserved))
    other = asyncio.ensure_future(bench.store(commit=step))
    await fetches(bench, cut, pb.FetchRequest(ticket=reserved.ticket))
    assert (await other).committed_count == len(chain.digests)
    bench.free_staging()
    await bench.reads(chain)


async def lookup(bench: Bench, cut: CutShort) -> None:
    await bench.gone_from_node(KEPT)
    await looks_up(bench, cut)


async def lookup_of_what_is_here(bench: Bench, cut: CutShort) -> None:
    await looks_up(bench, cut)


async def lookup_in_a_tier_that_is_late(bench: Bench, cut: CutShort) -> None:
    await bench.gone_from_node(KEPT)
    stall(bench, LATE_S)
    await looks_up(bench, cut, 0)
    await asyncio.sleep(2 * LATE_S)


async def looks_up(bench: Bench, cut: CutShort, least: int = len(KEPT.digests)) -> None:
    request = pb.LookupRequest(
        query=chain_of(KEPT), hold=True, segments=[chain_of(fresh(cut))], tail_digests=bytes(range(64)),
        with_places=True,
    )  # fmt: skip
    reply = await cut(bench.call("Lookup", request))
    if reply is not None:
        assert reply.hit_count >= least
        bench.controller.release_ticket(reply.ticket)
    assert not len(bench.controller.tickets), "a ticket that its client does not know"


async def locate(bench: Bench, cut: CutShort) -> None:
    await cut(bench.call("Locate", pb.LocateRequest(queries=[chain_of(KEPT), chain_of(fresh(cut))])))


async def release(bench: Bench, cut: CutShort) -> None:
    await bench.reads(KEPT)
    held = await bench.call("Lookup", pb.LookupRequest(query=chain_of(KEPT), hold=True))
    leases = [bench.controller.fetches.fetch(bench.session, KEPT.query()).lease_id for _ in range(3)]
    request = pb.ReleaseRequest(lease_ids=leases, tickets=[held.ticket])
    await cut(bench.call("Release", request))
    await bench.call("Release", request)


async def partial_prefill(bench: Bench, cut: CutShort) -> None:
    begin = prefill_pb2.BeginPrefill(query=chain_of(KEPT), token_count=64, with_places=True)

    async def requests() -> AsyncIterator[Any]:
        yield prefill_pb2.PartialPrefillRequest(begin=begin)
        await asyncio.sleep(0.01)
        yield prefill_pb2.PartialPrefillRequest(end=prefill_pb2.EndPrefill(ttft_seconds=1.0))

    await bench.gone_from_node(KEPT)
    seen: list[prefill_pb2.PartialPrefillResponse] = []
    await cut(sent(bench.call("PartialPrefill", requests()), seen))
    assert cut.was_cancelled or seen[0].found.hit_count == len(KEPT.digests)


def stall(bench: Bench, seconds: float) -> None:
    """Have shared tiers answer nothing for so long."""
    bench.cloud.engine.weather = bench.cloud.objects.weather = "stalled"
    asyncio.get_running_loop().call_later(seconds, bench.cloud.calm)


@pytest.mark.parametrize(
    "scenario",
    [
        fetch_from_memory, fetch_from_the_device, fetch_from_shared_tiers, fetch_beside_another,
        fetch_from_tiers_that_stall, fetch_by_ticket, fetch_of_a_store_in_flight, lookup, lookup_of_what_is_here,
        lookup_in_a_tier_that_is_late, locate, release, partial_prefill,
    ],
)  # fmt: skip
def test_a_call_of_a_reader(scenario: Scenario) -> None:
    cut_in_each_turn(scenario)


def test_a_watch() -> None:
    """It has no end of its own: its caller goes while others store."""

    async def watch(bench: Bench, cut: CutShort) -> None:
        watching = bench.call("Watch", pb.WatchRequest())

        async def for_a_while() -> None:
            async with asyncio.timeout(0.05):
                await sent(watching, [])

        async def watched() -> None:
            try:
                await for_a_while()
            except TimeoutError:
                return

        storing = asyncio.ensure_future(bench.put(fresh(cut)))
        await cut(watched())
        await storing

    cut_in_each_turn(watch)
