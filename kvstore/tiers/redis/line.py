"""A blocking connection to a server: commands out, replies in, bulk bytes straight from and to memory.

A thread keeps one line for each server. A line whose stream is in doubt is closed, and the next call makes another: no
reply is ever taken for that of another command.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvstore.errors import DataLoss, KVStoreError, Unavailable
from kvstore.seams import SystemClock
from kvstore.seams.memory import Bytes
from kvstore.tiers.redis.access import Server
from kvstore.tiers.redis.packed import command
from kvstore.tiers.redis.replies import MOVED, NO_WRITES, REPLICA, refusal, unreachable

CONNECT_S_MAX = 2.0
SILENCE_S_MAX = 3.0
"""A server that moves no byte for so many seconds is given up."""
KEPT_S_MAX = 60.0
"""A kept line that was not used for so many seconds is closed: its server may be gone for ever, or the way to it."""
TICK_S = 0.25
"""Seconds between two checks of the time during a wait."""
LINE_BYTES_MAX = 4096
PARTS_AT_ONCE = 1024
"""The kernel takes no more pieces of memory in one call (IOV_MAX)."""
_NO_ANSWER_YET = (BlockingIOError, TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_clock = SystemClock()
Sent = bytes | Bytes
Result = TypeVar("Result")


class Line:
    """``until_s`` (monotonic) is the deadline of all work on the line. Raises: Unavailable when the server does not
    answer, and the typed errors of its refusals."""

    def __init__(self, server: Server, until_s: float) -> None:
        self.server = server
        self.until_s = until_s
        self.awaited = 0
        """The number of replies that have not been read to their end."""
        self.has_heard = False
        """True when the server has sent anything since the present work began."""
        self.is_dead = False
        """True when the connection has ended."""
        self._rest = bytearray()
        self._heard_s = _clock.monotonic()
        credentials = server.access.credentials()
        try:
            self._socket = _connected(server)
        except (OSError, ValueError) as error:
            raise unreachable(str(server), error) from error
        self._flags = 0 if isinstance(self._socket, ssl.SSLSocket) else socket.MSG_WAITALL
        try:
            self._greet(credentials)
        except BaseException:
            self.close()
            raise

    def _greet(self, credentials: tuple[str, ...]) -> None:
        if credentials:
            self.ask(b"AUTH", *(each.encode() for each in credentials))
        if self.server.access.database:
            self.ask(b"SELECT", b"%d" % self.server.access.database)
        try:
            self.ask(b"PING")  # a user without rights is refused here
        except Unavailable as error:
            if error.fields.get(NO_WRITES) != "MISCONF":  # a server that cannot save refuses PING, and may be read
                raise

    @property
    def is_stale(self) -> bool:
        """True when the line was not used for a long time."""
        return _clock.monotonic() - self._heard_s > KEPT_S_MAX

    @property
    def is_idle(self) -> bool:
        """True when the line can be kept: all replies were read, and the server has not hung up."""
        if self.awaited or self._rest:
            return False
        waiting = select.poll()  # select itself takes no descriptor above 1,023
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def close(self) -> None:
        self._socket.close()

    # ------------------------------------------------------------ out

    def send(self, parts: Sequence[Sent], reply_count: int = 1) -> None:
        """Send commands, in parts of bytes or memory, that ``reply_count`` replies will answer."""
        self.awaited += reply_count
        self._heard_s = _clock.monotonic()
        waiting = [memoryview(each if isinstance(each, bytes) else each.data) for each in parts]
        while waiting:
            try:
                count = (
                    self._socket.send(waiting[0]) if not self._flags else self._socket.sendmsg(waiting[:PARTS_AT_ONCE])
                )
            except _NO_ANSWER_YET:
                self._check_time()
                continue
            except OSError as error:
                self.is_dead = True
                raise unreachable(str(self.server), error) from error
            self._moved()
            while waiting and count >= len(waiting[0]):
                count -= len(waiting.pop(0))
            if count:
                waiting[0] = waiting[0][count:]

    # ------------------------------------------------------------ in

    def ask(self, *words: bytes) -> bytes:
        """Send one command and read its reply of one line, without the sign that it begins with."""
        self.send([command(*words)])
        return self.reply()

    def reply(self) -> bytes:
        """Read a reply of one line."""
        found = self._line()
        self.awaited -= 1
        return found

    def bulk(self, byte_count: int) -> bool:
        """Read the length of the next bulk reply. True: it has ``byte_count`` bytes, which ``fill`` and ``end`` then
        read. False: there is no value. Raises DataLoss for any other length; the caller then closes the line."""
        size = self._line(b"$")
        if size == b"-1":
            self.awaited -= 1
            return False
        if size != b"%d" % byte_count:
            raise DataLoss("a part of the chunk has another length than it should", reason="length")
        return True

    def fill(self, target: Bytes) -> None:
        """Read the next bytes of a bulk reply into memory."""
        view = target.data
        if self._rest:
            begun = min(len(self._rest), len(view))
            view[:begun] = self._rest[:begun]
            del self._rest[:begun]
            view = view[begun:]
        while view:
            view = view[self._receive(view, self._flags) :]

    def end(self) -> None:
        """Read the end of a bulk reply."""
        while len(self._rest) < 2:
            self._more()
        if self._rest[:2] != b"\r\n":
            raise unreachable(str(self.server), "a reply has no end")
        del self._rest[:2]
        self.awaited -= 1

    def _line(self, kind: bytes = b"+:$") -> bytes:
        """Read the first line of a reply of one of these kinds, and return it without its sign."""
        while (stop := self._rest.find(b"\r\n")) < 0:
            if len(self._rest) > LINE_BYTES_MAX:
                raise unreachable(str(self.server), "what it says is not Redis's protocol")
            self._more()
        found = bytes(self._rest[:stop])
        del self._rest[: stop + 2]
        if found[:1] == b"-":
            self.awaited -= 1
            raise refusal(found[1:].decode(errors="replace"), str(self.server))
        if not found or found[:1] not in kind:
            raise unreachable(str(self.server), "what it says is not Redis's protocol")
        return found[1:]

    def _more(self) -> None:
        room = bytearray(LINE_BYTES_MAX)
        self._rest += room[: self._receive(memoryview(room), 0)]

    def _receive(self, target: memoryview, flags: int) -> int:
        while True:
            try:
                count = self._socket.recv_into(target, 0, flags)
            except _NO_ANSWER_YET:
                self._check_time()
                continue
            except OSError as error:
                self.is_dead = True
                raise unreachable(str(self.server), error) from error
            if not count:
                self.is_dead = True
                raise unreachable(str(self.server), "it hung up")
            self.has_heard = True
            self._moved()
            return count

    def _moved(self) -> None:
        """Record that bytes moved, and give up a server that is past the deadline."""
        self._heard_s = _clock.monotonic()
        if self._heard_s > self.until_s:
            raise unreachable(str(self.server), "it took too long")

    def _check_time(self) -> None:
        now_s = _clock.monotonic()
        if now_s - self._heard_s > SILENCE_S_MAX:
            raise unreachable(str(self.server), f"nothing for {SILENCE_S_MAX:.0f} s")
        if now_s > self.until_s:
            raise unreachable(str(self.server), "it took too long")


def _connected(server: Server) -> socket.socket:
    """Return a connected socket. Raises OSError."""
    if server.path:
        plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    else:
        plain = socket.create_connection((server.host, server.port), CONNECT_S_MAX)
    try:
        plain.settimeout(CONNECT_S_MAX)
        if server.path:
            plain.connect(server.path)
        else:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if server.access.is_tls:
            secure = server.access.tls().wrap_socket(plain, server_hostname=server.host)
            secure.settimeout(TICK_S)
            return secure
        plain.settimeout(None)  # the kernel watches the time: one call reads a whole field
        tick = struct.pack("ll", int(TICK_S), int(TICK_S % 1 * 1e6))
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
    except BaseException:
        plain.close()
        raise
    return plain


class _Kept(threading.local):
    """A thread's kept lines."""

    def __init__(self) -> None:
        self.lines: dict[Server, Line] = {}


