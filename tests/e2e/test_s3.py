"""Two nodes, real servers, and one bucket of a real S3 server: what one stored the other gets to the bit, and what the
store or the line to it does wrong costs misses, no wrong byte, and no wait beyond the bound.

``make test-s3`` runs it against another server: KVSTORE_TEST_S3_ENDPOINT, with credentials as botocore finds them."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from kvstore_client import Client, connect

from kvstore.spec import Durability, MissReason, Tier
from tests.conftest import WARM
from tests.e2e.s3 import PREFIX, BucketSidecar, bucket_server
from tests.e2e.test_nvme import same
from tests.fakes import Switch
from tests.fakes.s3_proxy import S3Proxy
from tests.fakes.s3_server import ENDPOINT, KEYS, S3Server
from tests.ops.command import run
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

pytestmark = pytest.mark.s3
STEP = 512
COUNT = 4 * STEP
SPEC = small_spec(chunk_tokens=STEP)
BOUND_S = 8.0
SEEDS = itertools.count(1)
WHOLE = (COUNT, MissReason.NONE)


class Nodes(NamedTuple):
    server: S3Server
    line: S3Proxy
    one: BucketSidecar
    two: BucketSidecar


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with bucket_server() as server:
        yield server


@pytest.fixture(scope="module")
def nodes(server: S3Server) -> Iterator[Nodes]:
    """``two`` reaches the bucket by a line."""
    with S3Proxy(server.url) as line:
        one, two = BucketSidecar(server.url, server.bucket), BucketSidecar(line.url, server.bucket)
        with one, two:
            yield Nodes(server, line, one, two)


@pytest.fixture
def one(nodes: Nodes) -> Iterator[Client]:
    with connect(nodes.one.socket_address) as client:
        yield client


@pytest.fixture
def two(nodes: Nodes) -> Iterator[Client]:
    with connect(nodes.two.socket_address) as client:
        yield client
        nodes.line.turn_off()
        eventually(lambda: client.stats().tiers[0].state == "up", 20.0)


def cache(seed: int) -> Any:
    return random_cache(SPEC, COUNT, seed)


def give(client: Client, seed: int) -> None:
    """Store, and wait until the bucket has it or has refused it."""
    client.store(SPEC, tokens_of(COUNT, seed), cache(seed)).wait(10.0)
    eventually(lambda: client.stats().backlog_chunk_count == 0, 20.0)


def given(client: Client) -> int:
    """The seed of a new context that the bucket has."""
    seed = next(SEEDS)
    give(client, seed)
    return seed


def get(client: Client, seed: int) -> tuple[int, MissReason]:
    """How much of a context comes, all of it right, and why no more; within the bound."""
    began_s = time.monotonic()
    fetched = client.fetch(SPEC, tokens_of(COUNT, seed))
    assert time.monotonic() - began_s < BOUND_S, "it was waited for"
    assert same(fetched, cache(seed), fetched.token_count)
    return fetched.token_count, fetched.reason


def are_all_in_s3(client: Client, longer: np.ndarray) -> bool:
    return [each.tier for each in client.lookup(SPEC, longer).chunks] == [Tier.S3] * 4 + [Tier.NONE]


def test_what_a_killed_node_stored_comes_back_to_the_bit(nodes: Nodes, server: S3Server) -> None:
    """By clients on its host, and on others."""
    before = set(server.keys(PREFIX))
    with BucketSidecar(server.url, server.bucket) as dying:
        with connect(dying.socket_address) as client:
            seeds = [given(client), given(client)]
            eventually(lambda: len(set(server.keys(PREFIX)) - before) == 8, 30.0)  # one that was late is sent again
        dying.stop(kill=True)
    for seed, address in zip(seeds, (nodes.two.socket_address, nodes.two.address), strict=True):
        with connect(address) as client:
            longer = np.append(tokens_of(COUNT, seed), [1, 2, 3])
            # A bucket that answers too late, on a busy machine, counts as one that has nothing.
            eventually(partial(are_all_in_s3, client, longer))
            fetched = client.fetch(SPEC, tokens_of(COUNT, seed), verify=True)
            assert (fetched.token_count, fetched.tier, fetched.reason) == (COUNT, Tier.S3, MissReason.NONE)
            assert same(fetched, cache(seed), COUNT)
            assert client.fetch(SPEC, tokens_of(COUNT, seed)).tier is Tier.DRAM, "what came stays"


def test_bytes_stay_out_of_the_process_that_answers(nodes: Nodes, one: Client, two: Client) -> None:
    """Its movers hold the connections."""
    assert get(two, given(one)) == WHOLE
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    port, established = int(nodes.line.url.rpartition(":")[2]), "01"
    kept = {f"socket:[{row[9]}]" for row in rows if row[3] == established and int(row[2].partition(":")[2], 16) == port}
    assert kept
    try:
        files = [os.readlink(each) for each in Path(f"/proc/{nodes.two.pid}/fd").iterdir()]
    except PermissionError:
        pytest.skip("the kernel shows the files of a server that makes itself unreadable to root alone")
    assert not kept & set(files)


def test_an_altered_object_is_a_miss_until_it_is_stored_again(nodes: Nodes, one: Client, two: Client) -> None:
    """The node that found it damaged puts it right."""
    before = set(nodes.server.keys(PREFIX))
    seed = given(one)
    altered = min(set(nodes.server.keys(PREFIX)) - before)
    data = bytearray(nodes.server.get(altered))
    data[-1] ^= 1
    nodes.server.put(altered, bytes(data))
    token_count, reason = get(two, seed)
    assert token_count < COUNT
    assert reason is MissReason.CORRUPT
    give(two, seed)
    with connect(nodes.one.socket_address) as client:
        assert get(client, seed) == WHOLE
    with BucketSidecar(nodes.server.url, nodes.server.bucket) as third, connect(third.socket_address) as client:
        eventually(lambda: get(client, seed) == WHOLE)


@pytest.mark.parametrize("kind", ["cut", "stall"])
def test_a_body_that_ends_early_or_stalls_is_a_bounded_miss(nodes: Nodes, one: Client, two: Client, kind: str) -> None:
    seed, other = given(one), given(one)
    setattr(nodes.line, f"{kind}_at", 20_000)
    assert get(two, seed)[0] < COUNT
    nodes.line.turn_off()
    eventually(lambda: get(two, other) == WHOLE, 20.0)
    eventually(lambda: get(two, seed) == WHOLE, 20.0)


def test_a_store_that_ignores_conditions_changes_nothing(nodes: Nodes, one: Client, two: Client) -> None:
    nodes.line.ignores_conditions = True
    seed = given(two)
    give(one, seed)
    assert get(one, seed) == get(two, seed) == WHOLE


def test_chunks_that_are_too_small_stay_at_home_quietly(server: S3Server) -> None:
    before = server.keys(PREFIX)
    with BucketSidecar(server.url, server.bucket, TIERS__S3__CHUNK_BYTES_MIN="1 MiB") as node:
        with connect(node.socket_address) as client:
            given(client)
            assert client.stats().tier_problem == ""
    assert server.keys(PREFIX) == before


@pytest.mark.parametrize("policy", ["never", "reuse"])
def test_a_bucket_that_is_not_there_is_told_by_a_node_that_only_reads(server: S3Server, policy: str) -> None:
    bucket = f"kvstore-missing-{os.getpid()}-{policy}"
    with BucketSidecar(server.url, bucket, TIERS__S3__WRITE=policy) as node, connect(node.socket_address) as client:
        eventually(lambda: get(client, next(SEEDS)) == (0, MissReason.UNAVAILABLE), 20.0)
        eventually(lambda: get(client, next(SEEDS))[0] == 0 and "NoSuchBucket" in client.stats().tier_problem, 20.0)
        reasons = {each.reason for each in client.lookup(SPEC, tokens_of(COUNT, next(SEEDS))).chunks}
        assert reasons == {MissReason.UNAVAILABLE}
        stats, command = client.stats(), [sys.executable, "-m", "kvstore_ops.cli", "status", "--socket"]
        assert stats.tiers[0].state == "failing"
        done = WARM.run([*command, node.socket_address], timeout=60)
        assert done.returncode == 0, done.stderr
        status = done.stdout
        words, log = ("NoSuchBucket", "create it", "tiers.s3.bucket"), (node.directory / "log").read_text()
        for said in (stats.tier_problem, stats.tiers[0].reason, " ".join(status.split()), log):
            assert all(word in said for word in words), said
        lines = [line for line in log.splitlines() if "NoSuchBucket" in line]
        assert len(lines) <= 4, "the log does not say it again and again"
        server.client.create_bucket(Bucket=bucket)
        try:
            eventually(lambda: get(client, next(SEEDS)) == (0, MissReason.COLD), 40.0)
            assert (client.stats().tiers[0].state, client.stats().tier_problem) == ("up", "")
        finally:
            server.client.delete_bucket(Bucket=bucket)


def test_slow_down_is_tried_again_and_costs_nothing_more(nodes: Nodes, one: Client, two: Client) -> None:
    seed = given(one)
    nodes.line.refusals = [(503, "SlowDown")] * 2
    eventually(lambda: get(two, seed) == WHOLE, 20.0)


def test_rights_to_read_or_to_write_alone_are_of_use(nodes: Nodes, one: Client, two: Client) -> None:
    nodes.line.denied = frozenset({"PUT", "POST"})
    seed = given(one)
    for _ in range(3):
        given(two)  # refused, chunk by chunk
    assert "s3:PutObject" in two.stats().tier_problem
    assert two.stats().tiers[0].state == "read-only", "it is asked on"
    assert get(two, seed) == WHOLE
    nodes.line.denied = frozenset({"GET", "HEAD"})
    eventually(lambda: get(one, given(two)) == WHOLE, 20.0)  # for some seconds after a denial nothing is sent
    assert get(two, given(one))[0] == 0


def test_copies_that_the_bucket_denies_are_not_counted_as_gone(nodes: Nodes, two: Client) -> None:
    given(two)
    nodes.line.denied = frozenset({"GET"})
    done = run("verify", "--tier", "s3", "--json", "--socket", nodes.two.socket_address.removeprefix("unix://"))
    assert (done.json["outcomes"].keys(), done.code) == ({"s3: not read"}, 10)
    assert "was not given" in done.json["problem"]


def test_an_outage_is_a_bounded_miss_and_ends_by_itself(nodes: Nodes, one: Client, two: Client) -> None:
    if ENDPOINT in os.environ:
        pytest.skip("the server is not ours to stop")
    seed = given(one)
    nodes.server.stop()
    assert get(two, seed)[0] == 0
    fresh = next(SEEDS)
    two.store(SPEC, tokens_of(COUNT, fresh), cache(fresh)).wait(10.0)
    assert get(two, fresh) == WHOLE, "the node has its own"
    nodes.server.start()

    def comes_back() -> bool:
        return get(two, given(one)) == WHOLE

    eventually(comes_back, 30.0)


def test_a_stalled_store_keeps_nobody_waiting(nodes: Nodes, one: Client, two: Client) -> None:
    seed = given(one)
    nodes.line.turn_on(Switch.STALLED)
    assert get(two, seed)[0] == 0
    nodes.line.turn_off()
    eventually(lambda: get(two, seed) == WHOLE, 20.0)


def test_it_starts_without_the_endpoint_and_uses_it_once_it_comes(server: S3Server, one: Client) -> None:
    with S3Proxy(server.url) as line:
        line.turn_on(Switch.AWAY)
        with BucketSidecar(line.url, server.bucket) as node, connect(node.socket_address) as client:
            seed = given(one)
            assert get(client, seed)[0] == 0
            line.turn_off()
            eventually(lambda: get(client, seed) == WHOLE, 20.0)


def test_a_bucket_that_stalls_keeps_no_device_from_its_snapshot(server: S3Server) -> None:
    """A node that is stopped meanwhile gives its upload up, and needs not read every header at its next start."""
    with S3Proxy(server.url) as line:
        patient = {"TIERS__S3__TIMEOUT_S": "60 s", "SERVER__SHUTDOWN_GRACE_S": "1 s"}
        with BucketSidecar(line.url, server.bucket, nvme="64 MiB", **patient) as node:
            with connect(node.socket_address) as client:
                heard, seed = line.hears("PUT"), next(SEEDS)
                assert client.store(SPEC, tokens_of(COUNT, seed), cache(seed)).wait(10.0) is Durability.LOCAL
                assert heard.wait(20.0)
            node.stop()
            assert list(node.directory.rglob("nvme/index")), (node.directory / "log").read_text()
            log = (node.directory / "log").read_text()
            assert "what was on its way there, or from there, is given up" in log
            assert '"error"' not in log


def test_secrets_are_nowhere_to_be_read(nodes: Nodes, one: Client) -> None:
    if ENDPOINT in os.environ:
        pytest.skip("its secrets are not ours to know")
    command = [sys.executable, "-m", "kvstore_ops.cli", "config", "--json"]
    done = WARM.run(command, env=nodes.one.environment, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "tiers.s3.bucket" in shown
    for text in (shown, *((each.directory / "log").read_text() for each in (nodes.one, nodes.two))):
        assert all(secret not in text for secret in KEYS.values())
