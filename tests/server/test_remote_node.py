"""The remote plane remembers little of a tenant's sidecar."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.errors import UNREGISTERED, InvalidRequest
from kvstore.keys import fingerprint
from kvstore.remote import node as room
from kvstore.remote.node import Node
from kvstore.remote.session import SidecarSession
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_to_message
from tests.specs import small_spec


async def test_specs_are_bounded_and_who_asks_for_a_dropped_one_registers_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MODEL_COUNT_MAX", 2)
    node = Node("", tmp_path)
    specs = [small_spec(model_id=f"m{number}") for number in range(3)]
    names = [fingerprint(spec, spec.kind) for spec in specs]

    def note(number: int) -> None:
        request = pb.RegisterModelRequest(spec=spec_to_message(specs[number]))
        reply = pb.RegisterModelResponse(fingerprint=names[number])
        node.note_model(request.SerializeToString(), reply.SerializeToString())

    for number in (0, 1):
        note(number)
    assert node.spec_of(names[0]) == specs[0]
    note(2)
    with pytest.raises(InvalidRequest, match="call RegisterModel first") as caught:
        node.spec_of(names[1])
    assert caught.value.fields == {UNREGISTERED: names[1].hex()}
    note(1)
    assert [node.spec_of(names[number]) for number in (1, 2)] == [specs[1], specs[2]]
    await node.channel.close()


class Busy:
    """A sidecar that takes no more calls at once, for the first ``count`` ones."""

    def __init__(self, count: int) -> None:
        self._left = count
        self.released: list[int] = []

    def Release(self, request: pb.ReleaseRequest, **_: Any) -> Busy:
        self._left -= 1
        if self._left < 0:
            self.released += request.lease_ids
        return self

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK if self._left < 0 else grpc.StatusCode.RESOURCE_EXHAUSTED

    def add_done_callback(self, _: object) -> None:
        """Nobody is told."""


async def test_a_lease_comes_back_though_the_sidecar_takes_no_call_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "RETRY_S", 0.001)
    node = Node("", tmp_path)
    session, gone = (SidecarSession(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) for _ in range(2))
    node.cache = sidecar = Busy(3)
    node.give_back(session, 7)
    node.give_back(gone, 8)
    gone.close()
    async with asyncio.timeout(10.0):
        while node._releasing:
            await asyncio.wait(node._releasing)
    assert sidecar.released == [7], "what a session had goes with it"
    session.close()
    await node.channel.close()
