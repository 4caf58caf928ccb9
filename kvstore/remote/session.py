"""One remote client, as a local client of the sidecar: its hand-off connection, and staging for what it stores."""

from __future__ import annotations

import array
import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from kvstore.errors import Unavailable, from_status
from kvstore.remote.inbox import SESSION_MESSAGES, Inbox
from kvstore.seams.mapping import SharedMap, closing_all
from kvstore.wire import METADATA_SESSION

PROTOCOL_VERSION = 1
PACKET_BYTES_MAX = 65536
EXCHANGE_TIMEOUT_S = 5.0


class Segment:
    """Staging of a session, for one stream at a time."""

    def __init__(self, staging_id: int, mapping: SharedMap) -> None:
        self.staging_id = staging_id
        self.bytes = mapping.bytes


class Session:
    """A hand-off connection. The sidecar's session, with all it owns, ends when it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._idle: list[Segment] = []
        self._owed = False
        """Whether an answer is on its way that nobody waits for any more."""
        self.secret = b""
        self.session_id = 0
        self.server_pid = 0
        self.stream_count = 0
        self.inbox = Inbox(SESSION_MESSAGES, "session")
        self.is_open = True

    @staticmethod
    async def open(path: Path) -> tuple[Session, dict[str, Any], list[int]]:
        """A session, the sidecar's welcome and the descriptors in it. Raises what refused us, or Unavailable."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        session = Session(connection)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(path))
            welcome, descriptors = await session.exchange({"op": "hello", "version": PROTOCOL_VERSION})
        except OSError as error:
            session.close()
            raise Unavailable(f"the sidecar does not answer: {error.strerror or error}") from error
        except BaseException:
            session.close()
            raise
        session.secret = bytes.fromhex(welcome["secret"])
        session.session_id, session.server_pid = welcome["session"], welcome["server_pid"]
        return session, welcome, descriptors

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """What makes a call to the sidecar this session's."""
        return ((METADATA_SESSION, self.secret),)

    async def exchange(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """One question and its answer. Raises the typed error it may be; Unavailable when none came."""
        try:
            async with self._turn, asyncio.timeout(EXCHANGE_TIMEOUT_S):
                while self._owed:
                    await self._take_owed()
                await asyncio.get_running_loop().sock_sendall(self._connection, json.dumps(request).encode())
                self._owed = True
                reply, descriptors = await self._receive()
                self._owed = False
        except (OSError, TimeoutError) as error:
            self.close()  # an answer that comes later would be taken for the next question's
            raise Unavailable("the sidecar does not answer") from error
        if reply.get("op") == "error":
            raise from_status(reply["status"], reply["message"])
        return reply, descriptors

    async def _take_owed(self) -> None:
        """The answer to somebody who was cancelled while he waited: nobody else's, and its staging is spare."""
        reply, descriptors = await self._receive()
        self._owed = False
        with closing_all(descriptors):
            if reply.get("op") == "staging":
                mapping = SharedMap(descriptors[0], int(reply["bytes"]), writable=True)
                self._idle.append(Segment(int(reply["staging_id"]), mapping))

    async def _receive(self) -> tuple[dict[str, Any], list[int]]:
        while True:
            try:
                data, ancillary, _, _ = self._connection.recvmsg(
                    PACKET_BYTES_MAX, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC
                )
                break
            except BlockingIOError:
                await self._readable()
        descriptors = array.array("i")
        for _, _, payload in ancillary:
            descriptors.frombytes(payload[: len(payload) // 4 * 4])
        if not data:
            raise ConnectionResetError("the sidecar closed the session")
        return json.loads(data), descriptors.tolist()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._connection, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection)

    # ------------------------------------------------------------ staging

    async def take_segment(self, byte_count: int) -> Segment:
        """Staging of at least ``byte_count`` bytes, ours until it is given back. Raises Exhausted at the limits."""
        for segment in self._idle:
            if segment.bytes.size >= byte_count:
                self._idle.remove(segment)
                return segment
        reply, descriptors = await self.exchange({"op": "staging", "bytes": byte_count})
        with closing_all(descriptors):
            try:
                mapping = SharedMap(descriptors[0], byte_count, writable=True)
            except Unavailable:
                await self.exchange({"op": "staging_close", "staging_id": reply["staging_id"]})
                raise
        return Segment(int(reply["staging_id"]), mapping)

    def give_back(self, segment: Segment) -> None:
        """Nobody writes it any more, and the sidecar has read it."""
        if self.is_open:
            self._idle.append(segment)

    def close(self) -> None:
        """End it, here and in the sidecar. Idempotent."""
        self.is_open = False
        self._idle.clear()
        self._connection.close()
