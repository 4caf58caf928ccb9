"""The hand-off's loop is all tenants': of one tenant's peers, however many, one has a packet read at a time, and one is
accepted."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from kvstore.handoff.messages import LookedUp
from kvstore.handoff.passing import open_socket, send
from kvstore.seams import SystemClock
from kvstore.server.handoff import Handoff
from kvstore.server.outbox import Outbox
from tests.controller.service import Service

PEERS, PACKETS = 8, 20


def handoff_of(service: Service) -> Handoff:
    limits = service.parts.limits
    return Handoff(service.controller, SystemClock(), set(), outbox=Outbox(64), limits=limits, pool=lambda: None)


async def test_connections_that_never_cease_hold_up_nobody(tmp_path: Path) -> None:
    """One is accepted in a round of the loop: the loop ran nothing else while another one was there."""
    handoff, path = handoff_of(Service()), str(tmp_path / "data.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen(PEERS)
        listener.setblocking(False)
        peers = [open_socket() for _ in range(PEERS)]
        for peer in peers:
            peer.connect(path)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(handoff.serve(listener, group))
            most = seen = 0
            while seen < PEERS:
                await asyncio.sleep(0)  # a round of the loop
                now = handoff._connection_count
                most, seen = max(most, now - seen), now
            serving.cancel()
            for peer in peers:
                peer.close()
    assert most == 1


async def test_peers_that_always_have_another_packet_take_turns() -> None:
    """Sixty of one tenant kept calls of the others waiting for six seconds."""
    service = Service()
    controller, handoff = service.controller, handoff_of(service)
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(PEERS)]
    async with asyncio.TaskGroup() as group:
        for ours, theirs in pairs:
            ours.setblocking(False)
            for _ in range(PACKETS):
                send(theirs, LookedUp(fetch_calls=1))
            group.create_task(handoff._converse(ours, controller.open_session(is_operator=False)))
        most = seen = 0
        while seen < PEERS * PACKETS:
            await asyncio.sleep(0)  # a round of the loop
            now = controller.stats().counters["fetch_calls"]
            most, seen = max(most, now - seen), now
        for _, theirs in pairs:
            theirs.close()
    assert most == 1
    for ours, _ in pairs:
        ours.close()
