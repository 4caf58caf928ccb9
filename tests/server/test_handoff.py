"""The hand-off door: versions, descriptors, staging budget, and peers that misbehave."""

from __future__ import annotations

import json
import mmap
import os
import resource
import select
import threading
import time
from contextlib import suppress

import pytest
from kvstore_ops.sidecar import Sidecar

from kvstore.config import OPERATOR_SESSION_COUNT
from kvstore.server.descriptors import HELLO_COUNT_MAX
from kvstore.telemetry.logs import MINUTE_LINES_MAX
from tests.server.raw import TIMEOUT_S, Handoff, Raw, eventually

MIB = 1 << 20


@pytest.mark.parametrize("version", [0, 2, "1", True, 1.0, None, 1e308, [1], "x" * 40_000])
def test_another_version_is_refused_in_words(sidecar: Sidecar, version: object) -> None:
    with Handoff(sidecar.directory) as door:
        reply, descriptors = door.exchange(op="hello", version=version)
        assert (reply["op"], reply["status"], descriptors) == ("error", "INVALID_ARGUMENT", [])
        assert "version 1" in reply["message"]
        assert len(reply["message"]) < 1000
        with pytest.raises(ConnectionError):
            door.receive()


def test_the_welcome_hands_out_every_region(sidecar: Sidecar) -> None:
    with Raw(sidecar) as raw:
        assert raw.welcome["server_pid"] == sidecar.pid
        assert len(raw.secret) == 32
        sizes = [raw.welcome["generations_bytes"], *(size for _, size in raw.welcome["regions"])]
        assert [os.fstat(descriptor).st_size for descriptor in raw.descriptors] == sizes
        for descriptor, size in zip(raw.descriptors, sizes, strict=True):
            mmap.mmap(descriptor, size, prot=mmap.PROT_READ).close()


def test_regions_are_asked_for_from_where_one_is(sidecar: Sidecar) -> None:
    with Raw(sidecar) as raw:
        reply, descriptors = raw.exchange(op="regions", have=0)
        assert reply["regions"] == raw.welcome["regions"]
        assert len(descriptors) == len(reply["regions"])
        reply, none = raw.exchange(op="regions", have=len(descriptors))
        assert (reply["regions"], none) == ([], [])
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "staging"}, {"op": "staging", "bytes": -4096}, {"op": "staging", "bytes": 0},
        {"op": "staging", "bytes": 4097}, {"op": "staging", "bytes": "4096"}, {"op": "staging", "bytes": True},
        {"op": "staging", "bytes": 1 << 63}, {"op": "regions", "have": -1}, {"op": "regions", "have": 1.5},
        {"op": "regions"}, {"op": "staging_close", "staging_id": None}, {"op": "hello", "version": 1}, {"op": ["x"]},
        {"op": "x" * 60_000}, {}, {"op": "presence "},
    ],
)  # fmt: skip
def test_a_wrong_request_is_answered_and_the_session_goes_on(sidecar: Sidecar, request_: dict[str, object]) -> None:
    with Raw(sidecar) as raw:
        reply, descriptors = raw.exchange(**request_)
        assert (reply["op"], reply["status"], descriptors) == ("error", "INVALID_ARGUMENT", [])
        assert raw.stats().sessions.staging_bytes == 0


@pytest.mark.parametrize("number", [-1, 0, 1 << 62, True, 1.0, "1", None, [1]])
def test_what_is_counted_is_never_answered(sidecar: Sidecar, number: object) -> None:
    """An answer would be taken for the next question's."""
    with Raw(sidecar) as raw:
        before = dict(raw.stats().counters)
        for name in ("lookup_calls", "sessions_opened", "nothing"):
            raw.send(json.dumps({"op": "looked_up", name: number}).encode())
        raw.send(b'{"op": "looked_up", "lookup_calls": 2}')
        assert raw.exchange(op="regions", have=1 << 20)[0] == {"op": "regions", "regions": []}
        after = dict(raw.stats().counters)
        assert after["lookup_calls"] - before["lookup_calls"] == 2
        assert after["sessions_opened"] == before["sessions_opened"]


def test_a_peer_that_never_stops_holds_up_nobody(sidecar: Sidecar) -> None:
    with Raw(sidecar) as loud, Raw(sidecar) as other:
        loud.socket.settimeout(0.0)
        ended = threading.Event()

        def flood() -> None:
            while not ended.is_set():
                with suppress(BlockingIOError):
                    loud.send(b'{"op": "looked_up"}')

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            turns = 0
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                other.stats()
                turns += 1
        finally:
            ended.set()
            flooding.join()
        assert turns > 5


