"""A child of a sidecar, forked before the sidecar has threads: it becomes the remote plane's process when that starts.

The sidecar starts that process by ``python -m``, as a child of its own, which imports for half a second. So a sidecar
that starts warm and has a remote address begins with a fork of itself that waits. Once it was used, or when it cannot
follow, ordinary processes start.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from typing import Any

from tests.warm import ANSWER_BYTES_MAX, WarmPopen, at_imports
from tests.warm.template import ORDER_BYTES_MAX, end_as, take_streams


class Ahead:
    """Has what ``WarmPopen`` asks of a ``Warm``. Made while this process has one thread."""

    def __init__(self) -> None:
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)
        self._child = os.fork()
        if not self._child:
            self._end.close()
            _wait(theirs)
        theirs.close()
        self.popen: type[subprocess.Popen[Any]] = type("AheadPopen", (WarmPopen,), {"warm": self})

    def can_follow(self, environment: dict[str, str]) -> bool:
        """Return True when nothing was ordered yet, and a process with this environment imports as this one did."""
        return bool(self._child) and at_imports(environment) == at_imports(self._environment)

    def order(self, order: bytes, streams: list[int]) -> int:
        """The process id of the child, which is the order's now."""
        child, self._child = self._child, 0
        with self._end:
            socket.send_fds(self._end, [order], streams)
            self._end.recv(ANSWER_BYTES_MAX)  # it has the streams
        return child


def _wait(end: socket.socket) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):  # else who reads the sidecar's output would wait for the end of this process, too
        os.dup2(nothing, stream)
    os.close(nothing)
    packet, streams, _, _ = socket.recv_fds(end, ORDER_BYTES_MAX, 3)
    if not packet:
        os._exit(0)
    take_streams(streams)
    end.send(b"taken")
    end.close()
    end_as(json.loads(packet))
