"""Runs each benchmark in a process of its own, so that remains of one benchmark neither slow nor break another.

Byte movers must be forked before gRPC has threads (``kvstore/seams/movers``): after a benchmark that was a client, the
next one in the same process could not start any.
"""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from kvstore.errors import KVStoreError
from kvstore_ops.bench import MODULES
from kvstore_ops.extras import needed

COSTLY = ("grpc", "kvstore_client.engines.transformers", "transformers.models.llama.modeling_llama")
"""Modules that many benchmarks import; each import takes some seconds."""


def import_costly() -> None:
    """Import the costly modules. Call it before the first of many benchmarks: the forks then have the modules."""
    for name in COSTLY:
        importlib.import_module(name)


def module_name(name: str) -> str:
    """Return the name of a benchmark's module."""
    return f"kvstore_ops.bench.{MODULES.get(name, name).replace('-', '_')}"


def in_own_process(name: str, scale: str) -> dict[str, Any]:
    """Run a benchmark, and return its result as a dict. The process is a fork, so that it has this process's imports.

    Raises the benchmark's error if that is a KVStoreError; the traceback of any other error is on stderr.
    """
    module = importlib.import_module(module_name(name))
    theirs, ours = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(module, scale, ours), name=f"bench-{name}")
    process.start()
    ours.close()
    try:
        found = theirs.recv()
    except EOFError:
        process.join()
        raise KVStoreError(f"benchmark {name} ended with status {process.exitcode} and no result") from None
    process.join()
    if isinstance(found, KVStoreError):
        raise found
    return dict(found)


def _run(module: Any, scale: str, result: Connection) -> None:
    try:
        result.send(module.run(scale).as_dict())
    except KVStoreError as error:
        result.send(error)
    except KeyboardInterrupt:  # a terminal interrupts the command, too, which ends with the code for it
        return
    except ModuleNotFoundError as error:
        if (lack := needed(error)) is None:
            raise
        result.send(lack)
