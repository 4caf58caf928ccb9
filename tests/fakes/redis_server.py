"""A real Redis server of a test's own, and chunks in it as others may leave them there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from kvstore.tiers.redis.embedded import dying_with_us, server_binary
from kvstore.tiers.redis.names import HEADER_FIELD, ChunkKeys

START_S_MAX = 10.0
KEYS = ChunkKeys("kvstore")
NAMED = "KVSTORE_TEST_REDIS_SERVER"


def binary() -> Path:
    """The server of all tests: the one that is named, else the wheel's."""
    named = os.environ.get(NAMED)
    return Path(named) if named else server_binary()


def other_binary() -> Path | None:
    """A Redis 7 or newer, or a Valkey, of this machine, beside the one of all tests; None: there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found and not os.environ.get(NAMED):
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
            if int(re.search(r"v=(\d+)", said)[1]) >= 7:
                return Path(found)
    return None


NO_OTHER = f"no Redis 7 or Valkey on the PATH beside the server of all tests, which {NAMED} may name"


class RedisServer:
    """Started when it is made, on a unix socket in a directory of its own, and on a loopback port where one is given.
    ``options``: more of its command line."""

    def __init__(self, *options: str, port: int = 0, is_sentinel: bool = False, program: Path | None = None) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="kvstore-redis-", ignore_cleanup_errors=True)
        self.directory = Path(self._place.name)
        self.port = port
        self._options = options
        self._is_sentinel = is_sentinel
        self._program = program or binary()
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def path(self) -> str:
        return f"{self.directory}/redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def start(self) -> None:
        """Returns when it answers."""
        command = [*dying_with_us(), str(self._program)]
        if self._is_sentinel:
            (self.directory / "sentinel.conf").touch()
            command.append(f"{self.directory}/sentinel.conf")
        command += [
            "--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.path, "--dir", str(self.directory),
            *self._options,
        ]  # fmt: skip
        command += ["--sentinel"] if self._is_sentinel else ["--save", "", "--appendonly", "no"]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        until_s = time.monotonic() + START_S_MAX
        while not self._is_there():
            assert time.monotonic() < until_s, (self.directory / "log").read_text()[-2000:]
            time.sleep(0.01)

    def _is_there(self) -> bool:
        try:
            with self.client() as client:
                client.ping()
        except redis.ResponseError:
            return True  # it wants to be asked otherwise
        except redis.AuthenticationError:
            return True
        except redis.ConnectionError:
            return False
        return True

    def client(self, **options: Any) -> Any:
        """redis-py's, to look and to spoil."""
        return redis.Redis(unix_socket_path=self.path, protocol=2, **options)

    def stop(self) -> None:
        """It answers nobody, and keeps its connections."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """After ``stop``."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """All that it had is gone. Idempotent."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Idempotent."""
        self.kill()
        self._place.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()


def body_fields(client: Any, storage_key: bytes) -> list[bytes]:
    """The names of a chunk's fields beside its header, in their order."""
    names = [name for name in client.hkeys(KEYS.chunk(storage_key)) if name != HEADER_FIELD]
    return sorted(names, key=lambda name: int(name.rpartition(b".")[2]))
