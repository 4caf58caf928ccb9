"""A client made of sockets and stubs, that sends what no proper client would."""

from __future__ import annotations

import array
import json
import mmap
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from kvstore_ops.sidecar import Sidecar

from kvstore.chunk import layout_of
from kvstore.keys import chain_digests, token_digest
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore.v1alpha import admin_pb2, admin_pb2_grpc
from kvstore.wire import METADATA_SESSION, spec_to_message
from tests.specs import tokens_of

TIMEOUT_S = 30.0
"""Seconds that a busy machine may take for what an idle one does at once."""
PAUSE_S_MAX = 0.05


def eventually(condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> None:
    """Wait for what happens in another process."""
    until, pause_s = time.monotonic() + seconds, 0.005
    while not condition():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, PAUSE_S_MAX)  # a look often is a call: what takes long is asked for less often


class Handoff:
    """The hand-off socket, one packet at a time."""

    def __init__(self, directory: Path, tenant: str = "") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect(str(directory / "run" / tenant / "data.sock"))

    def send(self, packet: bytes) -> None:
        self.socket.send(packet)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """An answer and its descriptors; ConnectionError when the server hung up."""
        data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(253 * 4))
        descriptors = array.array("i")
        for _, _, payload in ancillary:
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
        if not data:
            raise ConnectionResetError("hung up")
        return json.loads(data), descriptors.tolist()

    def exchange(self, **request: Any) -> tuple[dict[str, Any], list[int]]:
        self.send(json.dumps(request).encode())
        return self.receive()

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _t: TracebackType | None
    ) -> None:
        self.close()


class Raw(Handoff):
    """A whole session: secret, memory and stubs. ``tenant``: one beside the default one."""

    def __init__(self, sidecar: Sidecar, tenant: str = "") -> None:
        super().__init__(sidecar.directory, tenant)
        self.welcome, self.descriptors = self.exchange(op="hello", version=1)
        assert self.welcome["op"] == "welcome", self.welcome
        self.secret = bytes.fromhex(self.welcome["secret"])
        self.channel = grpc.insecure_channel(f"unix:{sidecar.directory / 'run' / tenant / 'kvstore.sock'}")
        self.cache: Any = cache_pb2_grpc.CacheServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []
        self.channel.close()
        super().close()

    def call(self, method: str, request: Any, *, secret: bytes | None = None) -> Any:
        """A call under this session's secret, or another."""
        metadata = ((METADATA_SESSION, self.secret if secret is None else secret),)
        stub = self.admin if hasattr(self.admin, method) else self.cache
        answer = getattr(stub, method)(request, timeout=TIMEOUT_S, metadata=metadata)
        return list(answer) if method in ("Fetch", "ListChunks") else answer

    def status(self, method: str, request: Any, *, secret: bytes | None = None) -> str:
        """The name of the status a call ends with."""
        try:
            self.call(method, request, secret=secret)
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def stats(self) -> Any:
        return self.call("Stats", admin_pb2.StatsRequest())

    def staging(self, byte_count: int) -> tuple[int, mmap.mmap]:
        """Writable memory of this session."""
        reply, (descriptor,) = self.exchange(op="staging", bytes=byte_count)
        try:
            return reply["staging_id"], mmap.mmap(descriptor, byte_count)
        finally:
            os.close(descriptor)

    # ------------------------------------------------------------ a chain, by hand

    def query(self, spec: ModelSpec, tokens: Any) -> pb.ChainQuery:
        """Registers the spec. The chain of ``tokens``."""
        name = self.call("RegisterModel", pb.RegisterModelRequest(spec=spec_to_message(spec))).fingerprint
        return pb.ChainQuery(fingerprint=name, digests=b"".join(chain_digests(tokens, spec.chunk_tokens)))

    def reserve(self, spec: ModelSpec, tokens: Any, **changes: Any) -> Any:
        """A reservation for whole chunks."""
        size = spec.chunk_tokens
        names = [token_digest(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        fields = {"query": self.query(spec, tokens), "token_digests": b"".join(names), **changes}
        return self.call("Store", pb.StoreRequest(reserve=pb.Reserve(**fields)))

    def staged(self, spec: ModelSpec, chunk_count: int) -> tuple[list[pb.Fill], mmap.mmap]:
        """Random bytes for whole chunks, and the fills that name them."""
        layout = layout_of(spec, spec.kind, spec.chunk_tokens)
        run = int(layout.strip_offsets[-1] + layout.strip_lengths[-1])
        step = -(-run // 4096) * 4096
        staging_id, memory = self.staging(step * chunk_count)
        memory[:] = np.random.default_rng(7).bytes(len(memory))
        fills = [
            pb.Fill(
                chunk=index, strip_first=0, strip_count=layout.strip_count, staging_id=staging_id,
                staging_offset=index * step,
            )
            for index in range(chunk_count)
        ]  # fmt: skip
        return fills, memory

    def store(self, spec: ModelSpec, chunk_count: int, seed: int = 0) -> Any:
        """Stores what is missing of a chain of random bytes; returns its tokens."""
        tokens = tokens_of(chunk_count * spec.chunk_tokens, seed)
        fills, _ = self.staged(spec, chunk_count)
        reserved = self.reserve(spec, tokens)
        wanted = [fill for fill in fills if reserved.states[fill.chunk] == pb.STORE_STATE_WANTED]
        commit = pb.Commit(reservation_id=reserved.reservation_id, fills=wanted)
        answer = self.call("Store", pb.StoreRequest(commit=commit))
        assert answer.committed_count == chunk_count
        return tokens
