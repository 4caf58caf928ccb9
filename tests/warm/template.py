"""The template: a process that has imported, and forks a child for each order. ``tests.warm`` starts it as a file.

Its arguments are the descriptor of its end of a socket pair, and the modules.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from types import ModuleType
from typing import Any, NoReturn

ORDER_BYTES_MAX = 1 << 17
ADOPTION_INTERVAL_S = 0.0005
SIDECAR = "kvstore_ops.cli"


def take_orders(end: socket.socket, modules: list[str]) -> dict[str, Any] | None:
    """Fork a child for each order. Returns the order in a child, and None in the template when all is over."""
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a fork would lose the {len(threads) - 1} threads that an import started: {modules}"
    gc.collect()
    gc.freeze()  # else a collection in a child writes to every page that it shares with the template
    while True:
        packet, streams, _, _ = socket.recv_fds(end, ORDER_BYTES_MAX, 3)
        if not packet:
            return None
        between = os.fork()
        if not between:
            own = os.getpid()
            child = os.fork()
            if child:
                end.send(str(child).encode())
                os._exit(0)  # now the child belongs to the process that ordered it
            while os.getppid() == own:
                time.sleep(ADOPTION_INTERVAL_S)
            end.close()
            take_streams(streams)
            order: dict[str, Any] = json.loads(packet)
            return order
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)
        end.send(b"adopted")


def take_streams(streams: list[int]) -> None:
    """Make these descriptors the standard streams."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def end_as(order: dict[str, Any]) -> NoReturn:
    """Run the order, and end as Python ends: threads are waited for, what ``atexit`` has is called, streams are
    flushed. The interpreter is not taken apart: that would copy all memory which the template shares."""
    code = 0
    try:
        become(order)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if not isinstance(ended.code, int | None):
            print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        raise  # Python ends by the signal itself
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # as Python's own end calls it
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)


def become(order: dict[str, Any]) -> None:
    """Run what ``python -m MODULE`` or ``python -c CODE`` runs, and raise what that raises."""
    if order["new_session"]:
        os.setsid()
    os.chdir(order["directory"])
    os.umask(order["umask"])
    resource.setrlimit(resource.RLIMIT_NOFILE, order["files"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # an import may have asked for it
    kind, what, *arguments = order["arguments"]
    sys.argv = [kind, *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if what == SIDECAR and "KVSTORE__REMOTE__ADDRESS" in os.environ:
        ahead = importlib.import_module("tests.warm.ahead")
        subprocess.Popen = ahead.Ahead().popen  # type: ignore[misc]  # a function in the place of a class
    if kind == "-m":
        sys.path[0] = os.getcwd()
        with warnings.catch_warnings(action="ignore"):  # what the template imported may be run all the same
            _, found, code = runpy._get_module_details(what)  # type: ignore[attr-defined]  # what python -m calls
        sys.argv[0] = found.origin
        runpy._run_code(code, main.__dict__, mod_name="__main__", mod_spec=found)  # type: ignore[attr-defined]
    else:
        sys.path[0] = ""
        runpy._run_code(compile(what, "<string>", "exec"), main.__dict__, mod_name="__main__")


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as -m has it: rooms beside this file have the names of other modules
    ordered = take_orders(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    if ordered is not None:
        end_as(ordered)
