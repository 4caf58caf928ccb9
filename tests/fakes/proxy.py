"""A line on loopback between a client and a server, which can be late, narrow, silent, cut, or wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 16
POLL_S = 0.002


class Proxy:
    """Listens at ``address`` (host, port) and passes bytes on to ``upstream``, a (host, port) or a unix socket's path.
    What it does wrong may be changed at any time, for all its connections; ``mend`` undoes all of it.

    ``delay_s``: each piece comes later. ``bytes_per_s``: no more than that pass, each way. ``is_silent``: nothing
    passes. ``is_cut``: connections are closed, new ones at once. ``cut_after_bytes``: all are cut once so many bytes
    have come from the server. ``alter``: what becomes of a piece that comes from the server."""

    def __init__(self, upstream: tuple[str, int] | str) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        self.mend()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def mend(self) -> None:
        """From now on it is a good line."""
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.is_silent = False
        self.is_cut = False
        self.cut_after_bytes: int | None = None
        self.alter: Callable[[bytes], bytes] | None = None

    def lead_to(self, upstream: tuple[str, int] | str) -> None:
        """Pass new connections on to another server, as a name does that was given to it. Open ones stay."""
        self._upstream = upstream

    def cut(self) -> None:
        """Close all connections, and every new one until ``mend``."""
        self.is_cut = True
        self._close_all()

    def _close_all(self) -> None:
        with self._lock:
            doomed, self._open = self._open, set()
        for each in doomed:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            _send_at_once(client)
            if self.is_cut:
                client.close()
                continue
            try:
                server = self._connected()
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            ends = [threading.Event(), threading.Event()]
            for source, target, is_reply, end in ((client, server, False, ends[0]), (server, client, True, ends[1])):
                arguments = (source, target, is_reply, end, ends)
                threading.Thread(target=self._pass_all, args=arguments, name="proxy-pass", daemon=True).start()

    def _connected(self) -> socket.socket:
        if not isinstance(self._upstream, str):
            server = socket.create_connection(self._upstream, 2.0)
            _send_at_once(server)
            return server
        server = socket.socket(socket.AF_UNIX)
        server.connect(self._upstream)
        return server

    def _pass_all(
        self, source: socket.socket, target: socket.socket, is_reply: bool, end: threading.Event,
        ends: list[threading.Event],
    ) -> None:  # fmt: skip
        with suppress(OSError):
            source.settimeout(None)
            while piece := source.recv(PIECE_BYTES):
                self._wait_for(len(piece))
                if is_reply and self.alter is not None:
                    piece = self.alter(piece)
                if is_reply and self.cut_after_bytes is not None:
                    piece, self.cut_after_bytes = piece[: self.cut_after_bytes], self.cut_after_bytes - len(piece)
                target.sendall(piece)
                if self.cut_after_bytes is not None and self.cut_after_bytes <= 0:
                    self.cut()
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        end.set()
        if all(each.is_set() for each in ends):
            with self._lock:
                self._open -= {source, target}
            source.close()
            target.close()

    def _wait_for(self, byte_count: int) -> None:
        """Until a piece may pass."""
        wait_s = self.delay_s + (byte_count / self.bytes_per_s if self.bytes_per_s else 0.0)
        if wait_s:
            time.sleep(wait_s)
        while self.is_silent and not self.is_cut and not self._is_closed:
            time.sleep(POLL_S)

    def close(self) -> None:
        """Idempotent."""
        self._is_closed = True
        self._listener.close()
        self._close_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def _send_at_once(line: socket.socket) -> None:
    """Have no piece wait until the one before is acknowledged, which takes 40 ms where an answer comes in two."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
