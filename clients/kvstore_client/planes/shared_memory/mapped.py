"""One connection: the hand-off socket, the mapped regions, the gRPC channel and the session's secret.

A session lives until either end closes the hand-off socket. A watcher thread waits for that; then the mappings
are dropped as soon as no copy uses them, so that a restarted server's arena does not double the node's memory.
After a fork the child has no mapping (they are not inherited), closes the sockets it inherited, and connects anew.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, Unavailable
from kvstore.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    DeviceAnswer,
    DeviceQuestion,
    Done,
    Hello,
    PresenceAnswer,
    Question,
    RegionsAnswer,
    RegionsQuestion,
    StagingAnswer,
    StagingClose,
    StagingQuestion,
    Welcome,
)
from kvstore.handoff.passing import Said, check_descriptors, expected, open_socket, receive, send
from kvstore.seams import Deadline, SystemClock
from kvstore.seams.mapping import Bytes, SharedMap, closing_all
from kvstore.seams.scheduler import start_thread
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import METADATA_SESSION
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import Presence
from kvstore_client.planes.session import ClientSession
from kvstore_client.planes.shared_memory.known import KnownChunks
from kvstore_client.planes.shared_memory.pool import DevicePool, is_same_device, opened_pool
from kvstore_client.planes.store import StagingRun

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
    ("SingleThreadedUnaryStream", 1),
)
_LOOK = int(socket.MSG_PEEK | socket.MSG_DONTWAIT)
"""Computed once: Python makes an object of each sum of flags."""
CALL_FILLS_MAX = 64
"""Runs of one call, of 37 bytes at most each: so many fit into the smallest limits.message_bytes_max, 4 KiB, and the
sidecar begins them at once: where it refuses a call, it reads none of them."""
_clock = SystemClock()
_log = logging.getLogger("kvstore.client")


class MappedMemory(ClientSession):
    """A connected session: its hand-off and its memory. ``MappedSession`` moves chunks by it. Methods raise Unavailable
    once it has ended.

    Raises: Unavailable when nobody listens; PermissionDenied, Exhausted, InvalidRequest as the server says.
    """

    def __init__(self, socket_path: Path, timeout_s: float, *, is_operator: bool = False) -> None:
        """``is_operator``: the session is of an operator's command."""
        super().__init__()
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._answers: list[tuple[Answer, list[int]]] = []
        self._arrived = threading.Condition()
        self._late_count = 0
        """Answers that are still to come, and that nobody waits for: the next ones, as they come in order."""
        self.warm = KnownChunks()
        self._regions: dict[int, Bytes] = {}
        self._pools: dict[str, DevicePool | None] = {}
        """The sidecar's pool, by the device that was asked for; None where it lies on another one."""
        self._socket = self._connect(socket_path, timeout_s)
        try:
            welcome, descriptors = self._welcome(socket_path, Hello(PROTOCOL_VERSION, is_operator=is_operator))
            self.metadata = ((METADATA_SESSION, bytes.fromhex(welcome.secret)),)
            self.session_id = welcome.session_id
            self.server_pid = welcome.server_pid
            with closing_all(descriptors):
                check_descriptors(welcome, descriptors)
                generations = SharedMap(descriptors[0], welcome.generations_bytes, writable=False).bytes
                self.generations: NDArray[np.uint64] = generations.view(np.uint64)
                self._add_regions(welcome, descriptors[1:])
        except BaseException:
            self._socket.close()
            raise
        self._bound_sends()
        self._is_told = "uses" in welcome.offers
        self._has_pool = "device" in welcome.offers
        self._say = partial(_send_now, self._socket)
        if "presence" in welcome.offers:
            self.presence = Presence(self._say, partial(_is_open, self._socket))
            self.presence.ask()
        self._use(grpc.insecure_channel(f"unix:{socket_path}", _CHANNEL_OPTIONS))
        self._start_returns(timeout_s)
        start_thread(partial(_watch, weakref.ref(self), self._socket), "kvstore-watch")

    @staticmethod
    def _connect(socket_path: Path, timeout_s: float) -> socket.socket:
        path = socket_path.with_name("data.sock")
        connection = open_socket()
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            found = f"no sidecar answers on {socket_path} ({path.name} beside it: {error.strerror or error})"
            remedy = "start one with `kvstore serve`, or set KVSTORE_SOCKET to its kvstore.sock"
            if isinstance(error, PermissionError):
                remedy = "it serves its own user, or the one of tenants.NAME.uid: run as that user"
            raise Unavailable(f"{found}: {remedy}", socket=str(socket_path)) from error
        return connection

    # ------------------------------------------------------------ hand-off

    def _welcome(self, socket_path: Path, hello: Hello) -> tuple[Welcome, list[int]]:
        try:
            send(self._socket, hello)
            return expected(Welcome, *receive(self._socket))
        except OSError as error:
            found = f"the sidecar on {socket_path} took the connection and opened no session"
            why = f"no answer within {self._timeout_s:g} s" if isinstance(error, TimeoutError) else error
            remedy = "it is ending, stopped or overloaded: see its log, and start it again if it stays so"
            raise Unavailable(f"{found} ({why}): {remedy}", socket=str(socket_path)) from error

    def _bound_sends(self) -> None:
        """Let the watcher wait for packets without limit, and bound sends: a stalled sidecar takes no packets once its
        queue is full."""
        self._socket.settimeout(None)
        seconds = int(self._timeout_s)
        limit = struct.pack("ll", seconds, max(1, int((self._timeout_s - seconds) * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _exchange(self, question: Question, kind: type[Said], *, may_be_late: bool = False) -> tuple[Said, list[int]]:
        """Send one question, and return its answer of this kind, which the watcher receives. Raises the error of a
        refusal. Without an answer the session ends; where it ``may_be_late``, it is dropped when it comes."""
        with self._lock:
            try:
                send(self._socket, question)
            except OSError as error:
                raise Unavailable("the sidecar is gone") from error
            except BaseException:  # an interrupt, and it may have been sent
                self.close()
                raise
            try:
                with self._arrived:
                    come = self._arrived.wait_for(lambda: bool(self._answers) or self.ended.is_set(), self._timeout_s)
                    answer = self._answers.pop(0) if self._answers else None
                    self._late_count += may_be_late and not come
            except BaseException:  # an interrupt: as below
                self.close()
                raise
        if answer is not None:
            return expected(kind, *answer)
        if come:
            raise Unavailable("the sidecar is gone")
        if not may_be_late:
            self.close()  # a late answer would be taken for the next question's
        raise DeadlineExceeded(f"the hand-off did not answer within {self._timeout_s} s")

    def take(self, answer: Answer, descriptors: list[int]) -> None:
        """Take a packet that came."""
        if isinstance(answer, PresenceAnswer) and self.presence is not None:
            self.presence.take(answer, descriptors)
            return
        with self._arrived:
            is_awaited = not (self.ended.is_set() or self._late_count)
            self._late_count -= min(1, self._late_count)
            if is_awaited:
                self._answers.append((answer, descriptors))
                self._arrived.notify_all()
                return
        with closing_all(descriptors):
            return  # nobody waits for it any more

    # ------------------------------------------------------------ memory

    def _add_regions(self, answer: Welcome | RegionsAnswer, descriptors: list[int]) -> None:
        for (index, byte_count), descriptor in zip(answer.regions, descriptors, strict=True):
            self._regions[index] = SharedMap(descriptor, byte_count, writable=False).bytes

    def region(self, index: int) -> Bytes:
        """Return a region's bytes, read-only; mapped at first use. Raises Unavailable once the session ended."""
        found = self._regions.get(index)
        while found is None:
            if self.ended.is_set():
                raise Unavailable("the sidecar is gone")
            with self._growing:
                have = len(self._regions)
                answer, descriptors = self._exchange(RegionsQuestion(have), RegionsAnswer)
                with closing_all(descriptors):
                    check_descriptors(answer, descriptors)
                    self._add_regions(answer, descriptors)
                found = self._regions.get(index)
                if found is None and len(self._regions) == have:
                    raise Unavailable(f"the sidecar has no region {index}")
        return found

    def create_staging(self, byte_count: int) -> tuple[int, SharedMap]:
        """Return writable memory that the server can read, until ``close_staging``: (staging id, mapping). Raises
        Exhausted at the limit, Unavailable where it cannot be mapped."""
        answer, descriptors = self._exchange(StagingQuestion(byte_count), StagingAnswer)
        with closing_all(descriptors):
            try:
                check_descriptors(answer, descriptors)
                mapping = SharedMap(descriptors[0], byte_count, writable=True)
            except Unavailable:
                with suppress(InvalidRequest):  # it reads for another store now: this stays a part of the budget
                    self.close_staging(answer.staging_id)
                raise
        return answer.staging_id, mapping

    def close_staging(self, staging_id: int) -> None:
        """Give staging back that nobody writes; once more does no harm. Raises InvalidRequest while the sidecar reads
        any of this session's; DeadlineExceeded where it stands still: then it takes it back, or refuses to, when it
        goes on."""
        self._exchange(StagingClose(staging_id), Done, may_be_late=True)

    def fill(self, reservation_id: int, fills: Sequence[pb.Fill], runs: Sequence[StagingRun], timeout_s: float) -> None:
        """Hand the runs over by calls of at most ``CALL_FILLS_MAX``, which share the time: the sidecar reads them."""
        deadline = Deadline.of(_clock, timeout_s, timeout_s)
        for start in range(0, len(fills), CALL_FILLS_MAX):
            step = pb.FillStrips(reservation_id=reservation_id, fills=fills[start : start + CALL_FILLS_MAX])
            self.call(self.cache.Store, pb.StoreRequest(fill=step), deadline.left_s)

    def pool_for(self, wanted: Wanted) -> DevicePool | None:
        """Return the sidecar's pool on the device that these bytes go to; None where there is none. What is to be
        verified is not taken from there: clients may write it. Raises Unavailable once the session ended."""
        device = wanted.device
        if not self._has_pool or wanted.verify or not device:
            return None
        if device not in self._pools:
            with self._growing:
                if device not in self._pools:
                    self._pools[device] = self._open_pool(device)
        return self._pools[device]

    def _open_pool(self, device: str) -> DevicePool | None:
        """Map the pool, if it lies on this device. Where that fails, fetches go on without it."""
        try:
            answer, descriptors = self._exchange(DeviceQuestion(), DeviceAnswer)
            with closing_all(descriptors):
                check_descriptors(answer, descriptors)
                return opened_pool(answer, descriptors, device) if is_same_device(answer, device) else None
        except (KVStoreError, RuntimeError, ValueError) as error:  # torch's, and numpy's
            if self.ended.is_set():
                raise
            _log.warning(
                "the sidecar's pool on the device cannot be used here: fetches take the bytes from memory",
                extra={"device": device, "reason": str(error)},
            )
            return None

    # ------------------------------------------------------------ end

    def close(self) -> None:
        """End the session. Mappings go with the last copy that uses them. Idempotent."""
        if self.ended.is_set() or self.pid != os.getpid():
            return
        if self.presence is not None:
            self.presence.tell()
            self.presence.close()
        self._ending()()
        self.returns.close()
        with self._arrived:
            for _, descriptors in self._answers:
                with closing_all(descriptors):
                    pass  # nobody waits for this answer any more
            self._answers.clear()
            self._arrived.notify_all()
        self.warm.clear()
        self._regions.clear()
        self._has_pool = False
        self._pools.clear()
        self.staging = None  # type: ignore[assignment]  # it keeps the session, and the memory
        self.generations = np.empty(0, np.uint64)

    def _leave_to_parent(self) -> None:
        """Close the inherited socket, which would keep the parent's session alive. Drop the presence table: a child
        does not have its pages."""
        super()._leave_to_parent()
        if self.presence is not None:
            self.presence.close()
        with suppress(OSError):
            os.close(self._socket.detach())

    def _ending(self) -> Callable[[], object]:
        return partial(_end, self.ended, self._socket, self.channel)


def _end(ended: threading.Event, connection: socket.socket, channel: grpc.Channel) -> None:
    ended.set()
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end was first
    connection.close()
    channel.close()


def _send_now(connection: socket.socket, message: Question) -> bool:
    """Send a message that needs no wait. Returns False when the sidecar cannot take it now."""
    try:
        send(connection, message, flags=socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def _is_open(connection: socket.socket) -> bool:
    """Return True when the sidecar's end of the hand-off is open. Cost: about a microsecond."""
    try:
        return bool(connection.recv(1, _LOOK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _watch(session_of: weakref.ref[MappedMemory], connection: socket.socket) -> None:
    """Take packets until either end closes. The thread that does this does not keep the session alive."""
    session: MappedMemory | None = None
    try:
        while True:
            answer, descriptors = receive(connection)
            session = session_of()
            if session is None:
                with closing_all(descriptors):
                    return
            session.take(answer, descriptors)
            session = None
    except (OSError, KVStoreError):
        session = session or session_of()
        if session is not None:
            session.close()
