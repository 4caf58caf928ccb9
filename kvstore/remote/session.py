"""One remote client as the sidecar sees it: its hand-off connection, and staging for its stores."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

from kvstore.errors import Exhausted, InvalidRequest, KVStoreError, Unavailable
from kvstore.handoff.messages import (
    PROTOCOL_VERSION,
    Answer,
    Done,
    Hello,
    Question,
    StagingAnswer,
    StagingClose,
    StagingQuestion,
    Welcome,
)
from kvstore.handoff.packets import encode
from kvstore.handoff.passing import Said, check_descriptors, expected, open_socket, receive
from kvstore.remote.inbox import SESSION_MESSAGES, Inbox
from kvstore.seams.mapping import SharedMap, closing_all
from kvstore.wire import METADATA_SESSION

EXCHANGE_TIMEOUT_S = 5.0
IDLE_S = 30.0
"""Staging that was not used for so many seconds goes back to the sidecar: all sessions share a budget of it
(``limits.staging_bytes_total_max``)."""


class StagingSegment:
    """Staging of a session, for one stream at a time."""

    def __init__(self, staging_id: int, mapping: SharedMap) -> None:
        self.staging_id = staging_id
        self.bytes = mapping.bytes
        self.was_used = True
        """True when it was used since the last look for idle staging."""


class SidecarSession:
    """A hand-off connection. The sidecar's session, with all it owns, ends when it is closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._turn = asyncio.Lock()
        self._idle: list[StagingSegment] = []
        self._looking: asyncio.Task[None] | None = None
        """Looks for idle staging, while there is any that is not in use."""
        self._owed = False
        """True while an answer is outstanding. After a cancelled exchange nobody waits for it."""
        self._has_news = asyncio.Event()
        self.secret = b""
        self.session_id = 0
        self.server_pid = 0
        self.stream_count = 0
        self.inbox = Inbox(SESSION_MESSAGES, "session")
        self.is_open = True

    @staticmethod
    async def open(path: Path) -> tuple[SidecarSession, Welcome, list[int]]:
        """Open a session. Return it, the sidecar's welcome and the descriptors in it. Raises the sidecar's refusal, or
        Unavailable."""
        connection = open_socket()
        connection.setblocking(False)
        session = SidecarSession(connection)
        try:
            await asyncio.get_running_loop().sock_connect(connection, str(path))
            welcome, descriptors = await session.exchange(Hello(PROTOCOL_VERSION), Welcome)
        except OSError as error:
            session.close()
            raise Unavailable(f"the sidecar does not answer: {error.strerror or error}") from error
        except BaseException:
            session.close()
            raise
        session.secret = bytes.fromhex(welcome.secret)
        session.session_id, session.server_pid = welcome.session_id, welcome.server_pid
        return session, welcome, descriptors

    @property
    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The metadata that names this session in a call to the sidecar."""
        return ((METADATA_SESSION, self.secret),)

    async def exchange(
        self, question: Question, kind: type[Said], timeout_s: float | None = EXCHANGE_TIMEOUT_S
    ) -> tuple[Said, list[int]]:
        """Ask a question, and return its answer, of this kind, with its descriptors. ``timeout_s``, for the question
        before, too: None waits until the session ends. Raises the typed error of a refusal; Unavailable when no answer
        came."""
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while self._owed:
                    await self._take_owed()
                await asyncio.get_running_loop().sock_sendall(self._connection, encode(question))
                self._owed = True
                answer, descriptors = await self._receive()
                self._owed = False
        except (OSError, TimeoutError, Unavailable) as error:
            self.close()  # an answer that comes later would be taken for the next question's
            raise Unavailable("the sidecar does not answer") from error
        return expected(kind, answer, descriptors)

    async def _take_owed(self) -> None:
        """Take the answer to a question whose asker was cancelled. Staging in it is kept for later use."""
        answer, descriptors = await self._receive()
        self._owed = False
        with closing_all(descriptors):
            if isinstance(answer, StagingAnswer):
                check_descriptors(answer, descriptors)
                mapping = SharedMap(descriptors[0], answer.byte_count, writable=True)
                self.give_back(StagingSegment(answer.staging_id, mapping))

    async def _receive(self) -> tuple[Answer, list[int]]:
        while True:
            try:
                return receive(self._connection)
            except BlockingIOError:
                await self._readable()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._has_news.clear()
        loop.add_reader(self._connection, self._has_news.set)
        try:
            await self._has_news.wait()
        finally:
            if self.is_open:
                loop.remove_reader(self._connection)

    # ------------------------------------------------------------ staging

    async def take_segment(self, byte_count: int) -> StagingSegment:
        """Take staging of at least ``byte_count`` bytes, until ``give_back``. Raises Exhausted at the limits."""
        for segment in self._idle:
            if segment.bytes.size >= byte_count:
                self._idle.remove(segment)
                return segment
        try:
            answer, descriptors = await self.exchange(StagingQuestion(byte_count), StagingAnswer)
        except Exhausted as full:
            if not self._idle:
                raise
            # Idle segments that are too small count against the session's limits, until they are closed: that goes on
            # when this stream is cancelled.
            try:
                await asyncio.shield(self._close_segment(self._idle.pop(), EXCHANGE_TIMEOUT_S))
            except InvalidRequest:
                raise full from None
            return await self.take_segment(byte_count)
        with closing_all(descriptors):
            try:
                check_descriptors(answer, descriptors)
                mapping = SharedMap(descriptors[0], byte_count, writable=True)
            except Unavailable:
                await self.exchange(StagingClose(answer.staging_id), Done)
                raise
        return StagingSegment(answer.staging_id, mapping)

    def give_back(self, segment: StagingSegment) -> None:
        """Give a segment back, which nobody writes and the sidecar does not read any more."""
        if self.is_open:
            segment.was_used = True
            self._idle.append(segment)
            if self._looking is None:
                self._looking = asyncio.get_running_loop().create_task(self._look())  # seam: ends with the session

    async def _look(self) -> None:
        while self._idle:
            await asyncio.sleep(IDLE_S)
            await self.give_back_idle()
        self._looking = None

    async def give_back_idle(self) -> None:
        """Give staging back to the sidecar that was not used since the last call. The session may end meanwhile."""
        unused = [each for each in self._idle if not each.was_used]
        for segment in self._idle:
            segment.was_used = False
        for segment in unused:
            if segment in self._idle:  # no stream has taken it meanwhile
                self._idle.remove(segment)
                with suppress(KVStoreError):  # it is kept, or the session has ended
                    # However long that takes: a sidecar that stands still ends no session for the sake of this.
                    await self._close_segment(segment, None)

    async def _close_segment(self, segment: StagingSegment, timeout_s: float | None) -> None:
        """Have the sidecar close an idle segment. Raises InvalidRequest while it reads staging for a store of this
        session: it does not look from where, and the segment is kept."""
        try:
            await self.exchange(StagingClose(segment.staging_id), Done, timeout_s)
        except InvalidRequest:
            self.give_back(segment)
            raise

    def close(self) -> None:
        """End the session, here and in the sidecar. Who waits for an answer gets Unavailable. Idempotent."""
        if self.is_open:
            # Before its number is another session's: the loop would take that one's answers for news of this one.
            asyncio.get_running_loop().remove_reader(self._connection)
            self._has_news.set()
        self.is_open = False
        self._idle.clear()
        if self._looking is not None:
            self._looking.cancel()
        self._connection.close()
