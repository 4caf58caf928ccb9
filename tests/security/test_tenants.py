"""Several tenants in one sidecar: through no door does one see, hold, move or learn anything of another's."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvstore_client import ChunkEvent, Client, EventKind
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.chunk import ChunkHeader, parse_header
from kvstore.errors import DataLoss, InvalidRequest, PermissionDenied, Unavailable
from kvstore.keys import chain_digests
from kvstore.seams import TenantKeys
from kvstore.spec import Durability, MissReason
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1alpha.admin_pb2 import StatsRequest
from kvstore.v1alpha.prefill_pb2 import FindProfileRequest, RegisterProfileRequest
from tests.conftest import WARM
from tests.e2e.remote.peers import METHODS, SERVICE, Peer, status
from tests.e2e.test_registered_profiles import profile_of
from tests.security.tenancy import NAMES, client_of, secret_of, tenants_sidecar, token_of
from tests.security.test_sessions import CALLS
from tests.server.raw import Handoff, Raw
from tests.specs import random_cache, same, small_spec, tokens_of

PLANES = ("local", "remote")

SPEC = small_spec()

COUNT = 40


@pytest.fixture(scope="module")
def tenants() -> Iterator[Sidecar]:
    """Two tenants beside the default one, on both planes."""
    with tenants_sidecar("--capacity", "32 MiB") as running:
        yield running


@pytest.fixture(params=PLANES)
def pair(tenants: Sidecar, request: pytest.FixtureRequest) -> Iterator[tuple[Client, Client]]:
    """A client of each tenant."""
    with client_of(tenants, "a", request.param) as one, client_of(tenants, "b", request.param) as other:
        yield one, other


_fresh = iter(range(1000, 2000))


def fresh() -> tuple[Any, Any]:
    """Tokens that nobody has stored, and a cache of them."""
    seed = next(_fresh)
    return tokens_of(COUNT, seed), random_cache(SPEC, COUNT, seed)


def test_what_one_stored_is_cold_for_the_other(pair: tuple[Client, Client], tenants: Sidecar) -> None:
    one, other = pair
    tokens, cache = fresh()
    assert one.store(SPEC, tokens, cache).wait(10.0) is Durability.MEMORY
    with client_of(tenants, "") as default:
        for stranger in (other, default):
            match = stranger.lookup(SPEC, tokens, hold=True)
            assert (match.prefix_token_count, match.ticket) == (0, None)
            assert {chunk.reason for chunk in match.chunks} == {MissReason.COLD}
            fetched = stranger.fetch(SPEC, tokens)
            assert (fetched.token_count, fetched.reason) == (0, MissReason.COLD)
            assert "test" not in {model.model_id for model in stranger.stats().models if model.chunk_count}
    assert same(one.fetch(SPEC, tokens), cache)


def test_the_same_tokens_are_two_chunks_for_two_tenants(pair: tuple[Client, Client]) -> None:
    tokens, cache = fresh()
    others = random_cache(SPEC, COUNT, 7)
    for client, own in zip(pair, (cache, others), strict=True):
        assert client.store(SPEC, tokens, own).stored_token_count == COUNT
    for client, own in zip(pair, (cache, others), strict=True):
        assert same(client.fetch(SPEC, tokens, verify=True), own)


def test_a_ticket_is_worth_nothing_to_the_other(pair: tuple[Client, Client]) -> None:
    one, other = pair
    tokens, cache = fresh()
    one.store(SPEC, tokens, cache).wait(10.0)
    ticket = one.lookup(SPEC, tokens, hold=True).ticket
    assert ticket is not None
    with pytest.raises(InvalidRequest, match="ticket"):
        other.start_fetch(ticket).wait(10.0)
    other.release_ticket(ticket)
    into = random_cache(SPEC, COUNT, 1)
    one.start_fetch(ticket, into=into).wait(10.0)
    assert same(into, cache)


def test_a_store_in_flight_cannot_be_joined_or_fetched_by_the_other(pair: tuple[Client, Client]) -> None:
    one, other = pair
    tokens, cache = fresh()
    with one.start_store(SPEC, tokens, shards=2) as writer:
        writer.put_layer(0, cache[0])
        with pytest.raises((InvalidRequest, DataLoss)):
            other.start_fetch(writer.ticket, into=random_cache(SPEC, COUNT, 1)).wait(10.0)
        with pytest.raises(InvalidRequest):
            other.join_store(writer.ticket, 1)
        writer.put_layer(1, cache[1])
        with one.join_store(writer.ticket, 1) as second:
            second.commit()
        assert writer.commit().stored_token_count == COUNT
    assert other.lookup(SPEC, tokens).prefix_token_count == 0


def test_opaque_values_are_ones_own(tenants: Sidecar) -> None:
    with client_of(tenants, "a") as one, client_of(tenants, "b") as other:
        one.put_bytes("notes", "key", b"of a").wait(10.0)
        assert other.exists("notes", "key") is False
        assert other.get_bytes("notes", "key") is None
        other.put_bytes("notes", "key", b"of b").wait(10.0)
        assert [bytes(client.get_bytes("notes", "key")) for client in (one, other)] == [b"of a", b"of b"]


def test_a_document_is_cold_for_the_other_wherever_it_stands(pair: tuple[Client, Client]) -> None:
    one, other = pair
    tokens, cache = fresh()
    one.store_segment(SPEC, tokens, cache).wait(10.0)
    prompt, run = np.concatenate([tokens_of(5), tokens]), (5, 5 + COUNT)
    counts = [client.lookup(SPEC, prompt, segments=[run]).segments[0].standalone_token_count for client in pair]
    assert counts == [COUNT, 0]
    fetched = other.fetch_segment(SPEC, tokens)
    assert (fetched.token_count, fetched.reason) == (0, MissReason.COLD)


def test_a_watcher_is_told_of_its_own_tenant_only(pair: tuple[Client, Client]) -> None:
    one, other = pair
    with pytest.raises(PermissionDenied, match="'b'"):
        other.watch(tenant="a")
    with other.watch(tenant="b") as events:
        one.store(SPEC, *fresh()).wait(10.0)
        tokens, cache = fresh()
        other.store(SPEC, tokens, cache).wait(10.0)
        timer = threading.Timer(20.0, events.close)
        timer.start()
        found: list[ChunkEvent] = [next(events) for _ in range(3)]
        timer.cancel()
    assert [each.kind for each in found] == [EventKind.STORED] * 3
    assert [each.digest for each in found] == chain_digests(tokens, SPEC.chunk_tokens)
    assert [each.sequence for each in found] == [events.sequence + number for number in (1, 2, 3)]


def test_a_session_is_worth_nothing_at_the_others_door(tenants: Sidecar) -> None:
    with Raw(tenants, "a") as one, Raw(tenants, "b") as other, Raw(tenants) as default:
        assert [each.stats().tenant for each in (one, other, default)] == ["a", "b", "default"]
        for stranger in (other, default):
            for method, request in CALLS:
                assert stranger.status(method, request, secret=one.secret) == "UNAUTHENTICATED"
        tokens = one.store(SPEC, 2, seed=next(_fresh))
        (fetched,) = one.call("Fetch", pb.FetchRequest(query=one.query(SPEC, tokens)))
        other.call("Release", pb.ReleaseRequest(lease_ids=list(range(fetched.lease_id + 2))))
        assert one.stats().sessions.lease_count == 1
        reservation = one.reserve(SPEC, tokens_of(16, next(_fresh))).reservation_id
        other.call("Store", pb.StoreRequest(abort=pb.Abort(reservation_id=reservation)))
        assert one.stats().sessions.reservation_count == 1


def test_a_token_says_whose_its_client_is(tenants: Sidecar) -> None:
    told = {name: client_of(tenants, name, "remote") for name in NAMES}
    try:
        assert {name: client.stats().tenant for name, client in told.items()} == {"a": "a", "b": "b"}
    finally:
        for client in told.values():
            client.close()
    request = StatsRequest().SerializeToString()
    with Peer(tenants, token_of("a")) as one, Peer(tenants, token_of("b")) as other, Peer(tenants, TOKEN) as default:
        assert status(lambda: [one.call("unary_unary", METHODS[4], request)]) == "OK"
        for stranger in (other, default):
            stolen = (*stranger.bearer, ("kvstore-session-bin", one.secret))
            for method in METHODS:
                if method != SERVICE + "Connect":
                    call = stranger.channel.stream_stream(method)(iter([b""]), metadata=stolen, timeout=10)
                    assert status(call) == "UNAUTHENTICATED", method


def test_a_full_arena_evicts_its_own_and_limits_are_ones_own() -> None:
    big = small_spec(model_id="big", chunk_tokens=4096)
    settings = {"KVSTORE__TENANTS__A__CAPACITY_BYTES": "8 MiB", "KVSTORE__LIMITS__SESSION_COUNT_MAX": "2"}
    with tenants_sidecar("--capacity", "16 MiB", **settings) as sidecar, client_of(sidecar, "b") as other:
        kept = tokens_of(4096, 1)
        cache = random_cache(big, 4096, 1)
        other.store(big, kept, cache).wait(10.0)
        with client_of(sidecar, "a") as one, client_of(sidecar, "a"):
            for seed in range(24):
                one.store(big, tokens_of(4096, seed), cache).wait(10.0)
            arena = one.stats().arena
            assert arena.capacity_bytes == 8 << 20
            assert arena.used_bytes <= 8 << 20
            assert one.stats().counters["evicted_chunks"] > 0
            with Handoff(sidecar.directory, "a") as refused:
                assert "session_count_max" in refused.exchange(op="hello", version=1)[0]["message"]
            with client_of(sidecar, "b") as second:  # its own two
                assert second.fetch(big, kept).token_count == 4096
        stats = other.stats()
        assert (stats.arena.capacity_bytes, stats.arena.chunk_count) == (16 << 20, 1)
        assert stats.counters["evicted_chunks"] == 0


def headers(directory: Path) -> list[ChunkHeader]:
    """Of every chunk in a device directory's files."""
    found = []
    for file in directory.glob("region-*.kvs"):
        data = np.frombuffer(file.read_bytes(), np.uint8)
        for start in range(4096, data.size, 4096):
            if data[start : start + 8].tobytes() == b"KVSCHUNK":
                found.append(parse_header(data[start:]))
    return found


