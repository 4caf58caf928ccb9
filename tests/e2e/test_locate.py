"""Where prompts are, asked of real sidecars that share one Redis."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from kvstore_client import Client, PageHashes, connect
from kvstore_client.lookup.locate import Location, PrefixAt
from kvstore_ops.locate import render
from kvstore_ops.sidecar import TOKEN, Sidecar
from rich.console import Console

from kvstore.errors import InvalidRequest
from kvstore.keys import chain_digests
from kvstore.spec import Durability, Exactness, Tier
from tests.conftest import ROOT, WARM
from tests.e2e.s3 import BucketSidecar
from tests.fakes.redis_server import RedisServer
from tests.fakes.s3_server import ENDPOINT, S3Server
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of
from tests.tiers.redis.test_topology import Cluster

SPEC = small_spec()
STEP = SPEC.chunk_tokens


class Node(Sidecar):
    def __init__(self, name: str, redis: RedisServer, url: str = "") -> None:
        own = {"KVSTORE__SERVER__NODE": name, "KVSTORE__TIERS__REDIS__URL": url or redis.url}
        super().__init__("--capacity", "2 MiB", nvme="16 MiB", plane="remote", environment={**os.environ, **own})


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def a(redis: RedisServer) -> Iterator[Node]:
    with Node("a", redis) as node:
        yield node


@pytest.fixture(scope="module")
def b(redis: RedisServer) -> Iterator[Node]:
    with Node("b", redis) as node:
        yield node


def keep(client: Client, count: int, seed: int, spec: Any = SPEC) -> Any:
    tokens = tokens_of(count, seed)
    assert client.store(spec, tokens, random_cache(spec, count, seed)).wait(20) > Durability.NONE
    return tokens


def local(node: Node) -> Client:
    return connect(node.socket_address)


def test_a_router_learns_how_far_each_node_and_the_shared_tier_have_a_prompt(a: Node, b: Node) -> None:
    with local(a) as writer, local(b) as other, connect(b.address, token=TOKEN) as router:
        tokens = keep(writer, 4 * STEP, 1)
        keep(other, 2 * STEP, 1)

        def is_told() -> bool:
            rows = set(router.locate(SPEC, tokens).prefixes)
            return {("a", Tier.DRAM, 4 * STEP), ("b", Tier.DRAM, 2 * STEP), ("", Tier.REDIS, 4 * STEP)} <= rows

        eventually(is_told)
        found = router.locate(SPEC, tokens)
        assert found.asked == "b"
        assert found.reason == ""
        assert found.nodes == {"a": 4 * STEP, "b": 2 * STEP}
        strange, longer, none = router.locate_each(SPEC, [tokens_of(64, 99), [*tokens, *tokens_of(64, 2)], []])
        assert strange.prefixes == none.prefixes == ()
        assert longer.nodes == found.nodes
        eventually(lambda: router.locate(SPEC, [*tokens, *tokens_of(64, 2)]).prefixes == found.prefixes)
        assert router.locate(SPEC, tokens, exactness=Exactness.DERIVED).prefixes == ()
        assert dict(writer.locate(SPEC, tokens).nodes) == found.nodes


def test_by_an_engines_block_hashes(a: Node, b: Node) -> None:
    tokens = tokens_of(3 * STEP, 5)
    hashes = PageHashes("vllm-sha256_cbor", STEP, chain_digests(tokens, STEP), tokens)
    with local(a) as writer, local(b) as router:
        assert writer.store(SPEC, hashes, random_cache(SPEC, 3 * STEP, 5)).wait(20) > Durability.NONE
        eventually(lambda: router.locate(SPEC, hashes).nodes == {"a": 3 * STEP})
        assert router.locate(SPEC, tokens).prefixes == ()


def test_a_node_that_stopped_counts_no_more_and_what_it_stored_is_still_shared(redis: RedisServer, b: Node) -> None:
    with Node("c", redis) as node, local(b) as router:
        with local(node) as writer:
            tokens = keep(writer, 2 * STEP, 7)
            eventually(lambda: router.locate(SPEC, tokens).nodes == {"c": 2 * STEP})
            eventually(lambda: ("", Tier.REDIS, 2 * STEP) in router.locate(SPEC, tokens).prefixes)  # then it may stop
        node.stop()
        assert router.locate(SPEC, tokens).nodes == {}
        eventually(lambda: ("", Tier.REDIS, 2 * STEP) in router.locate(SPEC, tokens).prefixes)  # its bound is 5 ms
        node.start()
        eventually(lambda: router.locate(SPEC, tokens).nodes == {"c": 2 * STEP})


def test_what_leaves_a_node_is_told_and_so_is_all_after_redis_lost_everything(redis: RedisServer, a: Node) -> None:
    with Node("d", redis) as node, local(a) as router, local(node) as writer:
        first = keep(writer, 2 * STEP, 11)
        eventually(lambda: router.locate(SPEC, first).nodes == {"d": 2 * STEP})
        eventually(lambda: ("", Tier.REDIS, 2 * STEP) in router.locate(SPEC, first).prefixes)  # no write comes after
        with redis.client() as client:
            client.flushall()
        assert router.locate(SPEC, first).prefixes == ()
        eventually(lambda: router.locate(SPEC, first).nodes == {"d": 2 * STEP}, 30)


def test_a_node_that_may_only_read_is_not_announced_and_says_so_and_finds_the_others(
    redis: RedisServer, a: Node
) -> None:
    rights = ("reset", "on", ">pw", "~*", "+@read", "+@scripting", "+ping", "+info", "-@write")
    redis.client().execute_command("ACL", "SETUSER", "reader", *rights)
    with Node("reader", redis, f"unix://reader:pw@{redis.path}") as node, local(node) as reader, local(a) as writer:
        tokens = keep(writer, 2 * STEP, 41)
        eventually(lambda: reader.locate(SPEC, tokens).nodes == {"a": 2 * STEP})
        assert reader.locate(SPEC, tokens).reason == ""
        eventually(lambda: "server.node = reader" in reader.stats().tier_problem)
        assert "tiers.redis.username" in reader.stats().tier_problem
        assert "do not hear of this one" not in writer.stats().tier_problem
        keep(reader, 3 * STEP, 42)
        assert (node.directory / "log").read_text().count("this node is not announced") == 1


def test_a_node_of_a_cluster_that_dies_takes_no_other_nodes_rows_away() -> None:
    """A router hears of what is shared as far as it can be read, and that there may be more."""
    with ExitStack() as stack:
        cluster = Cluster(stack, None)
        for each in cluster.servers:
            each.client().config_set("cluster-require-full-coverage", "no")
        one, two = (stack.enter_context(Node(name, cluster.servers[0], cluster.url)) for name in ("one", "two"))
        writer, router = stack.enter_context(local(one)), stack.enter_context(local(two))
        tokens = keep(writer, 40 * STEP, 51)

        def is_known() -> bool:
            found = router.locate(SPEC, tokens)
            rows = {("one", Tier.DRAM, 40 * STEP), ("", Tier.REDIS, 40 * STEP)}
            return rows <= set(found.prefixes) and (found.reason, found.unknown) == ("", ())

        eventually(is_known, 20)
        cluster.servers[cluster.owner_of(b"kvstore:v1:nodes:default")].kill()

        def is_partly_known() -> bool:
            found = router.locate(SPEC, tokens)
            return (
                "still live" in found.reason and Tier.REDIS in found.unknown and found.nodes.get("one", 0) > 30 * STEP
            )

        eventually(is_partly_known, 20)


def test_without_a_redis_only_this_node_is_known(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as client:
        tokens = keep(client, STEP, 3)
        found = client.locate(SPEC, tokens)
        assert [each[1:] for each in found.prefixes] == [(Tier.DRAM, STEP)]
        assert "tiers.redis.url" in found.reason
        with pytest.raises(InvalidRequest, match="contexts"):
            client.locate_each(SPEC, [tokens_of(1024 * STEP, seed) for seed in range(17)])
        assert client.locate_each(SPEC, []) == []
    assert client.locate(SPEC, tokens).prefixes == ()


@pytest.mark.s3
@pytest.mark.skipif(ENDPOINT in os.environ, reason="that server is not ours to stop")
def test_what_lies_in_a_bucket_is_told_and_while_it_does_not_answer_that_nothing_is_known(tmp_path: Path) -> None:
    server = S3Server()
    try:
        with BucketSidecar(server.url, server.bucket) as one, BucketSidecar(server.url, server.bucket) as two:
            with connect(one.socket_address) as writer, connect(two.socket_address) as router:
                tokens = tokens_of(3 * STEP, 21)
                cache = random_cache(SPEC, len(tokens), 21)

                def is_there() -> bool:  # a tier that answered late, as on a busy machine, is left alone for a while
                    receipt = writer.store(SPEC, tokens, cache, durability=Durability.OBJECT)
                    receipt.wait(20)
                    return Durability.OBJECT in receipt.reached

                eventually(is_there, 30)
                found, other = router.locate_each(SPEC, [tokens, tokens_of(STEP, 22)])
                assert (found.prefixes, found.unknown) == ((("", Tier.S3, 3 * STEP),), ())
                assert (other.prefixes, other.unknown) == ((), ()), "it answered that it has nothing"
                server.stop()
                gone = router.locate(SPEC, tokens)
                assert (gone.prefixes, gone.unknown) == ((), (Tier.S3,))
                contexts = [[int(each) for each in tokens[:count]] for count in (STEP - 1, 3 * STEP)]
                short, whole = (tmp_path / name for name in ("short.json", "whole.json"))
                short.write_text(json.dumps(contexts[0]))
                whole.write_text(json.dumps(contexts))
                asked = ("--socket", two.socket_address, "--model", SPEC.model_id, "--prompt")
                said = run(*asked, str(short)).stdout
                assert ("not known of s3" in said, "take whole chunks only" in said) == (False, True)
                said = run(*asked, str(whole)).stdout
                assert ("not known of s3" in said, "context 1: 15 tokens, less than a chunk" in said) == (True, True)
                told = json.loads(run(*asked, str(whole), "--json").stdout)
                assert [each["unknown"] for each in told] == [[], ["S3"]]
    finally:
        server.stop()


def run(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvstore_ops.cli", "locate", *arguments]
    return WARM.run(command, cwd=ROOT, timeout=60, given=given)


def test_the_command_prints_a_table_or_json_and_says_what_is_wrong(sidecar: Sidecar, tmp_path: Path) -> None:
    socket = ("--socket", f"{sidecar.directory}/run/kvstore.sock")
    with connect(sidecar.address) as client:
        tokens = keep(client, STEP, 4)
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps([int(each) for each in tokens]))
    shown = run(*socket, "--model", SPEC.model_id, "--prompt", str(prompt))
    assert shown.returncode == 0, shown.stderr
    assert "memory" in shown.stdout
    assert "100%" in shown.stdout
    both = run(*socket, "--model", SPEC.model_id, "--prompt", "-", "--json", given=f"[{prompt.read_text()}, [1, 2]]")
    one, other = json.loads(both.stdout)
    assert one["prefixes"][0]["token_count"] == STEP
    assert other["prefixes"] == []
    for arguments, word in (
        (("--model", "nobody", "--prompt", str(prompt)), "--model nobody"),
        (("--model", SPEC.model_id, "--prompt", str(tmp_path / "none")), "--prompt"),
        (("--model", SPEC.model_id, "--prompt", "-"), "JSON"),
    ):
        wrong = run(*socket, *arguments, given="no tokens")
        assert wrong.returncode != 0
        assert word in wrong.stderr


def test_what_other_nodes_are_called_is_harmless_in_the_table() -> None:
    """Whoever writes the shared Redis chooses their names."""
    name = "[bold]\x1b[2J\u202enode" + "x" * 300
    found = Location((PrefixAt(name, Tier.DRAM, 16),), "asked", "[/]\x1b]0;title\x07")
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render([found], [16]))
    said = console.export_text()
    assert "[bold]\\u001b[2J\\u202enode" in said
    assert "[/]\\u001b]0;title\\u0007" in said
