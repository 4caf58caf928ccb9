"""A benchmark runs in a process of its own, so that what one leaves behind slows or breaks no other.

Byte movers are forks from before gRPC has threads (``kvstore/seams/movers``): after a benchmark that was a client, the
next one in its process could not start any.
"""

from __future__ import annotations

import importlib
import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

from kvstore.errors import KVStoreError

COSTLY = ("grpc", "kvstore_client.engines.transformers", "transformers.models.llama.modeling_llama")
"""What many benchmarks import, some seconds each time."""


def import_costly() -> None:
    """Whoever runs many benchmarks calls this before the first: the forks have it then."""
    for name in COSTLY:
        importlib.import_module(name)


def in_own_process(name: str, scale: str) -> dict[str, Any]:
    """The result of a benchmark as a dict. The process is a fork: what is imported here is not imported again.

    Raises what the benchmark raised, if that is an error of this product; for others the traceback is on stderr.
    """
    module = importlib.import_module(f"kvstore_ops.bench.{name.replace('-', '_')}")
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
