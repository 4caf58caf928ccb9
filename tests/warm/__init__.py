"""Warm starts of Python processes: a child of a process that has imported already, instead of a second of imports.

``Warm(*modules).popen`` is a ``subprocess.Popen`` for commands like ``[sys.executable, "-m", MODULE, ...]`` and
``[sys.executable, "-c", CODE, ...]``. A template process imports ``modules`` once, and forks a child for each command.
The child takes the command's arguments, environment, directory, standard streams, session and limit of open files, and
then runs what Python would run. It becomes a child of this process: to wait for it, and to kill it, works as ever.

What the environment decides at imports was decided in the template. A command whose environment differs from the
template's in more than variables that are read when they are needed gets an ordinary process. So does a command with an
option that a fork cannot follow.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tests.warm.template import ORDER_BYTES_MAX, end_as, take_orders

TEMPLATE = Path(__file__).with_name("template.py")
ANSWER_BYTES_MAX = 64
START_S_MAX = 120.0
"""A template that has not imported, or forked, by then hangs: the test fails, and the run goes on."""
READ_WHEN_NEEDED = (
    "AWS_", "CUBLAS_WORKSPACE_CONFIG", "GRPC_VERBOSITY", "KVSTORE", "MALLOC_", "PYTEST_CURRENT_TEST",
    "TRITON_INTERPRET",
)  # fmt: skip
"""Variables that begin so are not read at imports. (The C library and gRPC read their own when a process starts: a fork
has the memory settings that its template had, and gRPC in it logs as there. Triton reads its own when it is imported:
the templates of sidecars and of their clients do not import it.)"""

_PR_SET_CHILD_SUBREAPER = 36
_OPTIONS = tuple(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]
_ORDINARY = {
    "executable": None, "preexec_fn": None, "pass_fds": (), "shell": False, "gid": None, "gids": None, "uid": None,
    "umask": -1, "process_group": -1,
}  # fmt: skip
"""A fork cannot follow any other value of these."""
_ORDERING = threading.Lock()
"""Held while orphans are adopted, which the whole process does or does not."""


class Warm:
    """Starts Python processes that have imported ``modules``. The template starts with the first of them, in
    ``directory`` (None: this tree) and with ``environment`` (None: this process's)."""

    def __init__(
        self, *modules: str, directory: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self._modules = modules
        self._directory = directory or TEMPLATE.parents[2]
        self._given = environment
        self._lock = threading.Lock()
        self._end: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        self._owner = 0
        self.popen: type[subprocess.Popen[Any]] = type("WarmPopen", (WarmPopen,), {"warm": self})

    def run(
        self, command: list[str], *, timeout: float, given: str = "", **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run``: it is ``given`` text, and its words are captured as text."""
        pipe = subprocess.PIPE
        with self.popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options) as process:
            try:
                output, errors = process.communicate(given, timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def can_follow(self, environment: dict[str, str]) -> bool:
        """Return True when a process with this environment imports as the template did, and would be a child of this
        one."""
        is_alone = environment.get("OMP_NUM_THREADS") == "1"  # else numpy's import starts threads: forks lose them
        if not is_alone:
            return False
        with self._lock:
            self._start()
        return self._owner == os.getpid() and at_imports(environment) == at_imports(self._environment)

    def order(self, order: bytes, streams: list[int]) -> int:
        """The process id of a new child. Raises RuntimeError when the template has ended."""
        with self._lock, _ORDERING:
            end = self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(end, [order], streams)
                child, adopted = end.recv(ANSWER_BYTES_MAX), end.recv(ANSWER_BYTES_MAX)
            finally:
                _adopt_orphans(False)
        if not adopted:
            raise RuntimeError(f"the template of {', '.join(self._modules)} ended")
        return int(child)

    def _start(self) -> socket.socket:
        if self._end is None:
            self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._end.settimeout(START_S_MAX)
            self._owner, self._environment = os.getpid(), dict(os.environ if self._given is None else self._given)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, str(TEMPLATE), str(theirs.fileno()), *self._modules], cwd=self._directory,
                    env=self._environment, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )  # fmt: skip
        return self._end

    def begin_as_fork(self) -> None:
        """Start the template as a fork of this process, which has imported and has one thread."""
        with self._lock:
            self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._end.settimeout(START_S_MAX)
            self._owner, self._environment = os.getpid(), dict(os.environ)
            if os.fork():
                theirs.close()
                return
        self._end.close()
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 - a fork of multiprocessing's reads nothing
        order = take_orders(theirs, [])
        if order is None:
            os._exit(0)
        end_as(order)

    def close(self) -> None:
        """End the template. Idempotent. Another start makes a new one."""
        with self._lock:
            end, process, self._end, self._process = self._end, self._process, None, None
        if end is not None:
            end.close()
        if process is not None:
            process.kill()  # it may import yet
            process.wait()


class Starts(Protocol):
    """What starts a process for an order, or cannot."""

    def can_follow(self, environment: dict[str, str]) -> bool: ...

    def order(self, order: bytes, streams: list[int]) -> int: ...


class WarmPopen(subprocess.Popen[Any]):
    """Has ``warm`` start what that can, and the operating system all else."""

    warm: Starts

    def _execute_child(self, *given: Any) -> None:
        options = dict(zip(_OPTIONS, given, strict=True))
        order = self._order(options)
        if order is None:
            super()._execute_child(*given)
            return
        streams = [options["p2cread"], options["c2pwrite"], options["errwrite"]]
        self.pid = self.warm.order(order, [number if each == -1 else each for number, each in enumerate(streams)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(options[name] for name in pipes))

    def _order(self, options: dict[str, Any]) -> bytes | None:
        """What the template is told. None for what it cannot do."""
        program, *arguments = options["args"]
        environment = dict(os.environ if options["env"] is None else options["env"])
        is_python = program == sys.executable and len(arguments) > 1 and arguments[0] in ("-m", "-c")
        is_ordinary = all(options.get(name, value) == value for name, value in _ORDINARY.items())
        if not (is_python and is_ordinary and self.warm.can_follow(environment)):
            return None
        os.umask(umask := os.umask(0o077))
        order = {
            "arguments": [str(each) for each in arguments],
            "directory": os.path.abspath(options["cwd"] or "."),
            "environment": environment,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "umask": umask,
            "new_session": options["start_new_session"],
        }
        packet = json.dumps(order).encode()
        return packet if len(packet) <= ORDER_BYTES_MAX else None


def at_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what of an environment imports may depend on."""
    return {name: value for name, value in environment.items() if not name.startswith(READ_WHEN_NEEDED)}


def _adopt_orphans(is_on: bool) -> None:
    """Return True when orphans among this process's descendants become its children. Only while one is ordered: all
    others are for init to wait for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0)
