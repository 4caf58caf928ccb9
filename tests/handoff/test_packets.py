"""The hand-off's packets are frozen, every field has a limit, and neither end says or hears anything beyond it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, InvalidRequest, Unavailable
from kvstore.handoff.messages import (
    Answer,
    DeviceAnswer,
    DeviceQuestion,
    Done,
    Hello,
    LookedUp,
    PresenceAnswer,
    PresenceQuestion,
    Question,
    Redeemed,
    Refusal,
    RegionsAnswer,
    RegionsQuestion,
    StagingAnswer,
    StagingClose,
    StagingQuestion,
    Welcome,
)
from kvstore.handoff.packets import (
    ANSWERS,
    PACKET_BYTES_MAX,
    PLACES,
    QUESTIONS,
    FieldPlace,
    NoPacket,
    decode_answer,
    decode_question,
    encode,
)
from tests.server.raw import Raw

SECRET = "0f" * 32
QUESTION_PACKETS: list[tuple[Question, str]] = [
    (Hello(1), '{"op": "hello", "version": 1}'),
    (Hello(1, is_operator=True), '{"op": "hello", "version": 1, "operator": true}'),
    (RegionsQuestion(3), '{"op": "regions", "have": 3}'),
    (RegionsQuestion(0), '{"op": "regions", "have": 0}'),
    (StagingQuestion(4096), '{"op": "staging", "bytes": 4096}'),
    (StagingClose(9), '{"op": "staging_close", "staging_id": 9}'),
    (PresenceQuestion(), '{"op": "presence"}'),
    (DeviceQuestion(), '{"op": "device"}'),
    (LookedUp(lookup_calls=2, fetch_calls=1), '{"op": "looked_up", "lookup_calls": 2, "fetch_calls": 1}'),
    (Redeemed("a9" * 16), '{"op": "redeemed", "ticket": "' + "a9" * 16 + '"}'),
]
WELCOME = Welcome(7, SECRET, 42, 4096, ((0, 8192), (1, 4096)), ("presence",))
ANSWER_PACKETS: list[tuple[Answer, str]] = [
    (
        WELCOME,
        '{"op": "welcome", "session": 7, "secret": "' + SECRET + '", "server_pid": 42, "generations_bytes": 4096, '
        '"regions": [[0, 8192], [1, 4096]], "offers": ["presence"]}',
    ),
    (RegionsAnswer(((3, 4096),)), '{"op": "regions", "regions": [[3, 4096]]}'),
    (RegionsAnswer(()), '{"op": "regions", "regions": []}'),
    (StagingAnswer(9, 4096), '{"op": "staging", "staging_id": 9, "bytes": 4096}'),
    (Done(), '{"op": "ok"}'),
    (
        PresenceAnswer(4096, 1000, 1024),
        '{"op": "presence", "bytes": 4096, "token_count_max": 1000, "tail_tokens_max": 1024}',
    ),
    (DeviceAnswer("cpu", 4096, 8192), '{"op": "device", "device": "cpu", "generations_bytes": 4096, "bytes": 8192}'),
    (Refusal.of(Exhausted("no")), '{"op": "error", "status": "RESOURCE_EXHAUSTED", "message": "no"}'),
]
NUMBERS = [
    (kind, place)
    for kind in QUESTIONS.values()
    for place in PLACES[kind]
    if kind not in (Hello, LookedUp, Redeemed)
]  # fmt: skip


@pytest.mark.parametrize(("question", "packet"), QUESTION_PACKETS)
def test_a_question_is_the_bytes_it_always_was(question: Question, packet: str) -> None:
    assert encode(question) == packet.encode()
    assert decode_question(packet.encode()) == question


@pytest.mark.parametrize(("answer", "packet"), ANSWER_PACKETS)
def test_an_answer_is_the_bytes_it_always_was(answer: Answer, packet: str) -> None:
    assert encode(answer) == packet.encode()
    assert decode_answer(packet.encode()) == answer


def test_every_message_is_among_these_and_every_field_has_a_limit() -> None:
    assert {type(each) for each, _ in QUESTION_PACKETS} == set(QUESTIONS.values())
    assert {type(each) for each, _ in ANSWER_PACKETS} == set(ANSWERS.values())
    assert all(place.shape.most > 0 for kind in PLACES for place in PLACES[kind])


def test_an_earlier_server_offers_nothing_and_knows_of_no_tails() -> None:
    earlier = dict(json.loads(encode(WELCOME)))
    del earlier["offers"]
    assert decode_answer(json.dumps(earlier).encode()) == replace(WELCOME, offers=())
    packet = b'{"op": "presence", "bytes": 4096, "token_count_max": 9}'
    assert decode_answer(packet) == PresenceAnswer(4096, 9, tail_tokens_max=0)


def test_who_does_not_say_that_it_is_an_operator_in_the_right_words_is_none() -> None:
    for said in ("", ', "operator": 1', ', "operator": "true"', ', "operator": null'):
        assert decode_question(b'{"op": "hello", "version": 1%b}' % said.encode()) == Hello(1, is_operator=False)


def test_what_a_later_release_says_besides_is_not_read() -> None:
    assert decode_question(b'{"op": "staging", "bytes": 4096, "huge": true}') == StagingQuestion(4096)
    assert decode_answer(b'{"op": "ok", "at": 1.5}') == Done()


@pytest.mark.parametrize(("kind", "place"), NUMBERS)
def test_a_number_beyond_its_limit_is_refused_by_name(kind: type[Question], place: FieldPlace) -> None:
    def said(value: object) -> bytes:
        return json.dumps({"op": kind.op, place.name: value}).encode()

    assert getattr(decode_question(said(place.shape.most)), place.field) == place.shape.most
    for wrong in (place.shape.most + 1, -1, True, 1.0, "1", None, [1], "x" * 60_000):
        with pytest.raises(InvalidRequest, match=place.name) as caught:
            decode_question(said(wrong))
        assert len(caught.value.message) < 200
        assert not isinstance(caught.value, NoPacket), "the session goes on"


@pytest.mark.parametrize("wrong", [0, None, ["a9" * 16], "a9" * 15, "A9" * 16, "a9" * 17, "zz" * 16, "x" * 60_000])
def test_what_is_no_ticket_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="ticket") as caught:
        decode_question(json.dumps({"op": "redeemed", "ticket": wrong}).encode())
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("wrong", [0, 2, "1", True, 1.0, None, [1], "x" * 60_000])
def test_another_version_is_refused_by_name(wrong: object) -> None:
    with pytest.raises(InvalidRequest, match="version 1") as caught:
        decode_question(json.dumps({"op": "hello", "version": wrong}).encode())
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("wrong", [-1, (1 << 32) + 1, True, 1.0, "1", None, [1]])
def test_what_cannot_be_counted_is_not(wrong: object) -> None:
    """Nobody would read the refusal."""
    packet = json.dumps({"op": "looked_up", "lookup_calls": wrong, "fetch_calls": 1 << 32, "sessions_opened": 1})
    assert decode_question(packet.encode()) == LookedUp(fetch_calls=1 << 32)


@pytest.mark.parametrize("name", ["op", "ops", "", "welcome", "x" * 60_000, ["hello"], None])
def test_an_operation_that_is_not_declared_is_refused(name: object) -> None:
    with pytest.raises(InvalidRequest, match="unknown") as caught:
        decode_question(json.dumps({"op": name}).encode())
    assert len(caught.value.message) < 200


@pytest.mark.parametrize("packet", [b"", b"[]", b'"hello"', b"1", b"null", b"\xff", b"{", b"[" * 60_000])
def test_a_packet_that_is_no_object_is_refused(packet: bytes) -> None:
    with pytest.raises(NoPacket, match="JSON objects"):
        decode_question(packet)
    with pytest.raises(Unavailable, match="no sidecar"):
        decode_answer(packet)


@pytest.mark.parametrize(
    "change",
    [
        {"session": -1}, {"secret": "0f"}, {"secret": "xy" * 32}, {"secret": None}, {"regions": [[0]]},
        {"regions": [[0, 4096]] * 65}, {"regions": [[0, True]]}, {"regions": None}, {"op": "hello"},
    ],
)  # fmt: skip
def test_an_answer_that_no_server_gives_is_none(change: dict[str, Any]) -> None:
    packet = {**json.loads(encode(WELCOME)), **change}
    with pytest.raises(Unavailable, match="another release"):
        decode_answer(json.dumps(packet).encode())


def test_a_refusal_is_cut_to_what_a_packet_may_say_and_is_the_error_again() -> None:
    refusal = Refusal.of(InvalidRequest("x" * 100_000))
    assert json.loads(encode(refusal)) == {"op": "error", "status": "INVALID_ARGUMENT", "message": "x" * 500}
    assert (type(refusal.error), refusal.error.message) == (InvalidRequest, "x" * 500)


def test_a_long_answer_is_never_sent() -> None:
    for answer in (Refusal("INTERNAL", "x" * 501), RegionsAnswer(((1, 2),) * 65), StagingAnswer(1, -1)):
        with pytest.raises(AssertionError):
            encode(answer)
    assert len(encode(RegionsAnswer((((1 << 62) - 1, (1 << 62) - 1),) * 64))) <= PACKET_BYTES_MAX


@pytest.fixture(scope="module")
def pooled() -> Iterator[Sidecar]:
    """A server with all that a session may ask for."""
    own = {"KVSTORE__TIERS__HBM__CAPACITY_BYTES": "1 MiB", "KVSTORE__TIERS__HBM__DEVICE": "cpu"}
    with Sidecar("--capacity", "4 MiB", environment={**os.environ, **own}) as running:
        yield running


def test_a_server_without_a_pool_offers_none_and_says_so(sidecar: Sidecar) -> None:
    with Raw(sidecar) as raw:
        assert "device" not in raw.welcome["offers"]
        said, _ = raw.exchange(op="device")
        assert said["status"] == "UNAVAILABLE"


def test_what_the_server_answers_is_what_is_declared(pooled: Sidecar) -> None:
    """Each operation, live: its answer has the declared fields and no other, and its descriptors."""
    asked: list[tuple[dict[str, Any], type[Answer]]] = [
        ({"op": "regions", "have": 0}, RegionsAnswer), ({"op": "staging", "bytes": 4096}, StagingAnswer),
        ({"op": "presence"}, PresenceAnswer), ({"op": "device"}, DeviceAnswer),
        ({"op": "staging_close", "staging_id": 1}, Done),
        ({"op": "staging_close", "staging_id": -1}, Refusal),
    ]  # fmt: skip
    with Raw(pooled) as raw:
        seen = [(Welcome, raw.welcome, len(raw.descriptors))]
        for request, kind in asked:
            if request["op"] == "staging_close" and kind is Done:
                request["staging_id"] = next(said["staging_id"] for each, said, _ in seen if each is StagingAnswer)
            said, descriptors = raw.exchange(**request)
            seen.append((kind, said, len(descriptors)))
            for descriptor in descriptors:
                os.close(descriptor)
    assert {kind for kind, _, _ in seen} == set(ANSWERS.values())
    for kind, said, descriptor_count in seen:
        answer = decode_answer(json.dumps(said).encode())
        assert type(answer) is kind
        assert json.loads(encode(answer)) == said
        assert answer.descriptor_count == descriptor_count
