"""Answers of the hand-off, and the descriptors that travel in them.

Answers that were sent and not yet read lie in the kernel. Their descriptors count against the sending user's limit on
open files. Past that limit the kernel passes no descriptors any more, neither to sessions nor to byte movers. So only a
few answers to a peer may be unread, and the unread answers to all peers of a tenant have a share of the limit. A peer
that goes with answers unread is remembered until they are gone: closing the server's end does not take them back.
"""

from __future__ import annotations

import fcntl
import socket
import termios
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidRequest
from kvstore.handoff.messages import Answer
from kvstore.handoff.passing import send

IN_FLIGHT_SHARE = 0.4
"""The share of the limit on open files for descriptors that peers, of all tenants, have not read. Byte movers need the
rest."""
REPLIES_AHEAD = 8
"""Unread answers that a peer may have. Clients ask at most two questions at once."""


class Unread(InvalidRequest):
    """A peer goes on asking without reading the answers. It is disconnected."""


@dataclass
class _Sent:
    """Counts of what one connection was sent since all was last seen to be read."""

    reply_count: int = 0
    descriptor_count: int = 0


class Outbox:
    """The answers to all peers of one tenant that may be unread."""

    def __init__(self, descriptor_count_max: int) -> None:
        self._most = descriptor_count_max
        self._sent: dict[socket.socket, _Sent] = {}

    def room(self, connection: socket.socket, wanted: int) -> int:
        """Return how many of the ``wanted`` descriptors may be sent now: all, or, when the share is used up, one, with
        which every client can go on. Raises Unread when it is used up and this peer has unread answers already."""
        for each in [each for each in self._sent if not is_unread(each)]:
            del self._sent[each]
        if sum(each.descriptor_count for each in self._sent.values()) + wanted <= self._most:
            return wanted
        if connection in self._sent and wanted:
            raise Unread("read the answers before you ask for more")
        return min(wanted, 1)

    def send(self, connection: socket.socket, answer: Answer, descriptors: Sequence[int] = ()) -> None:
        """Send one packet, and do not wait for the peer. Raises Unread for a peer with too many unread answers; OSError
        for a peer that is gone or to which the kernel passes nothing. Such a peer is to be disconnected."""
        sent = self._sent.get(connection)
        if sent is None or not is_unread(connection):
            sent = self._sent[connection] = _Sent()
        if sent.reply_count >= REPLIES_AHEAD:
            raise Unread(f"{sent.reply_count} answers are unread: read them before you ask again")
        assert len(descriptors) == answer.descriptor_count, answer.op
        sent.reply_count += 1
        sent.descriptor_count += len(descriptors)
        send(connection, answer, descriptors)

    def is_in_flight(self, connection: socket.socket) -> bool:
        """True when the peer has not read all descriptors that it was sent."""
        sent = self._sent.get(connection)
        return sent is not None and sent.descriptor_count > 0 and is_unread(connection)

    def forget(self, connection: socket.socket) -> None:
        """Forget a connection that is about to be closed."""
        self._sent.pop(connection, None)


def is_unread(connection: socket.socket) -> bool:
    """True when the peer has packets from here to read; False once it has closed its end."""
    return any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
