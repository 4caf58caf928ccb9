"""Sends and receives packets with descriptors, and tells the peer's user."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

from kvstore.errors import Unavailable
from kvstore.handoff.messages import (
    Answer,
    DeviceAnswer,
    Done,
    Question,
    Refusal,
    RegionsAnswer,
    StagingAnswer,
    Welcome,
)
from kvstore.handoff.packets import PACKET_BYTES_MAX, decode_answer, encode

Said = TypeVar("Said", Welcome, RegionsAnswer, StagingAnswer, DeviceAnswer, Done)
DESCRIPTORS_MAX = 253
"""Descriptors in one packet: the kernel's limit."""


def open_socket() -> socket.socket:
    """Return a socket for the hand-off, not connected yet. Raises Unavailable where this process may open no more
    files."""
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise Unavailable(
            f"this process gets no socket ({error.strerror}): raise its limit on open files (ulimit -n)"
        ) from error


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end, from the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def send(
    connection: socket.socket, message: Question | Answer, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """Send one packet. Raises OSError for a peer that is gone or takes no more, or when the kernel passes no more
    descriptors."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg([encode(message)], ancillary, flags)


def receive(connection: socket.socket) -> tuple[Answer, list[int]]:
    """Receive the server's next answer and its descriptors, which the caller must close. Raises OSError; Unavailable
    when the server has closed the session."""
    packet, ancillary, _, _ = connection.recvmsg(
        PACKET_BYTES_MAX, socket.CMSG_SPACE(DESCRIPTORS_MAX * 4), socket.MSG_CMSG_CLOEXEC
    )
    descriptors: list[int] = []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights = array.array("i")
            rights.frombytes(payload[: len(payload) // 4 * 4])
            descriptors += rights.tolist()
    try:
        if not packet:
            raise Unavailable("the sidecar closed the session")
        return decode_answer(packet), descriptors
    except BaseException:
        _close(descriptors)
        raise


def expected(kind: type[Said], answer: Answer, descriptors: list[int]) -> tuple[Said, list[int]]:
    """Return the answer if it is of this kind, with its descriptors; else close them. Raises the error of a refusal;
    Unavailable for an answer to another question."""
    if isinstance(answer, kind):
        return answer, descriptors
    _close(descriptors)
    raise answer.error if isinstance(answer, Refusal) else Unavailable(f"the sidecar answered with {answer.op}")


def check_descriptors(answer: Answer, descriptors: Sequence[int]) -> None:
    """Check that every descriptor of an answer came: the kernel leaves out those for which the process has no room.
    Raises Unavailable."""
    if len(descriptors) != answer.descriptor_count:
        raise Unavailable(
            f"{len(descriptors)} of {answer.descriptor_count} descriptors came from the sidecar: raise this process's "
            "limit on open files (ulimit -n)"
        )


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
