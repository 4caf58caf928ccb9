"""Packets with descriptors in them, and who is at the other end."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

from kvstore.errors import Unavailable
from kvstore.handoff.messages import Answer, Done, Question, Refusal, RegionsAnswer, StagingAnswer, Welcome
from kvstore.handoff.packets import PACKET_BYTES_MAX, decode_answer, encode

Said = TypeVar("Said", Welcome, RegionsAnswer, StagingAnswer, Done)
DESCRIPTORS_MAX = 253
"""The kernel's limit for one packet."""


def peer_uid(connection: socket.socket) -> int:
    """The uid at the other end, told by the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def send(
    connection: socket.socket, message: Question | Answer, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """One packet. Raises OSError for a peer that is gone or takes no more, and when the kernel passes nothing."""
    rights = array.array("i", descriptors)
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
    connection.sendmsg([encode(message)], ancillary, flags)


def receive(connection: socket.socket) -> tuple[Answer, list[int]]:
    """The server's next packet, and the descriptors that came with it, which are the caller's. Raises OSError, and
    Unavailable at the end."""
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
    """An answer of this kind, with what came with it. Raises the error that a refusal is, and Unavailable for an answer
    to something else."""
    if isinstance(answer, kind):
        return answer, descriptors
    _close(descriptors)
    raise answer.error if isinstance(answer, Refusal) else Unavailable(f"the sidecar answered with {answer.op}")


def check_descriptors(answer: Answer, descriptors: Sequence[int]) -> None:
    """Check that every descriptor of an answer came: the kernel leaves out what a process has no room for. Raises
    Unavailable."""
    if len(descriptors) != answer.descriptor_count:
        raise Unavailable(
            f"{len(descriptors)} of {answer.descriptor_count} descriptors came from the sidecar: raise this process's "
            "limit on open files (ulimit -n)"
        )


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
