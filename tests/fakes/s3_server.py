"""A real S3 server in a process of its own, on loopback: moto's, or the one that KVSTORE_TEST_S3_ENDPOINT names."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from functools import cached_property
from typing import Any

import boto3
import botocore
from botocore.exceptions import BotoCoreError, ClientError

from tests.conftest import MOTO

START_TIMEOUT_S = 20.0
ENDPOINT = "KVSTORE_TEST_S3_ENDPOINT"
STRANGER = "KVSTORE_TEST_S3_STRANGER"
"""ACCESS_KEY:SECRET_KEY of another user of that server, who has no right to the bucket: "stranger"."""
KEYS = {"AWS_ACCESS_KEY_ID": "testing-key", "AWS_SECRET_ACCESS_KEY": "testing-secret-that-no-log-may-show"}
"""What moto takes, and nothing else would."""


class S3Server:
    """Started at once. ``client`` is a plain one, for tests that look, damage or remove."""

    bucket = "kvstore-tests"

    def __init__(self) -> None:
        given = os.environ.get(ENDPOINT, "")
        if not given:
            os.environ.update(KEYS)
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.url = given
        if not given:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self.port = free.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self.start()
        self._make_bucket()

    def start(self) -> None:
        """Again, after ``stop``; what it held is gone, its bucket is there."""
        self._process = MOTO.popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until_s:
            try:
                self._make_bucket()
            except BotoCoreError:
                time.sleep(0.05)
            else:
                return
        raise TimeoutError("moto's server does not start")

    @cached_property
    def client(self) -> Any:
        config = botocore.config.Config(
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            connect_timeout=2,
            read_timeout=10,
            max_pool_connections=16,
        )
        return boto3.client("s3", endpoint_url=self.url, region_name="us-east-1", config=config)

    def _make_bucket(self) -> None:
        try:
            self.client.create_bucket(Bucket=self.bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def keys(self, prefix: str = "") -> list[str]:
        """Of its objects."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        return [each["Key"] for page in pages for each in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        return bytes(self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read())

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=key, Body=data)

    def drop(self, prefix: str = "") -> None:
        """All of them."""
        for key in self.keys(prefix):
            self.client.delete_object(Bucket=self.bucket, Key=key)

    def stand_still(self) -> None:
        """It answers nobody, and keeps its connections."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``stand_still``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self._process is not None, f"the server of {ENDPOINT} is not ours to stop"
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """Killed. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
