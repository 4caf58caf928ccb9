"""The part of ``fetch`` that goes into an engine's pages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from kvstore_client import Paged
from kvstore_client.client import Client
from kvstore_client.copying import Copier
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.paged import PagedTarget, Pages
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.planes.shared_memory.prefix import MappedPrefix

from kvstore.keys import chain_digests, fingerprint
from kvstore.seams import FaultPoints
from kvstore_ops.bench import copying as shared

PAGE_TOKENS = 16


def paged_copies(client: Client, spec: Any, tokens: Any, paged: Paged) -> list[Callable[[], None]]:
    """Return the copies that a fetch into pages makes, one per layer, from the mapped memory itself."""
    wanted = Wanted.of(spec, None, None, (), verify=False)
    name = fingerprint(spec, spec.kind)
    prefix = open_prefix(client.connect_now(), wanted, name, chain_digests(tokens, spec.chunk_tokens), 1, 10.0)
    assert isinstance(prefix, MappedPrefix)
    runs, target = prefix.runs(0), PagedTarget(wanted, Pages(wanted, paged), len(tokens))
    prefix.close()
    faults, bad = FaultPoints(), set[int]()
    return [
        lambda position=position: target.copy_layer(position, runs, bad, faults)  # type: ignore[misc]
        for position in range(len(wanted.layers))
    ]


def random_pages(spec: Any, count: int) -> Paged:
    """Return pages of 16 tokens in FlashAttention's layout, already touched, with slots in random order."""
    page_count = count // PAGE_TOKENS
    layer = spec.layers[0]
    shape = (2, page_count, PAGE_TOKENS, layer.kv_heads, layer.k_dim)
    order = np.random.default_rng(7).permutation(page_count)
    slots = (order[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    return Paged([np.ones(shape, np.uint16) for _ in range(spec.layer_count)], slots)


def _each(work: Sequence[Callable[[], None]]) -> None:
    for copy in work:
        copy()


def measure_pages(client: Client, spec: Any, tokens: Any, copier: Copier, runs: int) -> tuple[float, float]:
    """Measure interleaved pairs of a fetch into pages and the same copies without a service. Return (ratio, bytes per
    second)."""
    paged = random_pages(spec, len(tokens))
    copies = paged_copies(client, spec, tokens, paged)
    byte_count = sum(layer.nbytes for layer in paged.layers)

    def fetch() -> None:
        assert client.fetch(spec, tokens, into=paged).token_count == len(tokens)

    fetch()
    ours, limits = [], []
    for _ in range(runs):
        limits.append(shared.timed(lambda: copier.split(_each, copies, 60.0)))
        ours.append(shared.timed(fetch))
    ratios = [limit / mine for limit, mine in zip(limits, ours, strict=True)]
    return statistics.median(ratios), byte_count / statistics.median(ours)
