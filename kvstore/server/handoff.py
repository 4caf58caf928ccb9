"""The hand-off socket: where a client gets its session and its memory.

AF_UNIX SOCK_SEQPACKET, one JSON object per packet, descriptors by SCM_RIGHTS. The connection is the session: when
either end closes it, the session's leases, reservations and staging end. The peer's uid must be the tenant's, or the
server's own.

    > {"op": "hello", "version": 1}
    < {"op": "welcome", "session": 7, "secret": "<64 hex>", "server_pid": 1, "generations_bytes": n,
       "regions": [[index, bytes], ...], "offers": ["presence"]}  + [generations, region, ...]
    > {"op": "regions", "have": 3}
    < {"op": "regions", "regions": [[3, bytes], ...]}             + [region, ...]   from index 3 on
    > {"op": "staging", "bytes": n}
    < {"op": "staging", "staging_id": 9, "bytes": n}              + [staging]
    > {"op": "staging_close", "staging_id": 9}
    < {"op": "ok"}
    > {"op": "presence"}
    < {"op": "presence", "bytes": n, "token_count_max": n}        + [presence table]
    > {"op": "looked_up", COUNTER: n, ...}                        done without a call, to be counted; never answered
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
from collections.abc import Set
from typing import Any

from kvstore.controller import Controller, Session
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, PermissionDenied
from kvstore.seams import Clock

PROTOCOL_VERSION = 1
PACKET_BYTES_MAX = 65536
DESCRIPTORS_MAX = 64
"""Regions per packet; the kernel's own limit is 253."""
HELLO_TIMEOUT_S = 5.0
"""How long a connection may hold a descriptor of ours without saying who it is."""
ACCEPT_PAUSE_S = 0.1
COUNTED = ("lookup_calls", "lookup_hit_chunks", "lookup_miss_chunks", "fetch_calls", "fetch_miss_chunks")
"""What clients do without a call, by our counters' names."""
COUNTED_MAX = 1 << 32
"""In one packet: counters are 64 bits on the wire."""
MESSAGE_CHARACTERS_MAX = 500
"""Refusals quote what was sent; this bounds how much of it goes back."""

