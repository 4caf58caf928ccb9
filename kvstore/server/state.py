"""Directories, the lock that keeps a second server away, and sockets that are really ours."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from kvstore.config import ServerSettings
from kvstore.errors import Unavailable
from kvstore.seams import Disk

GRPC_SOCKET = "kvstore.sock"
DATA_SOCKET = "data.sock"


def prepare(settings: ServerSettings, disk: Disk) -> int:
    """Make the directories and take the state's lock. Returns the lock's descriptor, held until the process ends.

    Raises: Unavailable when another server uses the directory, or it cannot be made ours.
    """
    for directory in (settings.state_directory, settings.socket_directory):
        disk.make_directory(directory)
    status = os.stat(settings.socket_directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise Unavailable(
            f"{settings.socket_directory} must belong to this user with mode 0700: "
            "run chmod 700 on it, or set server.socket_directory"
        )
    path = settings.state_directory / "lock"
    descriptor = disk.open(path, os.O_RDWR | os.O_CREAT)
    if not disk.lock(descriptor):
        disk.close(descriptor)
        raise Unavailable(
            f"another kvstore server uses {settings.state_directory}: stop it, or set server.state_directory"
        )
    return descriptor


def claim_socket(path: Path, disk: Disk) -> None:
    """Remove a socket that a dead server left. Raises Unavailable when a live one answers on it, or when the path
    is something that no server made."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise Unavailable(f"{path} is not a socket: move it away, or set server.socket_directory")
    for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(path))
            except OSError:
                continue
            raise Unavailable(f"another server listens on {path}: stop it, or set server.socket_directory")
    disk.remove(path)


def listen(path: Path) -> socket.socket:
    """A non-blocking SEQPACKET listener, mode 0600."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener
