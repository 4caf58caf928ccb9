"""Shared by the benchmarks that move bytes: the 8B geometry, a ready sidecar, and copy limits.

"Copy limit": the same source runs into the same destination runs, the same two threads, one process, no service.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from kvstore_client import Client, ModelSpec, connect
from kvstore_client.copying import Copier, calls_of, copy
from kvstore_copies import Blocks, batch_of

from kvstore_ops.sidecar import Sidecar

VOCABULARY = 128_256
CHUNK_TOKENS = 256
CHUNKS = {"full": 8, "quick": 8, "tiny": 1}
LAYERS = {"full": 32, "quick": 32, "tiny": 2}
RUNS = {"full": 40, "quick": 15, "tiny": 2}


def geometry(scale: str) -> ModelSpec:
    """Return a spec of 32 layers, 8 kv heads, head dim 128, bf16: 256 tokens are 32 MiB."""
    return ModelSpec.dense(
        "bench-8b", "unverified:bench", layer_count=LAYERS[scale], kv_heads=8, head_dim=128, hidden_size=4096,
        vocab_size=VOCABULARY,
    )  # fmt: skip


def random_tokens(count: int, seed: int) -> Any:
    """Return random tokens; a new seed gives tokens that are not stored yet."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.uint32)


def tensors(spec: ModelSpec, token_count: int) -> list[tuple[Any, Any]]:
    """Return pre-faulted torch tensors, per layer (K, V)."""
    import torch

    shape = (spec.layers[0].kv_heads, token_count, spec.layers[0].k_dim)
    return [
        (torch.ones(shape, dtype=torch.bfloat16), torch.full(shape, 2, dtype=torch.bfloat16))
        for _ in range(spec.layer_count)
    ]


@contextmanager
def ready(scale: str, capacity: str = "1 GiB") -> Iterator[tuple[Sidecar, Client]]:
    """Yield a sidecar and its client, which connects once the whole arena is backed by pages. ``capacity``: of the
    arena; at the scale tiny it is small."""
    with Sidecar("--capacity", "64 MiB" if scale == "tiny" else capacity) as sidecar:
        sidecar.wait_prefaulted()
        with connect(sidecar.address, timeout_s=60.0) as client:
            yield sidecar, client


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def fill_with_noise(tensors: Sequence[tuple[Any, Any]]) -> None:
    """Fill (K, V) of 16 bits with random bits, the same in each run."""
    import torch

    for plane in (plane for pair in tensors for plane in pair):
        plane.view(torch.int16).random_(generator=torch.Generator().manual_seed(1))


def copy_all(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Copy (target, source) pairs, one after another."""
    for target, source in pairs:
        copy(target, source)


def copy_seconds(copier: Copier, pairs: Sequence[tuple[Any, Any]]) -> float:
    """Copy (target, source) pairs on the copier's threads, and return the seconds that this takes."""
    return timed(lambda: copier.split(copy_all, pairs, 60.0))


def one_call_copy_bytes_per_s(byte_count: int) -> float:
    """Return the rate of one memcpy of all bytes: the limit of the memory when bytes are not cut into runs."""
    source, target = np.ones(byte_count, np.uint8), np.ones(byte_count, np.uint8)
    return byte_count / min(timed(lambda: np.copyto(target, source)) for _ in range(3))


def compiled_seconds(copier: Copier, pairs: Sequence[tuple[Any, Any]]) -> float:
    """Return the seconds of the copies in compiled code, which must be there, on as many threads as a fetch has."""
    blocks = [(_block(target), _block(source)) for target, source in pairs]
    batch = batch_of(blocks, pairs[0][0].element_size())
    assert batch is not None, "no compiled code"
    byte_count = sum(target.nbytes for target, _ in pairs)
    return timed(lambda: copier.share(lambda call: call(), calls_of(batch), byte_count, 60.0, by_torch=False))


def _block(tensor: Any) -> Blocks:
    steps = tuple(step * tensor.element_size() for step in tensor.stride())
    return Blocks((tensor.data_ptr(),), tuple(tensor.shape), steps, tensor)
