"""Ports that a test may give to a server it starts."""

from __future__ import annotations

import random
import socket

FIRST, STOP = 10_000, 20_000
"""Below the ports that the kernel gives to outgoing connections, so that no connection takes one before the server
listens on it."""
BUS_OFFSET = 10_000
"""A node of a Redis cluster listens on a second port, so much higher."""


def free_port() -> int:
    """One that nobody listens on now; nobody listens on its bus port either. Chosen at random: test processes run side
    by side."""
    while True:
        port = random.randrange(FIRST, STOP)
        try:
            for each in (port, port + BUS_OFFSET):
                socket.create_server(("127.0.0.1", each)).close()
        except OSError:
            continue
        return port