_kept = _Kept()


def on_line(server: Server, until_s: float, work: Callable[[Line], Result]) -> Result:
    """Do work on this thread's line to a server, or on a new line where the last was left in doubt. Do it once more, on
    a new line, where the kept line turns out to be dead before the server sends a byte, or leads to a replica by now;
    so ``work`` must be repeatable. Raises as ``Line``."""
    _close_stale()
    line = _kept.lines.pop(server, None)
    if line is not None and line.is_idle:
        try:
            return _used(line, until_s, work)
        except Unavailable as error:
            if REPLICA not in error.fields and (not line.is_dead or line.has_heard):
                raise
    elif line is not None:
        line.close()
    return _used(Line(server, until_s), until_s, work)


def _close_stale() -> None:
    """Close this thread's lines that it has not used for a long time: what lies between, as a firewall, may have
    forgotten them, and then nobody answers."""
    for server, line in list(_kept.lines.items()):
        if line.is_stale:
            del _kept.lines[server]
            line.close()


def _used(line: Line, until_s: float, work: Callable[[Line], Result]) -> Result:
    line.until_s, line.has_heard = until_s, False
    try:
        found = work(line)
    except KVStoreError as error:
        if isinstance(error, Unavailable) and MOVED not in error.fields:
            line.close()  # it gives nothing now: its name may lead to another server
        else:
            _keep(line)
        raise
    except BaseException:
        line.close()
        raise
    _keep(line)
    return found


def _keep(line: Line) -> None:
    if line.is_idle:
        _kept.lines[line.server] = line
    else:
        line.close()
