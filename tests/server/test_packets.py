"""Every field of the hand-off's packets has a limit, and the server says and hears nothing beyond it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.server.packets import PACKET_BYTES_MAX, REPLIES, REQUESTS, decode, encode, number, operation_of, refusal
from tests.server.raw import Raw

ANSWERS = {
    "hello": "welcome",
    "regions": "regions",
    "staging": "staging",
    "staging_close": "ok",
    "presence": "presence",
}
FIELDS = [(kind, name, shape) for kind, shapes in REQUESTS.items() for name, shape in shapes.items()]


def test_every_field_of_every_packet_has_a_limit() -> None:
    for kind, shapes in {**REQUESTS, **REPLIES}.items():
        for name, shape in shapes.items():
            assert shape.most > 0, (kind, name)
    assert set(ANSWERS) | {"looked_up"} == set(REQUESTS)
    assert {*ANSWERS.values(), "error"} == set(REPLIES)


@pytest.mark.parametrize(("kind", "name", "shape"), FIELDS)
def test_a_number_beyond_its_limit_is_refused_by_name(kind: str, name: str, shape: Any) -> None:
    assert number({"op": kind, name: shape.most}, name) == shape.most
    for wrong in (shape.most + 1, -1, True, 1.0, "1", None, [1], "x" * 60_000):
        with pytest.raises(InvalidRequest, match=name) as caught:
            number({"op": kind, name: wrong}, name)
        assert len(caught.value.message) < 200


@pytest.mark.parametrize("name", ["op", "ops", "", "x" * 60_000, ["hello"], None])
def test_an_operation_that_is_not_declared_is_refused(name: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        operation_of(decode(json.dumps({"op": name}).encode()))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("packet", [b"", b"[]", b'"hello"', b"1", b"null", b"\xff", b"{", b"[" * 60_000])
def test_a_packet_that_is_no_object_is_refused(packet: bytes) -> None:
    with pytest.raises(InvalidRequest, match="JSON objects"):
        decode(packet)


def test_a_refusal_is_cut_to_what_a_packet_may_say() -> None:
    said = json.loads(encode(refusal(InvalidRequest("x" * 100_000))))
    assert said == {"op": "error", "status": "INVALID_ARGUMENT", "message": "x" * 500}


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_says_all_its_fields_and_no_other(kind: str) -> None:
    with pytest.raises(AssertionError):
        encode({"op": kind, "more": 1})


def test_a_long_reply_is_never_sent() -> None:
    with pytest.raises(AssertionError):
        encode({"op": "error", "status": "INTERNAL", "message": "x" * 501})
    with pytest.raises(AssertionError):
        encode({"op": "regions", "regions": [[1, 2]] * 65})


def test_what_the_server_answers_is_what_is_declared(sidecar: Sidecar) -> None:
    """Each operation, live: the fields of its answer are the declared ones, within their limits."""
    with Raw(sidecar) as raw:
        seen = {"hello": raw.welcome}
        asked: list[dict[str, Any]] = [
            {"op": "regions", "have": 0},
            {"op": "staging", "bytes": 4096},
            {"op": "presence"},
        ]
        for request in asked:
            seen[request["op"]], descriptors = raw.exchange(**request)
            for descriptor in descriptors:
                os.close(descriptor)
        closing = {"op": "staging_close", "staging_id": seen["staging"]["staging_id"]}
        seen["staging_close"] = raw.exchange(**closing)[0]
    assert set(seen) == set(ANSWERS)
    for kind, reply in seen.items():
        assert reply["op"] == ANSWERS[kind]
        assert len(encode(reply)) <= PACKET_BYTES_MAX