_log = logging.getLogger("kvstore.handoff")


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, told by the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class Handoff:
    """Serves the hand-off socket. Nothing a peer does ends more than its own connection."""

    def __init__(self, controller: Controller, clock: Clock, uids: Set[int]) -> None:
        """``uids``: whose processes are served."""
        self._controller = controller
        self._clock = clock
        self._uids = uids

    async def serve(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Accept for ever; each connection is a task of ``group``."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # Out of descriptors, or the peer went before we came: the sessions that are open go on.
                _log.warning("cannot accept", extra={"reason": str(error)})
                await self._clock.sleep(ACCEPT_PAUSE_S)
                continue
            connection.setblocking(False)
            group.create_task(self._connection(connection))

    async def _connection(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            await self._hello(connection)
            session = self._controller.open_session(peer_uid(connection))
            _send(connection, *self._welcome(session))
            _log.info("session opened", extra={"session": session.session_id})
            await self._converse(connection, session)
        except KVStoreError as error:
            self._controller.counters.add("sessions_refused")
            _log.warning("hand-off refused", extra={"reason": error.message[:MESSAGE_CHARACTERS_MAX]})
            _send_last(connection, _refusal(error))
        except OSError as error:
            _log.info("hand-off connection lost", extra={"reason": str(error)})
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours ends this session, not the service
            _log.exception("hand-off failed")
        finally:
            connection.close()
            if session is not None:
                await self._close(session)

    async def _converse(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(connection, PACKET_BYTES_MAX):
            await asyncio.sleep(0)  # a peer that always has something to say holds up nobody
            request = _decode(packet)
            if request.get("op") == "looked_up":
                self._count(request)
                continue
            try:
                reply, descriptors = self._answer(session, request)
            except KVStoreError as error:
                reply, descriptors = _refusal(error), []
            _send(connection, reply, descriptors)

    async def _close(self, session: Session) -> None:
        try:
            await self._controller.close_session(session)
        except Exception:  # noqa: BLE001 - the boundary: the other sessions go on
            _log.exception("session did not end cleanly", extra={"session": session.session_id})
        _log.info("session ended", extra={"session": session.session_id})

    async def _hello(self, connection: socket.socket) -> None:
        """Wait for the opening. Raises what refuses the peer: its uid, its silence or its version."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                packet = await asyncio.get_running_loop().sock_recv(connection, PACKET_BYTES_MAX)
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:.0f} s of connecting") from None
        if not packet:
            raise ConnectionResetError("closed before its hello")
        # After the packet is read: closing on unread bytes would reset the peer before it sees the refusal.
        if peer_uid(connection) not in self._uids:
            raise PermissionDenied("this socket serves its own user only")
        request = _decode(packet)
        version = request.get("version")
        if request.get("op") != "hello" or type(version) is not int or version != PROTOCOL_VERSION:  # true == 1 == 1.0
            raise InvalidRequest(
                f"this server speaks hand-off version {PROTOCOL_VERSION}, not {version!r:.40}: "
                "use a client of the same release"
            )

    def _welcome(self, session: Session) -> tuple[dict[str, Any], list[int]]:
        arena = self._controller.arena
        regions = arena.regions[:DESCRIPTORS_MAX]
        reply = {
            "op": "welcome",
            "session": session.session_id,
            "secret": session.secret.hex(),
            "server_pid": os.getpid(),
            "generations_bytes": arena.generations_bytes,
            "regions": [[region.index, region.byte_count] for region in regions],
            "offers": ["presence"],
        }
        return reply, [arena.generations.descriptor, *(region.mapping.descriptor for region in regions)]

    def _answer(self, session: Session, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """One request of an open session. Raises the typed error that is its answer."""
        operation = request.get("op")
        if operation == "regions":
            regions = self._controller.arena.regions[_number(request, "have") :][:DESCRIPTORS_MAX]
            rows = [[region.index, region.byte_count] for region in regions]
            return {"op": "regions", "regions": rows}, [region.mapping.descriptor for region in regions]
        if operation == "staging":
            try:
                staging = self._controller.create_staging(session, _number(request, "bytes"))
            except OSError as error:
                raise Exhausted(f"no staging to be had: {error.strerror}") from error
            reply = {"op": "staging", "staging_id": staging.staging_id, "bytes": staging.byte_count}
            return reply, [staging.mapping.descriptor]
        if operation == "staging_close":
            self._controller.close_staging(session, _number(request, "staging_id"))
            return {"op": "ok"}, []
        if operation == "presence":
            mapping, most = self._controller.catalog.presence.mapping, self._controller.limits.token_count_max
            reply = {"op": "presence", "bytes": mapping.bytes.size, "token_count_max": most}
            return reply, [mapping.descriptor]
        raise InvalidRequest(f"unknown hand-off operation {operation!r:.40}")

    def _count(self, request: dict[str, Any]) -> None:
        for name in COUNTED:
            number = request.get(name, 0)
            if type(number) is int and 0 < number <= COUNTED_MAX:
                self._controller.counters.add(name, number)


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
        raise InvalidRequest(f"{name} must be a whole number, not {value!r:.40}")
    return value


def _refusal(error: KVStoreError) -> dict[str, Any]:
    return {"op": "error", "status": error.status, "message": error.message[:MESSAGE_CHARACTERS_MAX]}


def _send(connection: socket.socket, reply: dict[str, Any], descriptors: list[int]) -> None:
    """One packet. Raises OSError for a peer that does not read its answers: it is disconnected, not waited for."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg([json.dumps(reply).encode()], ancillary)


def _send_last(connection: socket.socket, reply: dict[str, Any]) -> None:
    """A packet to a peer that is let go: it may be gone already."""
    try:
        _send(connection, reply, [])
    except OSError as error:
        _log.info("refusal not taken", extra={"reason": str(error)})