def test_staging_past_the_limit_names_the_setting() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__STAGING_BYTES_MAX": "2 MiB"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as own, Raw(own) as raw:
        staging_id, memory = raw.staging(2 * MIB)
        reply, _ = raw.exchange(op="staging", bytes=4096)
        assert (reply["status"], "limits.staging_bytes_max" in reply["message"]) == ("RESOURCE_EXHAUSTED", True)
        memory.close()
        assert raw.exchange(op="staging_close", staging_id=staging_id)[0] == {"op": "ok"}
        raw.staging(2 * MIB)[1].close()


def test_sessions_past_the_limit_are_refused_until_one_ends() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__SESSION_COUNT_MAX": "2"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as own:
        first, second = Raw(own), Raw(own)
        with Handoff(own.directory) as third:
            reply, _ = third.exchange(op="hello", version=1)
            assert (reply["status"], "limits.session_count_max" in reply["message"]) == ("RESOURCE_EXHAUSTED", True)
        second.close()
        eventually(lambda: first.stats().sessions.session_count == 1)
        Raw(own).close()
        first.close()


def test_a_flood_of_silent_connections_does_not_end_the_service() -> None:
    """More connections than the server may have descriptors."""
    environment = {**os.environ, "KVSTORE__LIMITS__SESSION_COUNT_MAX": "4"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as own:
        count = len(os.listdir(f"/proc/{own.pid}/fd"))
        resource.prlimit(own.pid, resource.RLIMIT_NOFILE, (count + 10, count + 10))
        flood = [Handoff(own.directory) for _ in range(30)]
        try:
            eventually(lambda: "cannot accept" in (own.directory / "log").read_text())
        finally:
            for each in flood:
                each.close()
        with Raw(own) as raw:
            assert raw.stats().sessions.session_count == 1


def test_connections_past_the_limit_are_refused_until_one_goes() -> None:
    environment = {**os.environ, "KVSTORE__LIMITS__SESSION_COUNT_MAX": "4"}
    with Sidecar("--capacity", "16 MiB", environment=environment) as own, Raw(own) as session:
        silent = [Handoff(own.directory) for _ in range(4 + OPERATOR_SESSION_COUNT + HELLO_COUNT_MAX)]
        reply, _ = silent[-1].receive()
        assert (reply["status"], "limits.session_count_max" in reply["message"]) == ("RESOURCE_EXHAUSTED", True)
        assert session.stats().sessions.session_count == 1
        for each in silent:
            each.close()
        eventually(lambda: is_open(own))


def is_open(own: Sidecar) -> bool:
    """Return True when a session is to be had."""
    with Handoff(own.directory) as door:
        return bool(door.exchange(op="hello", version=1)[0]["op"] == "welcome")


def test_refusals_without_end_fill_no_disk(sidecar: Sidecar) -> None:
    """All tenants' logs are on it."""
    for number in range(3 * MINUTE_LINES_MAX):
        with Handoff(sidecar.directory) as door:
            if number % 2:
                door.exchange(op="nonsense of a flood")
    log = (sidecar.directory / "log").read_text()
    assert 0 < log.count("nonsense of a flood") + log.count("closed before its hello") <= 2 * MINUTE_LINES_MAX


def test_a_connection_without_hello_is_let_go(sidecar: Sidecar) -> None:
    with Handoff(sidecar.directory) as door:
        reply, _ = door.receive()
        assert (reply["status"], "no hello" in reply["message"]) == ("DEADLINE_EXCEEDED", True)


def babble(door: Handoff) -> None:
    for _ in range(100_000):
        door.send(b'{"op": "nonsense"}')


def test_a_client_is_sent_a_few_answers_ahead_of_what_it_reads(own_sidecar: Sidecar) -> None:
    """Small ones, too, of which the kernel would keep hundreds."""
    with Raw(own_sidecar) as hasty:
        with suppress(ConnectionError):  # on a slow machine it is let go before it has sent them all
            for _ in range(64):
                hasty.send(b'{"op": "staging_close", "staging_id": 1}')
        ended = select.poll()
        ended.register(hasty.socket, select.POLLRDHUP)  # the end, and no answer: none is read before
        assert ended.poll(TIMEOUT_S * 1000)
        answers = 0
        with suppress(ConnectionError):
            while hasty.receive()[0]:
                answers += 1
        assert answers <= 16  # perhaps none: who is let go with questions unread may be told of the end alone


def test_a_client_that_does_not_read_is_disconnected(own_sidecar: Sidecar) -> None:
    with Raw(own_sidecar) as witness:
        deaf = Raw(own_sidecar)
        with pytest.raises(ConnectionError):
            babble(deaf)
        eventually(lambda: witness.stats().sessions.session_count == 1)
        deaf.close()
