"""A sidecar that stands still under SGLang's own controller: its threads are held once and briefly, and a flush of the
cache, which ends the engine when one of them does not stop in ten seconds, goes well."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from kvstore_ops.sidecar import Sidecar
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from tests.server.raw import eventually
from tests.sglang.engine import PAGE, WAIT_S, Engine, engine, hashes, key_of

JOIN_S = 10.0
"""Seconds that SGLang waits for each of its threads to stop."""


@contextmanager
def standing_still(sidecar: Sidecar) -> Iterator[None]:
    os.kill(sidecar.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(sidecar.pid, signal.SIGCONT)


def took_s(call: Any) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def test_a_flush_while_the_sidecar_stands_still_goes_well(own_sidecar: Sidecar) -> None:
    """A prefetch that was aborted is in its call, of a model with a second pool under the first one's indices."""
    tokens = range(1000, 1000 + 4 * PAGE)
    with engine(own_sidecar.address) as one:
        saved = one.save(tokens)
        indexer = PoolTransfer(PoolName.SWA, indices_from_pool=PoolName.KV)
        one.controller.prefetch(CacheRequestHandle("request", 0), key_of(tokens), None, None)
        operation = one.controller.prefetch_hit_queue.get(timeout=WAIT_S)
        operation.host_indices = one.host.alloc(operation.storage_hit_count)
        operation.pool_transfers = [indexer]
        with standing_still(own_sidecar):
            one.controller.prefetch_buffer.put(operation)
            eventually(one.controller.prefetch_buffer.empty)
            one.controller.terminate_prefetch(operation)
            assert took_s(one.controller.reset) < JOIN_S  # raises RuntimeError where a thread does not stop
        eventually(lambda: torch.equal(one.load(tokens), saved), seconds=WAIT_S)


def backed_up(one: Engine, indices: torch.Tensor, tokens: range) -> int:
    """Back up pages, and return how many tokens the backend has kept."""
    one.controller.write_storage(indices, list(tokens), hashes(tokens), None)
    done: int = one.controller.ack_backup_queue.get(timeout=3 * WAIT_S).completed_tokens
    return done


def test_a_sidecar_that_stands_still_holds_one_call_each_way(own_sidecar: Sidecar) -> None:
    """Those behind it, of other requests, miss at once; pages come again when it goes on."""
    tokens, others = range(2000, 2000 + 4 * PAGE), range(3000, 3000 + 4 * PAGE)
    with engine(own_sidecar.address) as one:
        saved = one.save(tokens)
        indices = one.host.alloc(len(others))
        with standing_still(own_sidecar):
            assert took_s(lambda: one.load(tokens)) < JOIN_S
            assert took_s(lambda: one.load(tokens)) < 1.0
            assert one.backend.batch_exists(hashes(tokens)) == 0  # else SGLang makes room for pages that do not come
            assert took_s(lambda: backed_up(one, indices, others)) < JOIN_S
            assert took_s(lambda: backed_up(one, indices, others)) < 1.0
        eventually(lambda: torch.equal(one.load(tokens), saved), seconds=WAIT_S)
        eventually(lambda: backed_up(one, indices, others) == len(others), seconds=WAIT_S)
