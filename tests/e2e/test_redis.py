"""Two real sidecars over one real Redis: what one stored the other has to the bit, and whatever becomes of the server
costs misses, no wrong bytes and no service."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kvstore_client import Client, connect
from kvstore_ops.sidecar import Sidecar

from kvstore.spec import Durability, MissReason, Tier
from tests.e2e.test_nvme import same
from tests.fakes.redis_server import RedisServer
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
COUNT = 4 * STEP
SPEC = small_spec(chunk_tokens=STEP)
WHOLE = (COUNT, MissReason.NONE)
BOUND_S = 8.0
"""No call of these clients takes longer, whatever the server does."""
BACK_S = 20.0
"""More than a tier is left alone for, on a busy machine."""
SEEDS = itertools.count(1)
"""Each scene has contexts of its own."""


class Node(Sidecar):
    """16 chunks of 64 KiB have room in its memory. It reaches Redis as ``redis`` says: settings of ``tiers.redis``."""

    def __init__(self, **redis: str) -> None:
        own = {"CONTROLLER__DEADLINE_S": "5", "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0"}
        own |= {f"TIERS__REDIS__{name.upper()}": value for name, value in {"lookup_s_max": "1 s", **redis}.items()}
        environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
        super().__init__("--capacity", "1 MiB", "--metrics-port", "0", environment=environment)

    def said(self, message: str) -> list[dict[str, Any]]:
        """Lines of its log."""
        lines = [json.loads(line) for line in (self.directory / "log").read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if line["message"] == message]


class Nodes(NamedTuple):
    server: RedisServer
    one: Node
    two: Node


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with RedisServer() as server, Node(url=server.url) as one, Node(url=server.url) as two:
        yield Nodes(server, one, two)


@pytest.fixture
def server(nodes: Nodes) -> Iterator[RedisServer]:
    """Every test leaves it well, and asked by both nodes."""
    yield nodes.server
    if nodes.server.process is None:
        nodes.server.start()
    nodes.server.go_on()
    nodes.server.client().config_set("maxmemory", 0)
    for node in (nodes.one, nodes.two):
        with connect(node.address) as client:
            eventually(lambda client=client: state(client) == "up", BACK_S)


@pytest.fixture
def one(nodes: Nodes, server: RedisServer) -> Iterator[Client]:
    with connect(nodes.one.address) as client:
        yield client


@pytest.fixture
def two(nodes: Nodes, server: RedisServer) -> Iterator[Client]:
    with connect(nodes.two.address) as client:
        yield client


def tokens(seed: int) -> Any:
    return tokens_of(COUNT, seed)


def cache(seed: int) -> Any:
    return random_cache(SPEC, COUNT, seed)


def state(client: Client) -> str:
    return str(client.stats().tiers[-1].state)


def put(client: Client, seed: int) -> int:
    """Into memory; the tier takes it when it can. Returns the seed."""
    assert client.store(SPEC, tokens(seed), cache(seed)).wait(10.0) is Durability.MEMORY
    return seed


def give(client: Client) -> int:
    """The seed of a new context that the shared tier has."""
    seed = put(client, next(SEEDS))
    eventually(lambda: client.stats().backlog_chunk_count == 0)
    return seed


def takes(client: Client, server: RedisServer) -> bool:
    """Return True when a context that is stored now reaches the server."""
    before = len(server.client().keys("kvstore:v1:c:*"))
    give(client)
    return len(server.client().keys("kvstore:v1:c:*")) == before + 4


def get(client: Client, seed: int) -> tuple[int, MissReason]:
    """How much of a context comes, all of it right, and why no more; within the bound."""
    began_s = time.monotonic()
    fetched = client.fetch(SPEC, tokens(seed))
    assert time.monotonic() - began_s < BOUND_S, "it was waited for"
    assert same(fetched, cache(seed), fetched.token_count)
    return fetched.token_count, fetched.reason


def places(client: Client, seed: int) -> list[Tier]:
    """Where a lookup says that its leading chunks are."""
    return [each.tier for each in client.lookup(SPEC, tokens(seed)).chunks if each.tier]


def test_what_a_node_stored_outlives_it(server: RedisServer, two: Client) -> None:
    with Node(url=server.url) as doomed:
        with connect(doomed.address) as client:
            seed = give(client)
        doomed.stop(kill=True)
        assert places(two, seed) == [Tier.REDIS] * 4
        fetched = two.fetch(SPEC, tokens(seed), verify=True)
        assert (fetched.token_count, fetched.tier) == (COUNT, Tier.REDIS)
        assert same(fetched, cache(seed), COUNT)
        assert get(two, seed) == WHOLE


def test_a_server_that_stands_still_costs_bounded_misses(server: RedisServer, one: Client, two: Client) -> None:
    seed = give(one)
    server.stop()
    assert get(two, seed)[0] == 0
    fresh = put(two, next(SEEDS))
    assert get(two, fresh) == WHOLE
    for _ in range(4):
        began_s = time.monotonic()
        assert places(two, next(SEEDS)) == []
        assert time.monotonic() - began_s < BOUND_S
    eventually(lambda: state(two) == "failing")
    server.go_on()
    eventually(lambda: get(two, seed) == WHOLE, BACK_S)
    eventually(lambda: takes(two, server), BACK_S)


def test_a_server_that_dies_and_comes_back_empty(server: RedisServer, one: Client, two: Client) -> None:
    seed = give(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    server.kill()
    assert get(two, seed)[0] == 0
    fresh = put(two, next(SEEDS))
    assert get(two, fresh) == WHOLE
    for _ in range(4):
        assert places(two, next(SEEDS)) == []
    eventually(lambda: state(two) == "failing")
    server.start()
    eventually(lambda: state(two) == "up", BACK_S)
    eventually(lambda: takes(two, server), BACK_S)
    assert get(one, give(two)) == WHOLE


def test_a_server_that_is_flushed(server: RedisServer, one: Client, two: Client) -> None:
    seed = give(one)
    assert places(two, seed) == [Tier.REDIS] * 4
    server.client().flushall()
    assert get(two, seed) == (0, MissReason.EVICTED)
    assert get(one, seed) == WHOLE, "the node has its own"
    assert places(two, seed) == []
    assert get(two, put(two, seed)) == WHOLE


def test_a_server_that_is_full_refuses_stores_and_no_others(server: RedisServer, one: Client, two: Client) -> None:
    seed = give(one)
    server.client().config_set("maxmemory", 1)
    fresh = put(one, next(SEEDS))
    eventually(lambda: "maxmemory" in one.stats().tier_problem)
    assert state(one) == "up"
    assert get(one, fresh) == WHOLE
    assert get(two, seed) == WHOLE
    assert places(two, fresh) == []


def test_what_others_put_in_its_place_is_a_miss(server: RedisServer, one: Client, two: Client) -> None:
    """Other types, nothing but a header, and another chunk's value."""
    client = server.client()
    for number in range(3):
        client.flushall()
        seed = give(one)
        first, *others = client.keys("kvstore:v1:c:*")
        for key in (first, *others):
            if number == 0:
                client.set(key, b"something")
            elif number == 1:
                client.hdel(key, *[name for name in client.hkeys(key) if name != b"h"])
            elif key != first:
                client.copy(first, key, replace=True)
        fetched = get(two, seed)
        assert fetched[0] < COUNT
        assert fetched[1] is MissReason.CORRUPT


