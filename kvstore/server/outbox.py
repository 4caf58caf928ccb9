"""Answers of the hand-off, and the descriptors that travel in them.

What was sent and not yet read lies in the kernel. Its descriptors count against the limit on open files of the user who
sent them; past that the kernel passes nobody's any more: no session's, and none of the byte movers'. So few
answers to a peer may be unread, those to all peers of a tenant have a share of the limit, and a peer that goes with
answers unread is remembered until they are gone: closing our end does not take them back.
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
"""Of the limit on open files, for what the peers of all tenants have not read; byte movers need the rest."""
REPLIES_AHEAD = 8
"""Answers to a peer that has read none of them. Clients ask for at most two things at once."""


class Unread(InvalidRequest):
    """A peer asks on and does not read: it is let go."""


@dataclass
class _Sent:
    """Of one connection, since it was last seen empty."""

    reply_count: int = 0
    descriptor_count: int = 0


class Outbox:
    """The descriptors that were sent to all peers of one tenant and may not have been read."""

    def __init__(self, descriptor_count_max: int) -> None:
        self._most = descriptor_count_max
        self._sent: dict[socket.socket, _Sent] = {}

    def room(self, connection: socket.socket, wanted: int) -> int:
        """Return how many of the ``wanted`` descriptors may travel now: all of them, or one, with which everybody gets
        on. Raises Unread for a peer that has some already while the share is used up."""
        for each in [each for each in self._sent if not is_unread(each)]:
            del self._sent[each]
        if sum(each.descriptor_count for each in self._sent.values()) + wanted <= self._most:
            return wanted
        if connection in self._sent and wanted:
            raise Unread("read the answers before you ask for more")
        return min(wanted, 1)

    def send(self, connection: socket.socket, answer: Answer, descriptors: Sequence[int] = ()) -> None:
        """One packet. Raises Unread for a peer that has not read those before, OSError for one that is gone or to
        whom the kernel passes nothing: it is disconnected, not waited for."""
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
        """Return True when descriptors that were sent there are still on their way."""
        sent = self._sent.get(connection)
        return sent is not None and sent.descriptor_count > 0 and is_unread(connection)

    def forget(self, connection: socket.socket) -> None:
        """Before it is closed."""
        self._sent.pop(connection, None)


def is_unread(connection: socket.socket) -> bool:
    """Return True when the peer has something of ours to read. Nothing once it has closed its end."""
    return any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
