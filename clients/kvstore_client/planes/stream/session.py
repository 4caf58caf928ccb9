"""A remote session: a channel, and the stream whose end is the session's end."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import grpc
import numpy as np

from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable
from kvstore.seams.scheduler import start_thread
from kvstore.units import is_loopback, split_address
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import remote_pb2 as rpb
from kvstore.wire import METADATA_SESSION, METADATA_TOKEN
from kvstore.wire.data import split_message
from kvstore_client.copying import Copier
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.incoming import opened, read_out
from kvstore_client.planes.session import ClientSession, PendingCall, check_threads, translated, typed_call
from kvstore_client.planes.store import StagingRun, StoreSource
from kvstore_client.planes.stream.prefix import StreamPrefix
from kvstore_client.planes.stream.store import PrivatePool, StoreWay, StreamUpload, messages_of, stream_timeout_s
from kvstore_client.prompt import EXACTNESSES

PROTOCOL_VERSION = 1
SERVICE = "/kvstore.v1.RemoteService/"
MESSAGE_BYTES_MAX = 64 << 20
LARGE_BYTES = 31 << 20
"""Just below the largest block whose release makes glibc raise its thresholds."""
OPTIONS = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", 4 << 20),
    # Notice a server that vanished without closing its connections within 30 s, as the server does a client.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("SingleThreadedUnaryStream", 1),
)


def keep_message_memory() -> None:
    """Have the C library keep the memory of messages for the next ones. By default it gives a few MiB back to the
    kernel as soon as they are free, and faults them in anew, at half the rate of a stream. It stops that by itself once
    a large block was freed, as engines do all the time; a new client frees such a block here, untouched."""
    np.empty(LARGE_BYTES, np.uint8)


class StreamSession(ClientSession):
    """A connected session. Raises: Unavailable when nobody answers or TLS fails, Unauthenticated for a wrong token."""

    message_bytes: int
    """Bytes of data that a message should carry."""

    def __init__(
        self, address: str, token: str, credentials: grpc.ChannelCredentials | None, server_name: str, timeout_s: float
    ) -> None:
        super().__init__()
        keep_message_memory()
        self._address = address
        options = (*OPTIONS, *((("grpc.ssl_target_name_override", server_name),) if server_name else ()))
        if is_loopback(split_address(address, "address")[0]):
            # By default gRPC goes by http_proxy's proxy to loopback, too: the token would leave this host in the open.
            options += (("grpc.enable_http_proxy", 0),)
        if credentials is None:
            self._use(grpc.insecure_channel(address, options))
        else:
            self._use(grpc.secure_channel(address, credentials, options))
        self.fetch_bytes = self.channel.unary_stream(
            SERVICE + "FetchBytes", rpb.FetchBytesRequest.SerializeToString, None
        )
        self.store_bytes = self.channel.stream_unary(SERVICE + "StoreBytes", None, rpb.StoreBytesResponse.FromString)
        bearer = ((METADATA_TOKEN, f"Bearer {token}"),)
        self._opened = threading.Event()
        self._welcome: rpb.ConnectResponse | None = None
        self._failure: KVStoreError = Unavailable(f"{address} closed the session")
        self._stream: Any = self.channel.unary_stream(
            SERVICE + "Connect", rpb.ConnectRequest.SerializeToString, rpb.ConnectResponse.FromString
        )(rpb.ConnectRequest(version=PROTOCOL_VERSION), metadata=bearer)
        start_thread(partial(_watch, weakref.ref(self), self._stream), "kvstore-watch")
        if not self._opened.wait(timeout_s):
            self.close()
            raise DeadlineExceeded(f"{address} did not open a session within {timeout_s} s")
        if self._welcome is None:
            self._let_go()
            failure = self._failure
            del self._failure
            try:
                raise failure
            finally:
                del failure  # an error keeps the frames it passes, and they would keep the error
        self.metadata = (*bearer, (METADATA_SESSION, self._welcome.secret))
        self.session_id, self.server_pid = self._welcome.session_id, self._welcome.server_pid
        self.staging = PrivatePool()
        self.message_bytes = int(self._welcome.message_bytes)
        self._start_returns(timeout_s)

    def _let_go(self) -> None:
        """End a session that was refused, and let its channel go: the error's frames keep the session, and a channel
        that only the interpreter's end frees may wait for ever for one of gRPC's threads, which are stopped by then."""
        self.close()
        del self.channel, self.cache, self.admin, self.prefills, self.fetch_bytes, self.store_bytes, self._stream

    def greeted(self, welcome: rpb.ConnectResponse) -> None:
        """Note that the session is open."""
        self._welcome = self._welcome or welcome
        self._opened.set()

    def lost(self, error: grpc.RpcError | None) -> None:
        """End the session: its stream has ended."""
        if error is not None:
            found = translated(error)
            if isinstance(found, Unavailable):
                found = Unavailable(
                    f"no sidecar answers on {self._address} ({error.details()}): start it with remote.address set, and "
                    "see that tls= (--tls of commands) is what it expects"
                )
            self._failure = found
        self.close()
        self._opened.set()

    def open_prefix(
        self, wanted: Wanted, request: pb.FetchRequest, digests: list[bytes], timeout_s: float
    ) -> StreamPrefix:
        """Open a prefix by a stream: the first message tells its length, the later ones bring its bytes."""
        del request.layers[:]
        # No layer would mean all of them: where only E is wanted, one is the least that can be asked for.
        request.layers.extend(dict.fromkeys(wanted.layers or wanted.spec.slab_layers[:1]))
        count = 0 if wanted.head_stop is None else wanted.head_stop - wanted.head_start
        asked = rpb.FetchBytesRequest(fetch=request, head_first=wanted.head_start, head_count=count)
        limit_s = stream_timeout_s(timeout_s, wanted.byte_count(len(digests) * wanted.spec.chunk_tokens))
        stream, first = opened(self, self.fetch_bytes, asked, limit_s)
        try:
            fields, _ = split_message(rpb.FetchBytesResponse, first)
        except (ValueError, KVStoreError) as error:
            stream.end_soon()
            raise Unavailable("the sidecar speaks another release's protocol") from error
        return StreamPrefix(self, wanted, fields.head, digests, stream, EXACTNESSES[request.query.exactness])

    def upload(self, source: StoreSource, copier: Copier, timeout_s: float) -> StreamUpload:
        """Return an upload by messages, which are built while others are sent."""
        return StreamUpload(self, StoreWay(self.store_bytes, self.message_bytes), source, copier, timeout_s)

    def fill(self, reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[StagingRun], timeout_s: float) -> None:
        """Send the runs by a stream of messages."""
        messages = messages_of(reservation_id, fills, runs, self.message_bytes)
        limit_s = stream_timeout_s(timeout_s, sum(run.byte_count for run in runs))
        check_threads()
        typed_call(self.store_bytes, messages, limit_s, self.carried)

    def close(self) -> None:
        """End the session. Idempotent."""
        if self.ended.is_set() or self.pid != os.getpid():
            return
        self._ending()()
        self.returns.close()

    def _ending(self) -> Callable[[], object]:
        return partial(_end, self.ended, self._stream, self.channel)


def _end(ended: threading.Event, stream: PendingCall, channel: grpc.Channel) -> None:
    ended.set()
    stream.cancel()
    channel.close()


def _watch(session_of: weakref.ref[StreamSession], stream: Any) -> None:
    """Wait for the end of the session's stream. The thread that does this does not keep the session alive."""
    failure: grpc.RpcError | None = None
    try:
        for message in stream:
            session = session_of()
            if session is not None:
                session.greeted(message)
            session = None
    except grpc.RpcError as error:
        failure = error
    except ValueError:
        pass  # the channel was closed before the stream began
    finally:
        session = session_of()
        if session is not None:
            session.lost(failure)
        session = failure = None
        stream.cancel()
        read_out(stream)  # else gRPC keeps the channel and its connection, too
