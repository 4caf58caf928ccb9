"""The hand-off socket: where a client gets its session and its memory.

AF_UNIX SOCK_SEQPACKET, one JSON object per packet, descriptors by SCM_RIGHTS. The connection is the session: when
either end closes it, the session's leases, reservations and staging end. The peer's uid must be the server's.

    > {"op": "hello", "version": 1}
    < {"op": "welcome", "session": 7, "secret": "<64 hex>", "server_pid": 1, "generations_bytes": n,
       "regions": [[index, bytes], ...]}                          + [generations, region, ...]
    > {"op": "regions", "have": 3}
    < {"op": "regions", "regions": [[3, bytes], ...]}             + [region, ...]   from index 3 on
    > {"op": "staging", "bytes": n}
    < {"op": "staging", "staging_id": 9, "bytes": n}              + [staging]
    > {"op": "staging_close", "staging_id": 9}
    < {"op": "ok"}
    < {"op": "error", "status": "RESOURCE_EXHAUSTED", "message": "..."}   instead of any answer
"""

from __future__ import annotations

import array
import asyncio
import json
import logging
import os
import socket
import struct
from typing import Any

from kvstore.controller import Controller, Session
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied

PROTOCOL_VERSION = 1
PACKET_BYTES_MAX = 65536
DESCRIPTORS_MAX = 64
"""Regions per packet; the kernel's own limit is 253."""

_log = logging.getLogger("kvstore.handoff")


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, told by the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class Handoff:
    """Serves the hand-off socket."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def serve(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Accept for ever; each connection is a task of ``group``."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(listener)
            connection.setblocking(False)
            group.create_task(self._connection(connection))

    async def _connection(self, connection: socket.socket) -> None:
        session: Session | None = None
        loop = asyncio.get_running_loop()
        try:
            if peer_uid(connection) != os.geteuid():
                raise PermissionDenied("this socket serves its own user only")
            while True:
                packet = await loop.sock_recv(connection, PACKET_BYTES_MAX)
                if not packet:
                    return
                request = _decode(packet)
                if session is None:
                    session = self._hello(connection, request)
                else:
                    self._answer(connection, session, request)
        except KVStoreError as error:
            self._controller.counters.add("sessions_refused")
            _send(connection, {"op": "error", "status": error.status, "message": error.message})
            _log.warning("hand-off refused", extra={"reason": error.message})
        except OSError as error:
            _log.info("hand-off connection lost", extra={"reason": str(error)})
        finally:
            connection.close()
            if session is not None:
                await self._close(session)

    async def _close(self, session: Session) -> None:
        try:
            await self._controller.close_session(session)
        except KVStoreError as error:
            _log.error("session did not end cleanly", extra={"session": session.session_id, "reason": error.message})
        _log.info("session ended", extra={"session": session.session_id})

    def _hello(self, connection: socket.socket, request: dict[str, Any]) -> Session:
        if request.get("op") != "hello" or request.get("version") != PROTOCOL_VERSION:
            raise InvalidRequest(
                f"this server speaks hand-off version {PROTOCOL_VERSION}, not {request.get('version')!r}: "
                "use a client of the same release"
            )
        session = self._controller.open_session(peer_uid(connection))
        arena = self._controller.arena
        regions = arena.regions[:DESCRIPTORS_MAX]
        welcome = {
            "op": "welcome",
            "session": session.session_id,
            "secret": session.secret.hex(),
            "server_pid": os.getpid(),
            "generations_bytes": arena.generations_bytes,
            "regions": [[region.index, region.byte_count] for region in regions],
        }
        descriptors = [arena.generations.descriptor, *(region.mapping.descriptor for region in regions)]
        _send(connection, welcome, descriptors)
        _log.info("session opened", extra={"session": session.session_id})
        return session

    def _answer(self, connection: socket.socket, session: Session, request: dict[str, Any]) -> None:
        """One request of an open session. A typed error is its answer; the session goes on."""
        try:
            operation = request.get("op")
            if operation == "regions":
                regions = self._controller.arena.regions[_number(request, "have") :][:DESCRIPTORS_MAX]
                rows = [[region.index, region.byte_count] for region in regions]
                _send(
                    connection,
                    {"op": "regions", "regions": rows},
                    [each.mapping.descriptor for each in regions],
                )
            elif operation == "staging":
                staging = self._controller.create_staging(session, _number(request, "bytes"))
                reply = {"op": "staging", "staging_id": staging.staging_id, "bytes": staging.byte_count}
                _send(connection, reply, [staging.mapping.descriptor])
            elif operation == "staging_close":
                self._controller.close_staging(session, _number(request, "staging_id"))
                _send(connection, {"op": "ok"})
            else:
                raise InvalidRequest(f"unknown hand-off operation {operation!r}")
        except KVStoreError as error:
            _send(connection, {"op": "error", "status": error.status, "message": error.message})


def _decode(packet: bytes) -> dict[str, Any]:
    try:
        request = json.loads(packet)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("hand-off packets are JSON objects") from error
    if not isinstance(request, dict):
        raise InvalidRequest("hand-off packets are JSON objects")
    return request


def _number(request: dict[str, Any], name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise InvalidRequest(f"{name} must be a whole number, not {value!r}")
    return value


def _send(connection: socket.socket, reply: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """One packet. A client that does not read its answers is disconnected rather than waited for."""
    data = json.dumps(reply).encode()
    rights = array.array("i", descriptors or [])
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    try:
        connection.sendmsg([data], ancillary)
    except OSError as error:
        _log.info("hand-off answer not taken", extra={"reason": str(error)})
