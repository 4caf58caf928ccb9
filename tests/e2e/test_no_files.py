"""A process that can open no file more misses, and stores nothing; once it can it goes on."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import Unavailable
from kvstore.spec import Durability, MissReason
from tests.server.raw import eventually
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec(model_id="no files")
COUNT = 32


@contextmanager
def no_more_files(pid: int, more: int = 0) -> Iterator[None]:
    """The process has what it has, and ``more``."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    taken = {int(each) for each in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{each}")}
    free = (number for number in range(soft) if number not in taken)
    for _ in range(more):
        next(free)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(free), hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_without_files(sidecar: Sidecar) -> None:
    tokens, kv = tokens_of(COUNT, 1), random_cache(SPEC, COUNT, 1)
    with connect(sidecar.address) as before:
        before.store(SPEC, tokens, kv).wait(20)
        with no_more_files(os.getpid()):
            with pytest.raises(Unavailable):
                connect(sidecar.address, timeout_s=5.0)
            client = connect(sidecar.address, timeout_s=5.0, required=False)
            assert client.fetch(SPEC, tokens).reason is MissReason.UNAVAILABLE
            assert client.store(SPEC, tokens, kv).wait(20) is Durability.NONE
            assert before.fetch(SPEC, tokens).token_count == COUNT
        eventually(lambda: client.fetch(SPEC, tokens).token_count == COUNT)
        client.close()


@pytest.mark.parametrize("more", [1, 2, 3])
def test_a_remote_plane_without_files(more: int) -> None:
    """One goes to the connection; the others to the session that it asks for."""
    with Sidecar("--capacity", "8 MiB", plane="remote") as sidecar, connect(sidecar.address) as client:
        client.store(SPEC, tokens_of(COUNT, 1), random_cache(SPEC, COUNT, 1)).wait(20)
        movers = sidecar.mover_pids()
        (plane,) = (each for each in psutil.Process(sidecar.pid).children() if each.pid not in movers)
        with no_more_files(plane.pid, more), pytest.raises(Unavailable):
            connect(sidecar.address, timeout_s=5.0)
        assert client.fetch(SPEC, tokens_of(COUNT, 1)).token_count == COUNT
        with connect(sidecar.address) as another:
            assert another.fetch(SPEC, tokens_of(COUNT, 1)).token_count == COUNT
