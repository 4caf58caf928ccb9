"""The remote plane remembers little of a tenant's sidecar."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import UNREGISTERED, InvalidRequest
from kvstore.keys import fingerprint
from kvstore.remote import node as room
from kvstore.remote.node import Node
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
