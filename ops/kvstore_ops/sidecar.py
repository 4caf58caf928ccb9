"""A private sidecar for the demo and the benchmarks: a real ``kvstore serve`` process on a fresh directory."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore.errors import Unavailable

END_TIMEOUT_S = 1.0
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
TOKEN = "the-token-of-a-sidecar-of-ones-own"  # noqa: S105 - guards a loopback port of a test or a benchmark


class Sidecar:
    """A sidecar process, started on entry and stopped (SIGTERM) on exit. Its directory is removed on exit, or with the
    object. ``nvme``: size of its device tier, like "1 GiB"; off by default, so that memory alone is measured or tested.
    ``environment`` may be changed between a stop and the next start. ``plane``: with "remote" it also listens on TCP,
    ``address`` is the TCP address, and its token is TOKEN."""

    program: tuple[str, ...] = ("kvstore_ops.cli", "serve")
    """The module that is run, and its first arguments."""

    launch: type[subprocess.Popen[str]] = subprocess.Popen
    """The class that starts the process. Tests use one that saves the time of imports."""

    def __init__(
        self, *arguments: str, environment: dict[str, str] | None = None, nvme: str = "0", plane: str = "local"
    ) -> None:
        self._arguments = (*arguments, "--nvme", nvme)
        self.environment = environment
        self._place = tempfile.TemporaryDirectory(prefix="kvstore-", ignore_cleanup_errors=True)
        self.directory = Path(self._place.name)
        self.process: subprocess.Popen[str] | None = None
        self._account = -1
        self.plane = plane
        self.tcp_address = "127.0.0.1:0"

    @property
    def address(self) -> str:
        return self.socket_address if self.plane == "local" else self.tcp_address

    @property
    def socket_address(self) -> str:
        return f"unix://{self.directory}/run/kvstore.sock"

    def _environment(self) -> dict[str, str] | None:
        if self.plane == "local":
            return self.environment
        tokens = self.directory / "tokens"
        tokens.touch(0o600)
        tokens.write_text(TOKEN)
        own = {"KVSTORE__REMOTE__ADDRESS": self.tcp_address, "KVSTORE__REMOTE__TOKEN_FILE": str(tokens)}
        return {**(os.environ if self.environment is None else self.environment), **own}

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the sidecar, and wait until it is ready. Raises Unavailable when it does not get ready, with the end of
        its log and the ``status`` with which it ended (None: it did not end)."""
        log = self.directory / "log"
        command = [sys.executable, "-m", *self.program, "--state-directory", str(self.directory)]
        command += ["--socket-directory", str(self.directory / "run"), *self._arguments]
        with log.open("a") as stream:
            self.process = self.launch(
                command, stdout=subprocess.PIPE, stderr=stream, text=True, env=self._environment()
            )
        self._open_account()
        line = self._first_line()
        if "ready" not in line:
            try:
                status = self.process.wait(END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            self.stop(kill=True)
            raise Unavailable(f"the sidecar did not start: {log.read_text()[-500:]}", status=status)
        if self.plane == "remote":
            self.tcp_address = line.partition("remote ")[2].partition(",")[0]  # a restart listens on the same port

    def _first_line(self) -> str:
        """Return the line that the sidecar prints when it is ready; empty when it ends, or prints none in time."""
        assert self.process is not None
        assert self.process.stdout is not None
        is_there = select.select([self.process.stdout], [], [], START_TIMEOUT_S)[0]
        return self.process.stdout.readline() if is_there else ""

    def _open_account(self) -> None:
        """Open the kernel's I/O account of the process. Later the process makes it unreadable."""
        try:
            self._account = os.open(f"/proc/{self.pid}/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._account = -1

    def device_read_bytes(self) -> int | None:
        """Return the bytes that the kernel has read from a device for the server and its byte movers since they
        started. None when the kernel denies the read: it checks the reader each time, and only root may read the
        account of an undumpable process."""
        try:
            accounts = [os.pread(self._account, 4096, 0).decode()]
            accounts += [Path(f"/proc/{pid}/io").read_text() for pid in self.mover_pids()]
        except OSError:
            return None
        counts = [int(line.split()[1]) for text in accounts for line in text.splitlines() if "read_bytes:" in line]
        return sum(counts) if counts else None

    def mover_pids(self) -> list[int]:
        """Return the process ids of the byte movers: forks of the server that read and write the device for it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(each) for each in children if Path(f"/proc/{each}/comm").read_text() == "kvstore-mover\n"]

    def wait_prefaulted(self, timeout_s: float = 60.0) -> None:
        """Wait until the whole arena is backed by pages, so that a benchmark does not measure page faults."""
        from kvstore_client import connect

        until = time.monotonic() + timeout_s
        with connect(self.socket_address) as client:
            while time.monotonic() < until:
                arena = client.stats().arena
                if arena.prefaulted_bytes >= arena.capacity_bytes:
                    return
                time.sleep(0.1)

    def stop(self, *, kill: bool = False) -> None:
        """Send SIGTERM (or SIGKILL) and wait. Idempotent. Kills the process and raises TimeoutExpired when it does not
        end in time."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if kill:
            process.kill()
        else:
            process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except BaseException:
            process.kill()
            process.wait(STOP_TIMEOUT_S)
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
            if self._account >= 0:
                os.close(self._account)
            self._account = -1

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # an interrupt, too: else the process would go on alone
            self.stop(kill=True)
            self._place.cleanup()
            raise
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.stop()
        self._place.cleanup()
