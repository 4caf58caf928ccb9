"""Two real sidecars over one real Redis and one real S3 server, both in use at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from kvstore_client import Client
from kvstore_ops.sidecar import Sidecar

from tests.fakes.redis_server import RedisServer
from tests.fakes.s3_server import S3Server
from tests.server.raw import eventually

PREFIX = "tests/two-nodes"
CHUNK_KEYS = "kvstore:v1:c:*"
FLOOD_BYTES = 256 << 10
MEMORY_BYTES = 2 << 20


class TieredNode(Sidecar):
    """One node. 30 chunks of 64 KiB have room in its memory, many more on its device. What is stored goes to
    both shared tiers at once, unless ``own`` says otherwise: settings by their names, without KVSTORE__."""

    def __init__(self, name: str, redis: RedisServer, s3: S3Server, nvme: str = "16 MiB", **own: str) -> None:
        settings = {
            "SERVER__NODE": name, "CONTROLLER__DEADLINE_S": "5", "POLICY__SCRUB_BYTES_PER_S": "0",
            "POLICY__CANARY_INTERVAL_S": "0", "TIERS__NVME__REGION_BYTES": "1 MiB",
            "LIMITS__LEASED_BYTES_MAX": "64 MiB",
            "TIERS__REDIS__URL": redis.url, "TIERS__REDIS__LOOKUP_S_MAX": "1 s",
            "TIERS__S3__BUCKET": s3.bucket, "TIERS__S3__PREFIX": PREFIX, "TIERS__S3__ENDPOINT_URL": s3.url,
            "TIERS__S3__ADDRESSING": "path", "TIERS__S3__CHUNK_BYTES_MIN": "0", "TIERS__S3__WRITE": "back",
            "TIERS__S3__LOOKUP_S_MAX": "1 s", "TIERS__S3__TIMEOUT_S": "2 s", **own,
        }  # fmt: skip
        environment = {**os.environ, **{f"KVSTORE__{each}": value for each, value in settings.items()}}
        super().__init__("--capacity", str(MEMORY_BYTES), nvme=nvme, plane="remote", environment=environment)


@dataclass(frozen=True)
class Cluster:
    """What two nodes share, and the nodes."""

    redis: RedisServer
    s3: S3Server
    a: TieredNode
    b: TieredNode

    def in_redis(self) -> dict[str, bytes]:
        """Storage key, in hex -> the server's key."""
        keys = self.redis.client().keys(CHUNK_KEYS)
        return {key.partition(b"{")[2].partition(b"}")[0].decode(): key for key in keys}

    def in_s3(self) -> dict[str, str]:
        """Storage key, in hex -> the object's."""
        return {key.rpartition("/")[2]: key for key in self.s3.keys(PREFIX)}

    def drop(self, *names: str, redis: bool = True, s3: bool = True) -> None:
        """These chunks, or all, from the shared tiers."""
        if redis:
            there = self.in_redis()
            self.redis.client().unlink(b"none", *(there[name] for name in names or there if name in there))
        if s3:
            objects = self.in_s3()
            for name in objects.keys() & set(names or objects):
                self.s3.client.delete_object(Bucket=self.s3.bucket, Key=objects[name])


@contextmanager
def two_nodes(nvme: str = "16 MiB", **own: str) -> Iterator[Cluster]:
    """All of it, fresh. For both nodes: what ``TieredNode`` takes."""
    with ExitStack() as ends:
        redis = ends.enter_context(RedisServer())
        s3 = S3Server()
        ends.callback(s3.stop)
        s3.drop(PREFIX)
        nodes = [ends.enter_context(TieredNode(name, redis, s3, nvme, **own)) for name in ("a", "b")]
        ends.callback(s3.drop, PREFIX)
        yield Cluster(redis, s3, *nodes)


def quiet(client: Client) -> None:
    """Every tier has what it takes."""
    eventually(lambda: client.stats().backlog_chunk_count == 0, 20.0)


def flood(client: Client) -> None:
    """Fill the node's memory with what no shared tier takes: all else leaves it."""
    for number in range(2 * MEMORY_BYTES // FLOOD_BYTES):
        client.put_bytes("flood", str(number), bytes(FLOOD_BYTES)).wait(10.0)
    quiet(client)
