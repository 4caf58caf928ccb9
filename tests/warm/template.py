"""The template: a process that has imported, and forks a child for each order. ``tests.warm`` starts it as a file.

Its arguments are the descriptor of its end of a socket pair, and the modules.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import socket
import sys
import tempfile
import time
from types import ModuleType
from typing import Any

ORDER_BYTES_MAX = 1 << 17
ADOPTION_INTERVAL_S = 0.0005


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
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            order: dict[str, Any] = json.loads(packet)
            return order
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)
        end.send(b"adopted")


def become(order: dict[str, Any]) -> None:
    """Run what ``python -m MODULE`` or ``python -c CODE`` runs. What it raises ends the process."""
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
    if kind == "-m":
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(what)
    else:
        sys.path[0] = ""
        runpy._run_code(compile(what, "<string>", "exec"), main.__dict__, mod_name="__main__")


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as -m has it: rooms beside this file have the names of other modules
    ordered = take_orders(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
    if ordered is not None:
        become(ordered)