def test_what_is_local_outlives_a_kill_under_names_of_its_own() -> None:
    tokens, caches = tokens_of(64), {name: random_cache(SPEC, 64, seed) for seed, name in enumerate(("", *NAMES))}
    with tenants_sidecar("--capacity", "16 MiB", nvme="32 MiB") as sidecar:
        for name, cache in caches.items():
            with client_of(sidecar, name) as client:
                assert client.store(SPEC, tokens, cache).wait(10.0) is Durability.LOCAL
        sidecar.stop(kill=True)
        nvme = sidecar.directory / "nvme"
        places = {"": nvme, **{name: nvme / "tenants" / name for name in NAMES}}
        wanted = set(chain_digests(tokens, SPEC.chunk_tokens))
        kept = {
            name: [each for each in headers(place) if each.chain_digest in wanted] for name, place in places.items()
        }
        assert [len(each) for each in kept.values()] == [4] * 3
        assert len({each.storage_key for found in kept.values() for each in found}) == 12
        for name in NAMES:
            keys = TenantKeys.derived(name, secret_of(name).encode())
            assert {each.tenant_digest for each in kept[name]} == {keys.digest}
        for between in (refuse_the_others_secret, None):  # after the kill, and after a clean stop
            sidecar.start()
            for name, cache in caches.items():
                with client_of(sidecar, name) as client:
                    assert same(client.fetch(SPEC, tokens, verify=True), cache)
            sidecar.stop()
            if between is not None:
                between(sidecar)


