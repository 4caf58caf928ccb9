"""The server's half of the hand-off (``kvstore.handoff`` has the protocol): it checks the users who connect, bounds the
time to say hello, and answers questions."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict
from itertools import repeat

from kvstore.arena.region import Region
from kvstore.config import OPERATOR_SESSION_COUNT, LimitSettings
from kvstore.controller import Controller, Session, UsedChain
from kvstore.errors import DeadlineExceeded, Exhausted, InvalidRequest, KVStoreError, PermissionDenied, Unavailable
from kvstore.handoff.messages import (
    MESSAGE_CHARACTERS_MAX,
    PROTOCOL_VERSION,
    REGIONS_MAX,
    Answer,
    DeviceAnswer,
    DeviceQuestion,
    Done,
    Hello,
    LookedUp,
    PresenceAnswer,
    PresenceQuestion,
    Question,
    Redeemed,
    Refusal,
    RegionsAnswer,
    RegionsQuestion,
    StagingAnswer,
    StagingClose,
    StagingQuestion,
    Welcome,
)
from kvstore.handoff.packets import PACKET_BYTES_MAX, NoPacket, decode_question
from kvstore.handoff.passing import peer_uid
from kvstore.presence import TAIL_TOKENS_MAX
from kvstore.seams import Clock
from kvstore.server.descriptors import HELLO_COUNT_MAX
from kvstore.server.outbox import Outbox, Unread
from kvstore.server.render import parse_query
from kvstore.telemetry import BoundedLines
from kvstore.tiers.hbm import Pool
from kvstore.v1 import cache_pb2 as pb

HELLO_TIMEOUT_S = 5.0
"""Seconds that a connection may hold one of the server's descriptors before its hello."""
ACCEPT_PAUSE_S = 0.1
LINGER_STEP_S = 0.5
PAUSE_S_MIN = 0.001
"""Shorter pauses are added up: the loop sleeps for no less, and most packets take a fiftieth of that."""

_log = logging.getLogger("kvstore.handoff")


