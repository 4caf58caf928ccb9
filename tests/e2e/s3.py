"""Sidecars that share a bucket."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore_ops.sidecar import Sidecar

from tests.fakes.s3_server import S3Server

PREFIX = "tests/e2e"


@contextmanager
def bucket_server() -> Iterator[S3Server]:
    """Yield an S3 server whose bucket has nothing under ``PREFIX``, before and afterwards."""
    server = S3Server()
    server.drop(PREFIX)
    try:
        yield server
    finally:
        server.drop(PREFIX)
        server.stop()


class BucketSidecar(Sidecar):
    """One node, the service as everybody runs it. 16 chunks of 64 KiB have room in its memory. ``nvme``: the size of
    its device tier."""

    def __init__(self, endpoint_url: str, bucket: str, nvme: str = "0", **more: str) -> None:
        own = {
            "CONTROLLER__DEADLINE_S": "5", "POLICY__SCRUB_BYTES_PER_S": "0", "POLICY__CANARY_INTERVAL_S": "0",
            "TIERS__S3__BUCKET": bucket, "TIERS__S3__PREFIX": PREFIX, "TIERS__S3__ENDPOINT_URL": endpoint_url,
            "TIERS__S3__ADDRESSING": "path", "TIERS__S3__CHUNK_BYTES_MIN": "0", "TIERS__S3__WRITE": "back",
            "TIERS__S3__LOOKUP_S_MAX": "1 s", "TIERS__S3__TIMEOUT_S": "2 s", **more,
        }  # fmt: skip
        environment = {**os.environ, **{f"KVSTORE__{name}": value for name, value in own.items()}}
        super().__init__("--capacity", "1 MiB", nvme=nvme, plane="remote", environment=environment)