def refuse_the_others_secret(sidecar: Sidecar) -> None:
    """A directory is opened with the secret it was written with, or not at all."""
    secrets = sidecar.directory / "a.secret"
    right = secrets.read_text()
    secrets.write_text("not the secret that it had, and as long\n")
    with pytest.raises(Unavailable, match=r"another secret.*secret_file"):
        sidecar.start()
    sidecar.stop()
    secrets.write_text(right)


def kvstore(*arguments: str) -> str:
    command = [sys.executable, "-m", "kvstore_ops.cli", *arguments]
    done = WARM.run(command, timeout=60)
    done.check_returncode()
    return done.stdout


def test_metrics_status_and_logs_say_whose(tenants: Sidecar) -> None:
    tokens, cache = fresh()
    with client_of(tenants, "a") as client:
        client.store(SPEC, tokens, cache).wait(10.0)
        held = client.stats().arena
    log = [json.loads(line) for line in (tenants.directory / "log").read_text().splitlines()]
    assert {line["tenant"] for line in log if line["message"] == "ready"} == {"default", "a", "b"}
    assert all("tenant" in line for line in log if line["message"].startswith("session"))
    page = next(line["metrics"] for line in log if line["message"] == "ready")
    said = urllib.request.urlopen(page, timeout=5).read().decode()
    assert "tenant=" not in said, "readers without a token see all tenants together"
    chunk_count = float(re.search(r"^kvstore_arena_chunks (.*)$", said, re.MULTILINE)[1])
    assert chunk_count >= held.chunk_count > 0
    socket = str(tenants.directory / "run" / "kvstore.sock")
    whole = json.loads(kvstore("status", "--socket", socket, "--json"))
    assert whole["tenant"] == "default"
    assert {name: each["tenant"] for name, each in whole["tenants"].items()} == {"a": "a", "b": "b"}
    assert json.loads(kvstore("status", "--socket", socket, "--tenant", "a", "--json"))["tenant"] == "a"


def test_a_clean_stop_leaves_no_socket_behind() -> None:
    with tenants_sidecar("--capacity", "8 MiB") as sidecar:
        run = sidecar.directory / "run"
        assert [(run / name).stat().st_mode & 0o777 for name in NAMES] == [0o700] * 2
        assert {each.stat().st_mode & 0o777 for name in NAMES for each in (run / name).iterdir()} == {0o600}
        client = client_of(sidecar, "a")
        sidecar.stop()
        assert not list(run.iterdir())
        assert "Traceback" not in (sidecar.directory / "log").read_text()
        client.close()


def test_no_tenant_reuses_by_the_profile_of_another(pair: tuple[Client, Client]) -> None:
    profile = profile_of(SPEC)
    for client in pair:
        client.lookup(SPEC, tokens_of(COUNT))
    session = pair[0].connect_now()
    data = profile.to_json().encode()
    assert session.call(session.prefills.RegisterProfile, RegisterProfileRequest(profile=data), 10.0).is_kept
    question = FindProfileRequest(receiver=SPEC.weights_digest, reuse="position", provenance="standalone")
    found = [each.connect_now().prefills.FindProfile(question, metadata=each.connect_now().carried) for each in pair]
    assert [each.profile for each in found] == [data, b""]