class Handoff:
    """Serves the hand-off socket. Nothing a peer does ends more than its own connection."""

    def __init__(
        self, controller: Controller, clock: Clock, uids: Set[int], *, outbox: Outbox, limits: LimitSettings,
        pool: Callable[[], Pool | None],
    ) -> None:  # fmt: skip
        """``uids``: users whose processes are served. ``pool``: returns the pool on a device, where there is one."""
        self._controller = controller
        self._clock = clock
        self._uids = uids
        self._outbox = outbox
        self._limits = limits
        self._pool = pool
        self._connection_count = 0
        self._lines = BoundedLines(_log, clock)
        self._turn = asyncio.Lock()
        self._owed_s = 0.0
        """Seconds that packets took, and that others have not had since."""
        """Of all peers, one has a packet read at a time."""

    async def serve(self, listener: socket.socket, group: asyncio.TaskGroup) -> None:
        """Accept for ever; each connection is a task of ``group``."""
        loop, failure = asyncio.get_running_loop(), ""
        while True:
            await asyncio.sleep(0)  # where another connection is there already, nothing below waits
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                # No descriptor is left, or the peer went before it was accepted: open sessions go on.
                if str(error) != failure:  # said once, however long it lasts: the log has a disk
                    failure = str(error)
                    _log.warning("cannot accept", extra={"reason": failure})
                await self._clock.sleep(ACCEPT_PAUSE_S)
                continue
            failure = ""
            connection.setblocking(False)
            if self._connection_count >= self._connection_count_max:
                count = f"{self._connection_count} connections to this socket"
                self._refuse(connection, Exhausted(f"{count}: close some, or raise limits.session_count_max"))
                self._outbox.forget(connection)
                connection.close()
                continue
            self._connection_count += 1
            group.create_task(self._connection(connection))

    @property
    def _connection_count_max(self) -> int:
        """The most connections, with and without a session."""
        return self._limits.session_count_max + OPERATOR_SESSION_COUNT + HELLO_COUNT_MAX

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
            hello = await self._hello(connection)
            session = self._controller.open_session(is_operator=hello.is_operator)
            self._outbox.send(connection, *self._welcome(session, connection))
            _log.debug("session opened", extra={"session": session.session_id})  # each command of an operator has one
            await self._converse(connection, session)
        except KVStoreError as error:
            self._refuse(connection, error)
        except OSError as error:
            self._lines.line(logging.INFO, "hand-off connection lost", reason=str(error))
        except Exception:  # noqa: BLE001 - the boundary: a bug of ours ends this session, not the service
            _log.exception("hand-off failed")
        finally:
            with suppress(OSError):  # the peer may be gone
                connection.shutdown(socket.SHUT_RDWR)
            if session is not None:
                await self._close(session)

    def _refuse(self, connection: socket.socket, error: KVStoreError) -> None:
        """Tell a peer why it is disconnected; it may be gone already."""
        self._controller.count("sessions_refused")
        self._lines.line(logging.WARNING, "hand-off refused", reason=error.message[:MESSAGE_CHARACTERS_MAX])
        try:
            self._outbox.send(connection, Refusal.of(error))
        except (OSError, Unread) as reason:
            self._lines.line(logging.INFO, "refusal not taken", reason=str(reason))

    async def _linger(self, connection: socket.socket) -> None:
        """Keep the connection, which counts against the tenant's limit, until the peer has read all descriptors."""
        while self._outbox.is_in_flight(connection):
            await self._clock.sleep(LINGER_STEP_S)

    async def _converse(self, connection: socket.socket, session: Session) -> None:
        loop = asyncio.get_running_loop()
        while packet := await loop.sock_recv(connection, PACKET_BYTES_MAX):
            # Peers that always have another packet, however many they are, leave others half of the loop's time.
            async with self._turn:
                since_s = self._clock.monotonic()
                self._take(session, connection, packet)
                self._owed_s += self._clock.monotonic() - since_s
                pause_s = self._owed_s if self._owed_s >= PAUSE_S_MIN else 0.0
                self._owed_s -= pause_s
                await self._clock.sleep(pause_s)

    def _take(self, session: Session, connection: socket.socket, packet: bytes) -> None:
        """Answer a packet of an open session, where it is to be answered."""
        try:
            question = decode_question(packet)
            if isinstance(question, LookedUp | Redeemed):
                if not (session.is_operator and isinstance(question, LookedUp)):
                    self._note(question)
                return
            answer, descriptors = self._answer(session, connection, question)
        except (NoPacket, Unread):
            raise
        except KVStoreError as error:
            answer, descriptors = Refusal.of(error), []
        self._outbox.send(connection, answer, descriptors)

    async def _close(self, session: Session) -> None:
        try:
            await self._controller.close_session(session)
        except Exception:  # noqa: BLE001 - the boundary: the other sessions go on
            _log.exception("session did not end cleanly", extra={"session": session.session_id})
        _log.debug("session ended", extra={"session": session.session_id})

    async def _hello(self, connection: socket.socket) -> Hello:
        """Return the peer's hello, once it comes. Raises the error that refuses it: for its uid, its silence or its
        version."""
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
        question = decode_question(packet)
        if not isinstance(question, Hello):
            raise InvalidRequest(f"a hand-off begins with hello, version {PROTOCOL_VERSION}, not with {question.op}")
        return question

    def _welcome(self, session: Session, connection: socket.socket) -> tuple[Answer, list[int]]:
        regions, generations = self._controller.regions()[:REGIONS_MAX], self._controller.generations()
        regions = regions[: self._outbox.room(connection, 1 + len(regions)) - 1]  # the client asks for the others
        secret, rows = session.secret.hex(), _rows(regions)
        offers = ("presence", "uses") if self._pool() is None else ("presence", "uses", "device")
        answer = Welcome(session.session_id, secret, os.getpid(), generations.bytes.size, rows, offers)
        return answer, [generations.descriptor, *(region.mapping.descriptor for region in regions)]

    def _answer(self, session: Session, connection: socket.socket, question: Question) -> tuple[Answer, list[int]]:
        """Return the answer to a question of an open session, and its descriptors. Raises the typed error that is to be
        answered instead."""
        controller = self._controller
        match question:
            case RegionsQuestion(have):
                regions = controller.regions()[have:][:REGIONS_MAX]
                regions = regions[: self._outbox.room(connection, len(regions))]
                return RegionsAnswer(_rows(regions)), [region.mapping.descriptor for region in regions]
            case StagingQuestion(byte_count):
                self._outbox.room(connection, 1)
                staging = controller.create_staging(session, byte_count)
                return StagingAnswer(staging.staging_id, staging.byte_count), [staging.mapping.descriptor]
            case StagingClose(staging_id):
                controller.close_staging(session, staging_id)
                return Done(), []
            case PresenceQuestion():
                self._outbox.room(connection, 1)
                table = controller.presence()
                answer = PresenceAnswer(table.bytes.size, controller.token_count_max, TAIL_TOKENS_MAX)
                return answer, [table.descriptor]
            case DeviceQuestion():
                pool = self._pool()
                if pool is None:
                    raise Unavailable("this server has no pool on a device")
                if self._outbox.room(connection, 2) < 2:
                    raise Exhausted("too many answers to others are unread: ask again later")
                device = DeviceAnswer(pool.identity, pool.generations.bytes.size, pool.region.byte_count)
                return device, [pool.generations.descriptor, pool.region.descriptor]
        raise InvalidRequest(f"{question.op} is no question of an open session")

    def _note(self, done: LookedUp | Redeemed) -> None:
        """Take note of what a client did without a call."""
        try:
            if isinstance(done, Redeemed):
                self._controller.copied(bytes.fromhex(done.ticket))
            else:
                self._count(done)
        except KVStoreError as error:  # not answered: the client would take a refusal for the next question's answer
            self._lines.line(logging.WARNING, "uses were not counted", reason=error.message)

    def _count(self, done: LookedUp) -> None:
        counts = asdict(done)
        used, amounts = counts.pop("used"), counts.pop("used_amounts")
        for name, count in counts.items():
            self._controller.count(name, count)
        self._controller.used(map(_chain, used, amounts if len(amounts) == len(used) else repeat((0, 0))))


def _chain(used: tuple[str, int, int, str], amounts: tuple[int, int]) -> UsedChain:
    """Return a chain that a client used, by its last digest. Impossible counts become 0."""
    name, exactness, provenance, digest = used
    query = pb.ChainQuery(fingerprint=bytes.fromhex(name), digests=bytes.fromhex(digest))
    query.exactness, query.provenance = exactness, provenance  # type: ignore[assignment]  # the wire's numbers
    fetch_count, token_count = amounts
    is_sound = 0 < fetch_count <= token_count
    return UsedChain(parse_query(query), *(amounts if is_sound else (0, 0)))


def _rows(regions: Sequence[Region]) -> tuple[tuple[int, int], ...]:
    return tuple((region.index, region.byte_count) for region in regions)
