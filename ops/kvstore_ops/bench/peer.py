"""Shared by the benchmarks beside other products: an environment of their own, and programs that take commands."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from kvstore.errors import Unavailable
from kvstore.tiers.redis.embedded import dying_with_us
from kvstore_ops.bench.result import note

LMCACHE, LMCACHE_PACKAGES = "KVSTORE_BENCH_LMCACHE", ("lmcache==0.5.6", "torch==2.13.0", "awscrt==0.38.1")
"""The variable that names LMCache's environment, and what pip puts there. awscrt is for LMCache's S3 adapter."""
START_S_MAX = 120.0


def environment(variable: str, packages: Sequence[str]) -> Path:
    """Return the Python of a product's environment, in the directory that the variable names; pip makes it there when
    it is missing. Raises Unavailable when the variable is not set."""
    place = os.environ.get(variable)
    if not place:
        raise Unavailable(f"{variable} is not set: name a directory with {packages[0]}'s environment, or to make it in")
    python = Path(place) / "bin" / "python"
    if not python.exists():
        note(f"making {place}: {' '.join(packages)}")
        try:
            subprocess.run([sys.executable, "-m", "venv", place], check=True)
            subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"{packages[0]} cannot be installed in {place}: {error}") from error
    return python


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    return port


class Program:
    """A product's program, which gets its commands line by line and answers each with its seconds. It ends with us.
    ``log``: the file for its stderr; None: ours. Raises Unavailable when it does not start."""

    def __init__(
        self, command: Sequence[str], variables: dict[str, str] | None = None, *, log: Path | None = None
    ) -> None:
        self._name = Path(command[-1] if len(command) < 3 else command[2]).name
        self._log = log
        with (log or Path(os.devnull)).open("a") as stream:
            self._process = subprocess.Popen(
                [*dying_with_us(), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, **(variables or {})}, stderr=stream if log else None,
            )  # fmt: skip
        assert self._said() == "ready"

    def _said(self) -> str:
        assert self._process.stdout is not None
        while (line := self._process.stdout.readline()) and not (line[:1].isdigit() or line == "ready\n"):
            continue  # skip its log
        if not line:
            words = self._log.read_text(errors="replace")[-1500:] if self._log else "see above"
            raise Unavailable(f"{self._name} ended with status {self._process.wait()}: {words}")
        return line.strip()

    def do(self, what: str, name: str) -> float:
        """Do a command under a name, and return its seconds. Raises Unavailable when the program has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{what} {name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # what it said last is in the error below
        return float(self._said())

    def close(self) -> None:
        """Kill the program. Idempotent."""
        self._process.kill()
        self._process.wait()


class Daemon:
    """A product's server, killed on exit. Its output goes to a log."""

    def __init__(self, command: Sequence[str], port: int, variables: dict[str, str], log: Path) -> None:
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                [*dying_with_us(), *command], stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                env={**os.environ, **variables},
            )  # fmt: skip
        until_s = time.monotonic() + START_S_MAX
        while not _answers(port):
            if self._process.poll() is not None or time.monotonic() > until_s:
                self.close()
                raise Unavailable(f"{command[0]} did not start: {log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """Kill the server. Idempotent."""
        self._process.kill()
        self._process.wait()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True
