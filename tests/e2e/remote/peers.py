"""A peer of the remote plane that does what no proper client would, and what is left of it."""

from __future__ import annotations

from typing import Any

import grpc
import numpy as np
import psutil
from kvstore_client import connect
from kvstore_ops.sidecar import TOKEN, Sidecar

from kvstore.keys import chain_digests, fingerprint
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire import spec_to_message
from kvstore.wire.data import data_message
from tests.specs import small_spec, tokens_of

SPEC = small_spec()

SERVICE = "/kvstore.v1.RemoteService/"

METHODS = [
    *(f"/kvstore.v1.CacheService/{name}" for name in ("RegisterModel", "Lookup", "Store", "Release")),
    *(
        f"/kvstore.v1alpha.AdminService/{name}"
        for name in ("Stats", "Tiers", "ShowChunk", "Hottest", "ListChunks", "Change")
    ),
    SERVICE + "Connect", SERVICE + "FetchBytes", SERVICE + "StoreBytes",
]  # fmt: skip


def left(sidecar: Sidecar) -> tuple[int, ...]:
    """What a session may leave behind: sessions beside our own, leases, reservations, staging, leased bytes."""
    with connect(sidecar.socket_address) as client:
        stats = client.stats()
        held = stats.sessions
        return (
            held.session_count - 1, held.lease_count, held.reservation_count, held.staging_bytes, held.stream_count,
            stats.arena.leased_bytes, stats.arena.reserved_bytes,
        )  # fmt: skip


def plane_process(sidecar: Sidecar) -> psutil.Process:
    """The remote plane's process."""
    movers = sidecar.mover_pids()
    (child,) = (each for each in psutil.Process(sidecar.pid).children() if each.pid not in movers)
    return child


class Peer:
    """A remote client made of a channel, that does what no proper client would."""

    def __init__(self, sidecar: Sidecar, token: str = TOKEN) -> None:
        options = (
            ("grpc.max_receive_message_length", 64 << 20), ("grpc.use_local_subchannel_pool", 1),
            ("grpc.http2.bdp_probe", 0),  # else a slow machine's client reads whole streams ahead
        )  # fmt: skip
        self.channel = grpc.insecure_channel(sidecar.tcp_address, options)
        self.bearer = (("authorization", f"Bearer {token}"),)
        self.stream = self.call("unary_stream", "Connect", rpb.ConnectRequest(version=1).SerializeToString())
        self.secret = rpb.ConnectResponse.FromString(next(self.stream)).secret
        self.metadata = (*self.bearer, ("kvstore-session-bin", self.secret))

    def call(self, kind: str, name: str, request: Any, **options: Any) -> Any:
        path = name if name.startswith("/") else SERVICE + name
        metadata = getattr(self, "metadata", self.bearer)
        return getattr(self.channel, kind)(path)(request, metadata=options.pop("metadata", metadata), **options)

    def register(self, spec: Any) -> bytes:
        request = pb.RegisterModelRequest(spec=spec_to_message(spec)).SerializeToString()
        self.call("unary_unary", METHODS[0], request, timeout=10)
        return fingerprint(spec, spec.kind)

    def fetch(self, spec: Any, tokens: Any, **fields: Any) -> Any:
        query = pb.ChainQuery(
            fingerprint=self.register(spec), digests=b"".join(chain_digests(tokens, spec.chunk_tokens))
        )
        request = rpb.FetchBytesRequest(fetch=pb.FetchRequest(query=query), **fields)
        return self.call("unary_stream", "FetchBytes", request.SerializeToString())

    def reserve(self, spec: Any, chunks: int, seed: int) -> int:
        tokens = tokens_of(chunks * spec.chunk_tokens, seed)
        query = pb.ChainQuery(
            fingerprint=self.register(spec), digests=b"".join(chain_digests(tokens, spec.chunk_tokens))
        )
        step = pb.StoreRequest(reserve=pb.Reserve(query=query, token_digests=bytes(32 * chunks)))
        reply = self.call("unary_unary", "/kvstore.v1.CacheService/Store", step.SerializeToString(), timeout=10)
        return int(pb.StoreResponse.FromString(reply).reservation_id)

    def close(self) -> None:
        self.channel.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def status(call: Any) -> str:
    """How a call ends."""
    try:
        list(call() if callable(call) and not hasattr(call, "cancel") else call)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def store_message(reservation: int, data: bytes, **changes: Any) -> bytes:
    import xxhash

    fields: dict[str, Any] = {
        "reservation_id": reservation, "checksum": xxhash.xxh3_128_digest(data),
        "runs": [rpb.StripRun(chunk=0, strip_first=0, strip_count=4, byte_count=len(data))], **changes,
    }  # fmt: skip
    return data_message(rpb.StoreBytesRequest(**fields), [np.frombuffer(data, np.uint8)])
