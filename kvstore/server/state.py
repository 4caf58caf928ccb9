"""The server's directories, the lock that keeps a second server away, and checks of the sockets' owners."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from kvstore.config import Settings
from kvstore.errors import Unavailable
from kvstore.seams import Disk
from kvstore.seams.disk import LOCK_WAIT_S

GRPC_SOCKET = "kvstore.sock"
DATA_SOCKET = "data.sock"
PRIVATE, PASSABLE = 0o700, 0o711
"""Modes of a directory with sockets: for the server's user alone, or other users may pass through it to their own
socket."""


def prepare(settings: Settings, disk: Disk) -> int:
    """Make the directories and lock the state directory. Return the lock's descriptor, held until the process ends.

    Raises Unavailable when another server uses the directory, when this user may not write it, or when that of the
    sockets is not this user's alone.
    """
    server = settings.server
    for setting in ("state_directory", "socket_directory"):
        try:
            disk.make_directory(getattr(server, setting))
        except Unavailable as error:
            remedy = f"set server.{setting} to a directory that this user may make and write"
            raise Unavailable(f"{error.message}: {remedy}") from error
    allowed = PASSABLE if serves_others(settings) else PRIVATE
    status = os.stat(server.socket_directory)
    if status.st_uid != os.geteuid():
        raise Unavailable(
            f"{server.socket_directory} belongs to user {status.st_uid}, and the service runs as {os.geteuid()}: run "
            "it as that user, or set server.socket_directory"
        )
    if status.st_mode & 0o777 & ~allowed:
        raise Unavailable(
            f"{server.socket_directory} must belong to this user with mode 0700: "
            "run chmod 700 on it, or set server.socket_directory"
        )
    path = server.state_directory / "lock"
    try:
        descriptor = disk.open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise Unavailable(
            f"{path} cannot be written ({error.strerror}): run the service as the user whose directory it is, or set "
            "server.state_directory to one that this user may write"
        ) from error
    if not disk.lock(descriptor, LOCK_WAIT_S):
        disk.close(descriptor)
        raise Unavailable(
            f"another kvstore server uses {server.state_directory}: stop it, or set server.state_directory"
        )
    if allowed == PASSABLE:
        os.chmod(server.socket_directory, PASSABLE)
    return descriptor


def close_again(settings: Settings) -> None:
    """Close the socket directory, which ``prepare`` opened to other users. Where the default tenant's socket is left,
    another server serves them there."""
    directory = settings.server.socket_directory
    if serves_others(settings) and not (directory / GRPC_SOCKET).exists():
        os.chmod(directory, PRIVATE)


def serves_others(settings: Settings) -> bool:
    """True when a tenant's sockets belong to another user than the server's."""
    return any(is_other(tenant.uid) for tenant in settings.tenants.values())


def is_other(uid: int | None) -> bool:
    """True when ``uid`` is set and is not this process's user."""
    return uid is not None and uid != os.geteuid()


class SocketDirectory:
    """One tenant's sockets. The directory belongs to the server's user even when the sockets are another user's: a user
    who could write it could plant links that a server running as root follows."""

    def __init__(self, path: Path, disk: Disk, *, tenant: str, uid: int | None, is_own: bool) -> None:
        """``is_own``: the directory is made and removed for this tenant; otherwise ``prepare`` made it."""
        self.path = path
        self._disk = disk
        self._setting = f"tenants.{tenant}.uid"
        self._uid = uid
        self._is_own = is_own

    @property
    def grpc(self) -> Path:
        return self.path / GRPC_SOCKET

    @property
    def data(self) -> Path:
        return self.path / DATA_SOCKET

    def claim(self) -> None:
        """Make the directory, and remove sockets that a dead server left. Raises Unavailable naming the remedy."""
        if self._is_own:
            self._disk.make_directory(self.path)
        try:
            if self._is_own:
                status = os.lstat(self.path)
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    raise Unavailable(f"{self.path} must be a directory of this user: move it away")
                os.chmod(self.path, PASSABLE if is_other(self._uid) else PRIVATE)
            if self._uid is not None and is_other(self._uid):
                self._check_reach(self._uid)
            for path in (self.grpc, self.data):
                claim_socket(path, self._disk)
        except BaseException:
            self._remove_directory()
            raise

    def _check_reach(self, uid: int) -> None:
        """Raises Unavailable naming the directory that keeps the user from the sockets."""
        for each in (self.path, *self.path.resolve().parents):
            status = os.stat(each)
            # The group may let the user in, too; his groups are not looked up.
            if not status.st_mode & (stat.S_IXOTH | stat.S_IXGRP | (stat.S_IXUSR if status.st_uid == uid else 0)):
                raise Unavailable(
                    f"{self._setting} = {uid}: {each} (mode {stat.S_IMODE(status.st_mode):04o}) keeps that user from "
                    f"{self.path}: set server.socket_directory to a place others can reach, like /run/kvstore"
                )

    def give(self, path: Path) -> None:
        """Let the tenant's user, and nobody else, connect to a socket. Raises Unavailable where this server's user may
        not do so."""
        os.chmod(path, 0o600)
        if self._uid is None or not is_other(self._uid):
            return
        try:
            os.chown(path, self._uid, -1)
        except OSError as error:
            raise Unavailable(
                f"{self._setting} = {self._uid}: this server runs as user {os.geteuid()} and may not give a socket to "
                f"another ({error.strerror}): start it as root, or leave {self._setting} out"
            ) from error

    def listen(self) -> socket.socket:
        """Return the hand-off's listening socket: non-blocking, SEQPACKET. Raises Unavailable."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.bind(str(self.data))
            self.give(self.data)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise no_socket(self.data, error.strerror or error) from error
        except BaseException:
            listener.close()
            raise
        listener.setblocking(False)
        return listener

    def remove(self) -> None:
        """Remove the sockets, and the directory if it was made for them. Idempotent. A socket that cannot be removed
        stays: the next start removes it."""
        for path in (self.grpc, self.data):
            with suppress(OSError):
                self._disk.remove(path)
        self._remove_directory()

    def _remove_directory(self) -> None:
        if self._is_own:
            try:
                self.path.rmdir()
            except OSError:
                return  # it has other files, or is gone already


def claim_socket(path: Path, disk: Disk) -> None:
    """Remove a socket that a dead server left. Raises Unavailable when a live server answers on it, when the path is no
    socket, or when it cannot be removed."""
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
    try:
        disk.remove(path)
    except OSError as error:
        raise no_socket(path, error.strerror or error) from error


def no_socket(path: Path, reason: object) -> Unavailable:
    """Return the error for a socket that cannot be made, or whose predecessor cannot be removed."""
    return Unavailable(
        f"{path} cannot be made ({reason}): set server.socket_directory to a directory that this user may write"
    )
