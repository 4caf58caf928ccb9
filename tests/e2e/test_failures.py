"""What must not happen when processes pause, fork, scribble and die: bytes that are not the chunk's."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import DataLoss, Unavailable
from kvstore.spec import Durability, LayerSpec, MissReason, ModelSpec
from tests.conftest import CLIENTS
from tests.server.raw import eventually
from tests.specs import bits, random_cache, small_spec, tokens_of

CHUNKS = 8


def large_spec() -> ModelSpec:
    """2 MiB per chunk: a 32 MiB arena holds fifteen."""
    layer = LayerSpec(kv_heads=4, k_dim=64, v_dim=64)
    return small_spec(model_id="large", layers=(layer,) * 4, chunk_tokens=512)


def large_cache(seed: int, chunks: int = CHUNKS) -> tuple[Any, list[Any]]:
    spec = large_spec()
    return tokens_of(512 * chunks, seed), random_cache(spec, 512 * chunks, seed)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something another process does."""
    eventually(condition, seconds)


class Pause:
    """Stops a client's copy in the middle until told to go on."""

    def __init__(self, client: Client) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        client.faults.arm("fetch.copy.middle", self._wait)

    def _wait(self) -> None:
        self.reached.set()
        assert self.go.wait(30.0)


def fetch_in_thread(client: Client, tokens: Any) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(client.fetch(large_spec(), tokens)))
    thread.start()
    return thread, results


def assert_right_or_missing(fetched: Any, kv: list[Any], token_count: int | None = None) -> None:
    count = fetched.token_count if token_count is None else token_count
    for layer, (k, v) in enumerate(fetched):
        assert (bits(k) == kv[layer][0][:, :count]).all()
        assert (bits(v) == kv[layer][1][:, :count]).all()


def test_use_after_free_is_a_miss() -> None:
    """Paused in the middle of a copy; the lease is revoked for its age, the extents are refilled; resumed."""
    environment = {**os.environ, "KVSTORE__LIMITS__LEASE_AGE_S_MAX": "0"}
    with Sidecar("--capacity", "32 MiB", environment=environment) as sidecar:
        with connect(sidecar.address) as client, connect(sidecar.address) as other:
            tokens, kv = large_cache(1)
            client.store(large_spec(), tokens, kv).wait()
            pause = Pause(client)
            thread, results = fetch_in_thread(client, tokens)
            assert pause.reached.wait(10.0)
            refill, cache = large_cache(2, 14)
            assert other.store(large_spec(), refill, cache).wait(10.0) is Durability.MEMORY
            assert other.stats().counters["leases_revoked"] >= 1
            pause.go.set()
            thread.join(20.0)
            fetched = results[0]
            assert fetched.token_count < tokens.size
            assert fetched.reason is MissReason.STALE
            assert_right_or_missing(fetched, kv)
            layers_are_lost(client, other)


def layers_are_lost(client: Client, other: Client) -> None:
    """The same of a stream of layers: one whose chunks were lost under its copy is not shown."""
    tokens, kv = large_cache(5)
    other.store(large_spec(), tokens, kv).wait()
    shown: list[int] = []
    errors: list[BaseException] = []

    def stream() -> None:
        try:
            for layer, planes in client.fetch_layers(large_spec(), tokens):
                assert_right_or_missing([planes], [kv[layer]], tokens.size)
                shown.append(layer)
        except DataLoss as error:
            errors.append(error)

    pause = Pause(client)
    thread = threading.Thread(target=stream)
    thread.start()
    assert pause.reached.wait(10.0)
    assert other.store(large_spec(), *large_cache(6, 14)).wait(10.0) is Durability.MEMORY
    pause.go.set()
    thread.join(20.0)
    assert (shown, [str(error) for error in errors]) == ([], ["a chunk was lost while layer 0 was copied"])


def test_a_leased_chunk_is_not_evicted(local_sidecar: Sidecar) -> None:
    with connect(local_sidecar.address) as client, connect(local_sidecar.address) as other:
        tokens, kv = large_cache(1)
        client.store(large_spec(), tokens, kv).wait()
        pause = Pause(client)
        thread, results = fetch_in_thread(client, tokens)
        assert pause.reached.wait(10.0)
        refill, cache = large_cache(2, 14)
        receipt = other.store(large_spec(), refill, cache)
        assert receipt.wait(10.0) is Durability.MEMORY
        assert receipt.stored_token_count < refill.size
        pause.go.set()
        thread.join(20.0)
        assert results[0].token_count == tokens.size
        assert_right_or_missing(results[0], kv)
        until(lambda: client.stats().sessions.lease_count == 0)


def test_server_killed_in_the_middle_of_a_copy(own_sidecar: Sidecar) -> None:
    """The old mapping stays readable under the copy; what comes is right or nothing. Then the client reconnects."""
    client = connect(own_sidecar.address)
    tokens, kv = large_cache(3)
    client.store(large_spec(), tokens, kv).wait()
    pause = Pause(client)
    thread, results = fetch_in_thread(client, tokens)
    assert pause.reached.wait(10.0)
    own_sidecar.stop(kill=True)
    own_sidecar.start()
    other_tokens, other_kv = large_cache(4)
    with connect(own_sidecar.address) as other:
        other.store(large_spec(), other_tokens, other_kv).wait()
    pause.go.set()
    thread.join(20.0)
    client.faults.arm("fetch.copy.middle", lambda: None)
    assert_right_or_missing(results[0], kv)
    until(lambda: client.fetch(large_spec(), other_tokens).token_count == other_tokens.size)
    assert client.fetch(large_spec(), tokens).token_count == 0
    assert client.statistics()["sessions"] == 2
    client.close()


def test_a_client_without_its_server_goes_on(own_sidecar: Sidecar, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(own_sidecar.address)
    spec, tokens = small_spec(), tokens_of(40)
    kv = random_cache(spec, 40)
    own_sidecar.stop(kill=True)
    for _ in range(3):
        assert client.lookup(spec, tokens).chunks[0].reason is MissReason.UNAVAILABLE
        fetched = client.fetch(spec, tokens)
        assert (fetched.token_count, fetched.reason) == (0, MissReason.UNAVAILABLE)
        assert tuple(fetched[0][0].shape) == (2, 0, 8)
        assert list(client.fetch_layers(spec, tokens)) == []
        assert client.store(spec, tokens, kv).wait() is Durability.NONE
    assert len([record for record in caplog.records if "going on without it" in record.message]) == 1
    assert client.statistics()["unavailable"] >= 12
    with pytest.raises(Unavailable):
        client.stats()
    own_sidecar.start()
    until(lambda: client.store(spec, tokens, kv).wait() is Durability.MEMORY)
    client.close()


def test_connecting_to_nobody_names_the_remedy(tmp_path: Any) -> None:
    address = f"unix://{tmp_path}/kvstore.sock"
    with pytest.raises(Unavailable, match="kvstore serve"):
        connect(address)
    client = connect(address, required=False)
    assert client.lookup(small_spec(), tokens_of(20)).prefix_token_count == 0
    client.close()


def test_the_mappings_go_with_the_server(local_sidecar: Sidecar) -> None:
    """A restart must not double the node's memory: nobody keeps the dead server's regions mapped."""

    def mapped() -> set[str]:
        """The files that are mapped, by inode."""
        with open("/proc/self/maps") as maps:
            return {line.split()[4] for line in maps if "memfd:kvstore-" in line}

    others = mapped()  # of sidecars that run beside this one
    client = connect(local_sidecar.address)
    tokens, kv = large_cache(5)
    client.store(large_spec(), tokens, kv).wait()
    assert client.fetch(large_spec(), tokens).token_count == tokens.size
    assert mapped() - others
    local_sidecar.stop(kill=True)
    until(lambda: not mapped() - others)
    client.close()


def test_a_forked_child_connects_by_itself(own_sidecar: Sidecar) -> None:
    """In a process of its own: fork is no friend of a test runner's threads."""
    code = f"""
import os, sys
from kvstore_client import connect
from kvstore.keys import chain_digests
from tests.server.raw import eventually
from tests.specs import small_spec, tokens_of, random_cache
client = connect({own_sidecar.address!r})
spec, tokens = small_spec(), tokens_of(40)
kv = random_cache(spec, 40)
client.store(spec, tokens, kv).wait()
assert client.fetch(spec, tokens).token_count == 40
session, chain = client.connect_now(), chain_digests(tokens, 16)
if session.presence is not None:
    eventually(lambda: session.presence.is_there)
child = os.fork()
if child == 0:
    if session.presence is not None:
        assert session.presence.first_held(1, chain) is None, "a child looks into its parent's table"
    with open("/proc/self/maps") as maps:
        assert "memfd:kvstore-" not in maps.read(), "a child inherited the arena"
    fetched = client.fetch(spec, tokens)
    assert fetched.token_count == 40, fetched.reason
    assert (fetched[1][1] == kv[1][1]).all()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert client.fetch(spec, tokens).token_count == 40
client.close()
"""
    done = CLIENTS.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0, done.stderr
    with connect(own_sidecar.address) as client:
        until(lambda: client.stats().sessions.session_count == 1)


def test_scribbling_on_staging_changes_nothing_committed(local_sidecar: Sidecar) -> None:
    """A thread writes all over staging during and after the commit. What is served has the checksums it was
    committed with, and does not change any more."""
    with connect(local_sidecar.address) as client, connect(local_sidecar.address) as reader:
        tokens, kv = large_cache(6)
        client.store(large_spec(), tokens[:512], [(k[:, :512], v[:, :512]) for k, v in kv]).wait()
        segments = [each._mapping.bytes[: 4 << 20] for each in client.connect_now().staging._segments.values()]
        stop = threading.Event()
        rounds: list[int] = []

        def scribble() -> None:
            value = 0
            while not stop.is_set():
                value = (value + 1) % 256
                for segment in segments:
                    segment[:] = value
                rounds.append(value)

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            receipt = client.store(large_spec(), tokens, kv)
            assert receipt.wait(20.0) is Durability.MEMORY
            first = reader.fetch(large_spec(), tokens, verify=True)
            assert first.token_count == tokens.size
            time.sleep(0.2)
            second = reader.fetch(large_spec(), tokens, verify=True)
        finally:
            stop.set()
            thread.join()
        assert segments
        assert rounds, "nobody scribbled"
        for (k1, v1), (k2, v2) in zip(first, second, strict=True):
            assert (bits(k1) == bits(k2)).all()
            assert (bits(v1) == bits(v2)).all()
        # The first chunk was committed before: it is what it was.
        assert (bits(second[0][0])[:, :512] == kv[0][0][:, :512]).all()


def test_two_clients_store_the_same_at_once(own_sidecar: Sidecar) -> None:
    with connect(own_sidecar.address) as one, connect(own_sidecar.address) as two:
        tokens, kv = large_cache(7)
        receipts: list[Any] = []
        threads = [
            threading.Thread(target=lambda client=client: receipts.append(client.store(large_spec(), tokens, kv)))
            for client in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [receipt.wait(10.0) for receipt in receipts] == [Durability.MEMORY] * 2
        assert [receipt.stored_token_count for receipt in receipts] == [tokens.size] * 2
        stats = one.stats()
        assert stats.counters["store_committed_chunks"] == CHUNKS
        assert stats.arena.chunk_count == CHUNKS
        assert_right_or_missing(two.fetch(large_spec(), tokens), kv)


@pytest.mark.parametrize("point", ["store.staged", "fetch.copy.middle"])
def test_a_client_that_dies_leaves_nothing_behind(own_sidecar: Sidecar, point: str) -> None:
    code = f"""
import os
from kvstore_client import connect
from tests.e2e.test_failures import large_cache, large_spec
client = connect({own_sidecar.address!r})
tokens, kv = large_cache(8)
client.faults.arm({point!r}, lambda: os._exit(9))
client.store(large_spec(), tokens, kv).wait()
client.fetch(large_spec(), tokens)
"""
    done = CLIENTS.run([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 9, done.stderr
    with connect(own_sidecar.address) as client:
        until(lambda: client.stats().sessions.session_count == 1)
        until(lambda: client.stats().arena.reserved_bytes == 0)  # a strip on its way into it is waited for
        stats = client.stats()
        assert (stats.sessions.lease_count, stats.sessions.reservation_count) == (0, 0)
        assert (stats.sessions.staging_bytes, stats.arena.leased_bytes) == (0, 0)
        stored = CHUNKS if point == "fetch.copy.middle" else 0
        assert stats.arena.chunk_count == stored
        tokens, kv = large_cache(8)
        assert client.store(large_spec(), tokens, kv).wait(10.0) is Durability.MEMORY


def test_a_damaged_arena_is_noticed_by_verify(local_sidecar: Sidecar) -> None:
    """A flipped bit in a region's mapping, as bad memory would have it: never bytes."""
    with connect(local_sidecar.address) as client:
        tokens, kv = large_cache(9)
        client.store(large_spec(), tokens, kv).wait()
        session = client.connect_now()
        mapped = session._regions[0]
        session._regions[0] = np.array(mapped)
        session._regions[0][3_000_000] ^= 1
        fetched = client.fetch(large_spec(), tokens, verify=True)
        assert fetched.token_count < tokens.size
        assert_right_or_missing(fetched, kv)
        session._regions[0][100] ^= 1  # and in a header: noticed without being asked
        assert client.fetch(large_spec(), tokens).reason is MissReason.CORRUPT


@pytest.mark.parametrize("what", ["extents", "headers", "generation", "slot", "no slot", "region"])
def test_a_confused_answer_is_a_miss(local_sidecar: Sidecar, what: str) -> None:
    """A server that named the wrong place, as a bug of ours would: the client believes headers and generations."""
    with connect(local_sidecar.address) as client:
        tokens, kv = large_cache(10)
        client.store(large_spec(), tokens, kv).wait()
        session = client.connect_now()
        honest = session.cache.Fetch

        def confused(*arguments: Any, **options: Any) -> Any:
            for response in honest(*arguments, **options):
                first, second = response.chunks[0], response.chunks[1]
                if what == "extents":
                    offset = first.extents[0].offset
                    first.extents[0].offset, second.extents[0].offset = second.extents[0].offset, offset
                elif what == "headers":
                    first.extents[0].offset += 4096
                elif what == "generation":
                    first.generation += 1
                elif what == "no slot":
                    first.generation_slot = 1 << 31
                elif what == "slot":
                    first.generation_slot, first.generation = second.generation_slot, first.generation + 7
                else:
                    first.extents[0].region = 77
                yield response

        session.cache.Fetch = confused
        for _ in range(2):
            fetched = client.fetch(large_spec(), tokens)
            assert fetched.token_count == 0
            assert fetched.reason is not MissReason.NONE
        session.cache.Fetch = honest
        assert client.fetch(large_spec(), tokens).token_count == tokens.size


def test_use_after_free_across_a_reconnect(own_sidecar: Sidecar) -> None:
    """The client's session ends under its copy (the server dropped it); the extents are refilled; resumed."""
    client = connect(own_sidecar.address)
    tokens, kv = large_cache(11)
    client.store(large_spec(), tokens, kv).wait()
    pause = Pause(client)
    thread, results = fetch_in_thread(client, tokens)
    assert pause.reached.wait(10.0)
    client.connect_now().close()
    with connect(own_sidecar.address) as other:
        until(lambda: other.stats().sessions.session_count == 1)
        refill, cache = large_cache(12, 15)
        assert other.store(large_spec(), refill, cache).wait(10.0) is Durability.MEMORY
        assert other.lookup(large_spec(), tokens).prefix_token_count < tokens.size
    pause.go.set()
    thread.join(20.0)
    client.faults.arm("fetch.copy.middle", lambda: None)
    assert results[0].token_count < tokens.size
    assert_right_or_missing(results[0], kv)
    assert client.fetch(large_spec(), refill[:512]).token_count == 512
    client.close()
