"""A peer of the remote plane by bare HTTP/2, that begins calls and then neither takes nor sends anything."""

from __future__ import annotations

import socket
import struct
from typing import Self

from kvstore_ops.sidecar import Sidecar

from tests.e2e.remote.peers import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
END_STREAM, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "its length takes one byte"
    return bytes([len(data)]) + data


class SilentPeer:
    """A connection that grants no window: no byte of an answer can be sent to it."""

    def __init__(self, sidecar: Sidecar, token: str) -> None:
        host, _, port = sidecar.tcp_address.rpartition(":")
        self._token = token
        self._stream = -1
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(PREFACE + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0)))

    def begin(self, name: str, message: bytes | None = None) -> None:
        """Begin a call. Its message is not sent where there is none."""
        self._stream += 2
        headers = {
            ":method": "POST", ":scheme": "http", ":path": name if name.startswith("/") else SERVICE + name,
            ":authority": "sidecar", "te": "trailers", "content-type": "application/grpc",
            "authorization": f"Bearer {self._token}",
        }  # fmt: skip
        block = b"".join(b"\0" + _text(each) + _text(value) for each, value in headers.items())
        self._socket.sendall(_frame(HEADERS, END_HEADERS, self._stream, block))
        if message is not None:
            whole = b"\0" + len(message).to_bytes(4, "big") + message
            self._socket.sendall(_frame(DATA, END_STREAM, self._stream, whole))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
