"""Watching a real sidecar: what other clients do is told, in order; who reads slowly is told what it lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from itertools import islice
from typing import Any, cast

import pytest
from kvstore_client import ChunkEvent, Client, EventKind, Tier, connect
from kvstore_client.lookup.feed import Feed
from kvstore_client.planes.incoming import Incoming
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Exhausted, PermissionDenied, Unavailable
from kvstore.keys import ROOT_DIGEST, chain_digests, fingerprint
from kvstore.spec import Durability, MissReason
from tests.conftest import ROOT, WARM
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()


def store(client: Client, count: int, seed: int, spec: Any = SPEC) -> list[bytes]:
    tokens = tokens_of(count, seed)
    assert client.store(spec, tokens, random_cache(spec, count, seed)).wait(20) is not Durability.NONE
    return chain_digests(tokens, spec.chunk_tokens)


def take(events: Any, count: int) -> list[ChunkEvent]:
    """The next events, or a failure of this test when they do not come."""
    timer = threading.Timer(20.0, events.close)
    timer.start()
    try:
        found = list(islice(events, count))
    finally:
        timer.cancel()
    assert len(found) == count
    return found


def test_stores_of_another_client_are_told_in_order(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as writer, connect(sidecar.address) as reader:
        store(writer, 16, 1)
        with reader.watch() as events:
            digests = store(writer, 40, 2)
            found = take(events, 3)
            assert [each.kind for each in found] == [EventKind.STORED] * 3
            assert [each.digest for each in found] == digests
            assert [each.parent for each in found] == [ROOT_DIGEST, *digests[:-1]]
            assert [each.token_count for each in found] == [16, 16, 8]
            assert [each.sequence for each in found] == [events.sequence + number for number in (1, 2, 3)]
            assert {each.tier for each in found} == {Tier.DRAM}
            assert {(each.model_id, each.fingerprint) for each in found} == {("test", fingerprint(SPEC, SPEC.kind))}


def test_what_makes_room_is_told_as_removed_a_superseded_tail_first(own_sidecar: Sidecar) -> None:
    own_sidecar.stop()
    # No scrub: it holds the chunk that it reads, and another one would go in the place of the tail.
    own_sidecar.environment = {**os.environ, "KVSTORE__POLICY__SCRUB_BYTES_PER_S": "0"}
    own_sidecar.start()
    big = small_spec(model_id="big", chunk_tokens=4096)
    with connect(own_sidecar.address) as client, client.watch() as events:
        store(client, 16, 2)
        tails = store(client, 20, 1)
        store(client, 32, 1)
        found = take(events, 4)
        assert [(each.kind, each.reason) for each in found] == [(EventKind.STORED, MissReason.NONE)] * 4
        for seed in range(80):
            store(client, 4096, seed, big)
        gone = 80 + 4 - client.stats().arena.chunk_count
        assert gone > 0
        after = take(events, 80 + gone)
        removed = [each for each in after if each.kind is EventKind.REMOVED]
        assert len(removed) == gone
        assert removed[0].digest == tails[1], "before what was stored earlier and is in nobody's shade"
        assert {(each.reason, each.tier) for each in removed} == {(MissReason.EVICTED, Tier.DRAM)}
        stored = {each.digest for each in [*found, *after] if each.kind is EventKind.STORED}
        assert {each.digest for each in removed} < stored


def test_moves_between_tiers_are_told() -> None:
    big = small_spec(chunk_tokens=4096, model_id="big")
    with Sidecar("--capacity", "8 MiB", nvme="256 MiB") as sidecar, connect(sidecar.address) as client:
        with client.watch() as events:
            for seed in range(24):
                store(client, 4096, seed, big)
            first = chain_digests(tokens_of(4096, 0), 4096)[0]
            while (event := take(events, 1)[0]).digest != first or event.kind is EventKind.STORED:
                pass
            assert (event.kind, event.tier) == (EventKind.MOVED, Tier.NVME)
            assert client.fetch(big, tokens_of(4096, 0)).token_count == 4096
            while (event := take(events, 1)[0]).digest != first:
                pass
            assert (event.kind, event.tier) == (EventKind.MOVED, Tier.DRAM)


def test_who_does_not_read_is_told_how_much_it_lost_and_holds_up_nobody() -> None:
    environment = {"KVSTORE__LIMITS__WATCH_EVENT_COUNT_MAX": "10"}
    with Sidecar("--capacity", "32 MiB", environment={**os.environ, **environment}) as sidecar:
        with connect(sidecar.address) as writer, connect(sidecar.address) as reader, reader.watch() as events:
            tiny = small_spec(model_id="tiny", chunk_tokens=1)
            for seed in range(3):
                store(writer, 1500, seed, tiny)  # far more than the queue and gRPC's window hold
            known = events.sequence
            while (event := take(events, 1)[0]).kind is not EventKind.GAP:
                known += 1
                assert event.sequence == known
            assert event.sequence == known + event.lost_count
            known = event.sequence
            digests = store(writer, 16, 99)
            while event.digest != digests[0]:
                (event,) = take(events, 1)
                known += event.lost_count or 1
                assert event.sequence == known


def test_another_tenant_is_refused_and_ones_own_is_not(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        with pytest.raises(PermissionDenied, match="default"):
            client.watch(tenant="other")
        client.watch(tenant="default").close()


def test_watchers_end_with_their_call_their_session_and_the_service(own_sidecar: Sidecar) -> None:
    with connect(own_sidecar.address) as judge:
        with connect(own_sidecar.address) as reader:
            events = reader.watch()
            gone = reader.watch()
            assert judge.stats().sessions.watcher_count == 2
            gone.close()
            assert list(gone) == []
            eventually(lambda: judge.stats().sessions.watcher_count == 1)
        eventually(lambda: judge.stats().sessions.watcher_count == 0)
        with pytest.raises(Unavailable):
            next(events)
        last = judge.watch()
        own_sidecar.stop()
        with pytest.raises(Unavailable):
            next(last)


def test_too_many_watchers_are_refused_with_the_setting() -> None:
    with Sidecar("--capacity", "8 MiB", environment={**os.environ, "KVSTORE__LIMITS__WATCHER_COUNT_MAX": "1"}) as one:
        with connect(one.address) as client, client.watch(), pytest.raises(Exhausted, match="watcher_count_max"):
            client.watch()


def test_events_that_come_while_a_watch_is_closed_do_not_keep_its_stream() -> None:
    failed, ended = threading.Event(), threading.Event()

    class Late:
        """A stream whose next message comes when its reader was failed."""

        def read(self) -> object:
            assert failed.wait(10.0)
            return object()

        def end_soon(self) -> None:
            ended.set()

        cancel = cancel_soon = end_soon

    stream = Late()
    feed = Feed(cast(Incoming, stream))
    feed._is_closed = True  # by another thread, which cancels and ends it next
    asked = feed.ask()
    failed.set()
    with pytest.raises(Unavailable):
        asked.result(10.0)
    feed._asked.put(None)
    assert ended.wait(10.0), "its thread has died"


def test_the_command_prints_events_as_they_come(sidecar: Sidecar) -> None:
    socket = sidecar.socket_address.removeprefix("unix://")
    command = [sys.executable, "-m", "kvstore_ops.cli", "watch", "--socket", socket, "--json", "--count", "2"]
    with connect(sidecar.address) as client:
        watching = WARM.popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            eventually(lambda: client.stats().sessions.watcher_count == 1, 30.0)
            digests = store(client, 32, 4711)
            out, _ = watching.communicate(timeout=30)
        finally:
            watching.kill()
    assert watching.returncode == 0
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(each["kind"], each["digest"]) for each in lines] == [("stored", digest.hex()) for digest in digests]