def test_a_server_that_is_not_there_at_the_start_is_used_when_it_comes() -> None:
    with RedisServer() as other:
        other.kill()
        with Node(url=other.url) as node, connect(node.address) as client:
            assert get(client, next(SEEDS)) == (0, MissReason.UNAVAILABLE), "another node may have stored it"
            missed = client.lookup(SPEC, tokens(next(SEEDS))).chunks
            assert {chunk.reason for chunk in missed} == {MissReason.UNAVAILABLE}
            mine = put(client, next(SEEDS))
            assert get(client, mine) == WHOLE
            eventually(lambda: state(client) == "failing")
            time.sleep(1.5)
            assert len(node.said("going on without the server")) == 1
            other.start()
            eventually(lambda: state(client) == "up", BACK_S)
            eventually(lambda: takes(client, other), BACK_S)
            eventually(lambda: get(client, next(SEEDS)) == (0, MissReason.COLD), BACK_S)


def test_a_wrong_password_is_named_and_shown_to_nobody(tmp_path: Path) -> None:
    file = tmp_path / "password"
    with RedisServer("--requirepass", "correct-horse") as server:
        for settings in ({"url": server.url, "password_file": str(file)}, {"url": f"unix://:hunter2@{server.path}"}):
            file.write_text("hunter2")
            with Node(**settings) as node, connect(node.address) as client:
                assert get(client, put(client, next(SEEDS))) == WHOLE
                eventually(lambda client=client: "tiers.redis.password_file" in client.stats().tier_problem)
                assert "hunter2" not in (node.directory / "log").read_text()
                file.write_text("correct-horse")
                if "password_file" in settings:
                    eventually(lambda client=client: state(client) == "up", BACK_S)


# ---------------------------------------------------------------- a server of its own


def own_server(node: Node) -> int:
    """Its process. 0: there is none."""
    for each in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split():
        try:
            if b"redis-server" in Path(f"/proc/{each}/cmdline").read_bytes():
                return int(each)
        except FileNotFoundError:
            continue
    return 0


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_an_embedded_server_ends_with_its_sidecar(kill: bool) -> None:
    with Node(embedded="true", embedded_bytes="32 MiB") as node:
        place = node.directory / "redis" / "default"
        with connect(node.address) as client:
            assert state(client) == "up"
            eventually(lambda: client.stats().tiers[-1].capacity_bytes == 32 << 20)
            seed = give(client)
            for _ in range(6):
                give(client)  # memory has no room for so many
            assert places(client, seed) == [Tier.REDIS] * 4
            assert get(client, seed) == WHOLE
        assert place.stat().st_mode & 0o777 == 0o700
        assert (place / "redis.sock").stat().st_mode & 0o777 == 0o600
        assert not node.said("going on without the server")
        pid = own_server(node)
        assert pid
        node.stop(kill=kill)
        eventually(lambda: is_gone(pid))
        assert {each.name for each in place.iterdir()} <= {"redis.sock", "log"}, "it keeps nothing"


def test_an_embedded_server_that_dies_is_started_again() -> None:
    with Node(embedded="true", embedded_bytes="32 MiB") as node, connect(node.address) as client:
        seed = give(client)
        pid = own_server(node)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: own_server(node) not in (0, pid), BACK_S)
        assert get(client, seed) == WHOLE
        eventually(lambda: state(client) == "up", BACK_S)
        for _ in range(6):
            give(client)
        assert len(node.said("the embedded Redis server ended: starting it again")) == 1


def test_a_node_that_may_only_read_reads_on_whatever_it_stores(server: RedisServer, one: Client) -> None:
    """Its refused writes are no reason to leave the server alone."""
    rights = ("on", ">pw", "~*", "+@read", "+@scripting", "+ping", "+info", "-@write")
    server.client().execute_command("ACL", "SETUSER", "reader", *rights)
    seeds = [give(one) for _ in range(3)]
    with Node(url=f"unix://reader:pw@{server.path}") as node, connect(node.address) as reader:
        for seed in seeds:
            put(reader, next(SEEDS))
            eventually(lambda: reader.stats().backlog_chunk_count == 0)
            assert get(reader, seed) == WHOLE
        assert state(reader) == "read-only"
        assert "tiers.redis.username" in reader.stats().tier_problem
