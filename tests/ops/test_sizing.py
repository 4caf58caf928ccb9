"""What docs/cluster.md says of sizes is so: of models by arithmetic, of servers by asking real ones."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvstore_client import ModelSpec, connect

from kvstore.chunk import layout_of
from kvstore.config import RedisSettings, S3Settings
from kvstore.tiers.redis.names import FIELD_BYTES_MAX
from kvstore.tiers.s3.connection import CONNECTIONS_BESIDES, QUESTIONS_AT_ONCE, connection_count
from tests.conftest import ROOT
from tests.e2e.two_nodes import TieredNode, two_nodes
from tests.fakes.redis_server import RedisServer
from tests.outage.load import SPEC, cache, tokens

TEXT = (ROOT / "docs" / "cluster.md").read_text()
ROWS = re.findall(
    r"^\| ([\w. ]+) \| (\d+) x (\d+) x (\d+) \| (\d+) KiB \| (\d+) MiB \| (\d+) GB \| ([\d,]+) \|$", TEXT, re.MULTILINE
)
FACTOR = 1.25
LINE_BYTES_PER_S = 10e9 / 8


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_models_sizes_are_those_of_its_chunks(row: tuple[str, ...]) -> None:
    layers, heads, dim, token_kib, chunk_mib, million_gb = map(int, row[1:7])
    spec = ModelSpec.dense(
        row[0], "unverified:size", layer_count=layers, kv_heads=heads, head_dim=dim, hidden_size=4096, vocab_size=32000
    )
    layout = layout_of(spec, spec.kind, spec.chunk_tokens)
    assert layout.body_bytes == chunk_mib << 20
    assert layout.header_bytes < layout.body_bytes / 1000
    token_bytes = layout.body_bytes // spec.chunk_tokens
    assert token_bytes == token_kib << 10
    assert million_gb == round(1_000_000 * token_bytes / 1e9)
    assert int(row[7].replace(",", "")) == round(LINE_BYTES_PER_S / token_bytes, -2)


def test_the_table_has_rows() -> None:
    assert len(ROWS) == 4


@pytest.mark.redis
def test_a_field_takes_no_more_of_a_servers_memory_than_is_said() -> None:
    """Whatever its allocator."""
    assert f"`maxmemory` = {FACTOR} x" in TEXT
    with RedisServer() as server:
        redis = server.client()
        for size in (FIELD_BYTES_MAX, FIELD_BYTES_MAX // 2, FIELD_BYTES_MAX // 4):
            redis.hset("field", b"0123456789abcdef.0", bytes(size))
            taken = redis.memory_usage("field")
            assert size < taken < (FACTOR + 0.01) * size
            redis.delete("field")


@pytest.mark.redis
@pytest.mark.s3
def test_a_node_has_no_more_connections_than_is_said() -> None:
    redis, s3 = RedisSettings(), S3Settings()
    bound = 2 * redis.control_count + redis.reader_count + redis.writer_count + 4
    assert f"4 to a Redis, {bound}\n  by default" in TEXT
    assert f"{CONNECTIONS_BESIDES + QUESTIONS_AT_ONCE} to S3, {connection_count(s3) + QUESTIONS_AT_ONCE} by" in TEXT

    def use(node: TieredNode, first: int) -> None:
        with connect(node.socket_address) as client:
            for seed in range(first, first + 3):
                client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
                client.lookup(SPEC, tokens(seed))
                client.fetch(SPEC, tokens(seed))
                client.locate(SPEC, tokens(seed))

    with two_nodes(nvme="0") as cluster, ThreadPoolExecutor(16) as threads:
        before = len(cluster.redis.client().client_list())
        nodes = [cluster.a, cluster.b] * 8
        list(threads.map(use, nodes, range(0, 3 * len(nodes), 3)))
        assert before < len(cluster.redis.client().client_list()) <= 2 * bound + 1
