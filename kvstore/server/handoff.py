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
    < {"op": "presence", "bytes": n, "token_count_max": n, "tail_tokens_max": n}   + [presence table]
    > {"op": "looked_up", COUNTER: n, ...}                        done without a call, to be counted; never answered
    < {"op": "error", "status": "RESOURCE_EXHAUSTED", "message": "..."}   instead of any answer
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Set
from contextlib import suppress
from typing import Any

from kvstore.controller import Controller, Session
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, PermissionDenied
from kvstore.presence import TAIL_TOKENS_MAX
from kvstore.seams import Clock
from kvstore.server.outbox import Outbox, Unread
from kvstore.server.packets import (
    COUNTED,
    MESSAGE_CHARACTERS_MAX,
    PACKET_BYTES_MAX,
    REGIONS_MAX,
    REQUESTS,
    decode,
    number,
    operation_of,
    refusal,
)

PROTOCOL_VERSION = 1
HELLO_TIMEOUT_S = 5.0
"""How long a connection may hold a descriptor of ours without saying who it is."""
ACCEPT_PAUSE_S = 0.1
LINGER_STEP_S = 0.5

_log = logging.getLogger("kvstore.handoff")


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, told by the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


class Handoff:
    """Serves the hand-off socket. Nothing a peer does ends more than its own connection."""

    def __init__(
        self, controller: Controller, clock: Clock, uids: Set[int], *, outbox: Outbox, connection_count_max: int
    ) -> None:
        """``uids``: whose processes are served. ``connection_count_max``: with a session or without."""
        self._controller = controller
        self._clock = clock
        self._uids = uids
        self._outbox = outbox
        self._connection_count_max = connection_count_max
        self._connection_count = 0

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
            if self._connection_count >= self._connection_count_max:
                count = f"{self._connection_count} connections to this socket"
                self._refuse(connection, Exhausted(f"{count}: close some, or raise limits.session_count_max"))
                self._outbox.forget(connection)
                connection.close()
                continue
            self._connection_count += 1
            group.create_task(self._connection(connection))

    async def _connection(self, connection: socket.socket) -> None:
        try:
            await self._serve(connection)
            await self._linger(connection)
        finally:
            self._outbox.forget(connection)
            connection.close()
            self._connection_count -= 1

    async def _serve(self, connection: socket.socket) -> None:
        session: Session | None = None
        try:
            await self._hello(connection)
            session = self._controller.open_session(peer_uid(connection))
            self._outbox.send(connection, *self._welcome(session, connection))
            _log.info("session opened", extra={"session": session.session_id})
            await self._converse(connection, session)
        except KVStoreError as error:
            self._refuse(connection, error)
        except OSError as error:
            _log.info("hand-off connection lost", extra={"reason": str(error)})
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours ends this session, not the service
            _log.exception("hand-off failed")
        finally:
            with suppress(OSError):  # the peer may be gone
                connection.shutdown(socket.SHUT_RDWR)
            if session is not None:
                await self._close(session)

    def _refuse(self, connection: socket.socket, error: KVStoreError) -> None:
        """Say why a peer is let go; it may be gone already."""
        self._controller.counters.add("sessions_refused")
        _log.warning("hand-off refused", extra={"reason": error.message[:MESSAGE_CHARACTERS_MAX]})
        try:
            self._outbox.send(connection, refusal(error))
        except (OSError, Unread) as reason:
            _log.info("refusal not taken", extra={"reason": str(reason)})

    async def _linger(self, connection: socket.socket) -> None:
        """A peer that holds our descriptors unread holds its connection, of which a tenant has so many."""
        while self._outbox.is_in_flight(connection):
            await self._clock.sleep(LINGER_STEP_S)

    async def _converse(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(connection, PACKET_BYTES_MAX):
            await asyncio.sleep(0)  # a peer that always has something to say holds up nobody
            request = decode(packet)
            if request.get("op") == "looked_up":
                self._count(request)
                continue
            try:
                reply, descriptors = self._answer(session, connection, request)
            except Unread:
                raise
            except KVStoreError as error:
                reply, descriptors = refusal(error), []
            self._outbox.send(connection, reply, descriptors)

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
        request = decode(packet)
        version = request.get("version")
        if (
            operation_of(request) != "hello" or type(version) is not int or version != PROTOCOL_VERSION
        ):  # true == 1 == 1.0
            raise InvalidRequest(
                f"this server speaks hand-off version {PROTOCOL_VERSION}, not {version!r:.40}: "
                "use a client of the same release"
            )

    def _welcome(self, session: Session, connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
        arena = self._controller.arena
        regions = arena.regions[:REGIONS_MAX]
        regions = regions[: self._outbox.room(connection, 1 + len(regions)) - 1]  # the client asks for the others
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

    def _answer(
        self, session: Session, connection: socket.socket, request: dict[str, Any]
    ) -> tuple[dict[str, Any], list[int]]:
        """One request of an open session. Raises the typed error that is its answer."""
        operation, controller = operation_of(request), self._controller
        if operation == "regions":
            regions = controller.arena.regions[number(request, "have") :][:REGIONS_MAX]
            regions = regions[: self._outbox.room(connection, len(regions))]
            rows = [[region.index, region.byte_count] for region in regions]
            return {"op": "regions", "regions": rows}, [region.mapping.descriptor for region in regions]
        if operation == "staging":
            byte_count = number(request, "bytes")
            self._outbox.room(connection, 1)
            staging = controller.create_staging(session, byte_count)
            reply = {"op": "staging", "staging_id": staging.staging_id, "bytes": staging.byte_count}
            return reply, [staging.mapping.descriptor]
        if operation == "staging_close":
            controller.close_staging(session, number(request, "staging_id"))
            return {"op": "ok"}, []
        if operation == "presence":
            self._outbox.room(connection, 1)
            mapping, most = controller.catalog.presence.mapping, controller.limits.token_count_max
            reply = {
                "op": "presence", "bytes": mapping.bytes.size, "token_count_max": most,
                "tail_tokens_max": TAIL_TOKENS_MAX,
            }  # fmt: skip
            return reply, [mapping.descriptor]
        raise InvalidRequest(f"{operation} is no question of an open session")

    def _count(self, request: dict[str, Any]) -> None:
        for name in COUNTED:
            if name in request and REQUESTS["looked_up"][name].allows(request[name]):
                self._controller.counters.add(name, request[name])
