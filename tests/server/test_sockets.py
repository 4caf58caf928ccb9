"""The sockets' directory on a file system that takes nothing: each failure is one line that names the setting."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.seams import SystemDisk
from kvstore.server.state import SocketDirectory
from tests.server.test_life import refused


class ReadOnlyDisk(SystemDisk):
    def remove(self, path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def sockets_in(path: Path, disk: SystemDisk) -> SocketDirectory:
    return SocketDirectory(path, disk, tenant="default", uid=None, is_own=False)


def left_behind(path: Path) -> None:
    """Leave a socket as a dead server does."""
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))


def test_a_dead_servers_socket_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    sockets = sockets_in(tmp_path, ReadOnlyDisk())
    left_behind(sockets.grpc)
    with pytest.raises(Unavailable, match=r"kvstore\.sock cannot be made .*Read-only.*: set server\.socket_directory"):
        sockets.claim()


def test_a_socket_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    sockets = sockets_in(tmp_path / "gone", SystemDisk())
    with pytest.raises(Unavailable, match=r"data\.sock cannot be made .*: set server\.socket_directory"):
        sockets.listen()


def test_sockets_that_cannot_be_removed_do_not_keep_the_service_from_its_end(tmp_path: Path) -> None:
    sockets = sockets_in(tmp_path, ReadOnlyDisk())
    left_behind(sockets.grpc)
    sockets.remove()
    assert sockets.grpc.exists()


@pytest.fixture
def one_file(tmp_path: Path) -> Iterator[Path]:
    """A file system that has room for one file."""
    place = tmp_path / "run"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "nr_inodes=2,mode=700", "tmpfs", str(place)], check=False
    ).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_place_where_grpc_cannot_listen_is_named(one_file: Path) -> None:
    words = refused(one_file.parent)  # data.sock is the one file
    assert "kvstore.sock cannot be made" in words
    assert "set server.socket_directory" in words
