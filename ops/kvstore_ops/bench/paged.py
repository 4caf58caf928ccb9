"""The part of ``fetch`` that goes into an engine's pages."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from kvstore_client import Paged
from kvstore_client.client import Client
from kvstore_client.copying import Copier
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName
from kvstore_client.planes.shared_memory.prefix import MappedPrefix

from kvstore.chunk import slab_parts
from kvstore.keys import chain_digests, fingerprint
from kvstore_ops.bench import copying as shared

PAGE_TOKENS = 16


def ask(client: Client, spec: Any, tokens: Any) -> MappedPrefix:
    """Do the part of a fetch before its first copy: the call, and the chunks' headers."""
    wanted = Wanted.of(spec, None, None, (), verify=False)
    name = fingerprint(spec, spec.kind)
    prefix = open_prefix(
        client.connect_now(), wanted, ChainName(name, 1, 0), chain_digests(tokens, spec.chunk_tokens), 10.0
    )
    assert isinstance(prefix, MappedPrefix)
    return prefix


def bare_copies(client: Client, spec: Any, tokens: Any, paged: Paged) -> list[tuple[Any, Any, Any]]:
    """Return what a fetch into pages must copy, as (target, its pages, source): for each layer and half one indexed
    assignment of numpy, out of the mapped memory itself."""
    prefix = ask(client, spec, tokens)
    numbers = np.asarray(paged.slots)[::PAGE_TOKENS] // PAGE_TOKENS
    copies = []
    for layer in range(spec.layer_count):
        for run in prefix.runs(0):
            first, count = run.chunks[0], len(run.chunks)
            pages = first.layout.token_count // PAGE_TOKENS
            start = first.token_start // PAGE_TOKENS
            there = numbers[start : start + count * pages].reshape(count, pages)
            for part in slab_parts(first.layout, layer, run.memory(layer), count, run.stride):
                _, heads, _, dim = part.array.shape
                source = part.array.reshape(count, heads, pages, PAGE_TOKENS, dim).transpose(0, 2, 3, 1, 4)
                copies.append((paged.layers[layer][part.which], there, source))
    prefix.close()
    return copies


def random_pages(spec: Any, count: int) -> Paged:
    """Return pages of 16 tokens in FlashAttention's layout, already touched, with slots in random order."""
    page_count = count // PAGE_TOKENS
    layer = spec.layers[0]
    shape = (2, page_count, PAGE_TOKENS, layer.kv_heads, layer.k_dim)
    order = np.random.default_rng(7).permutation(page_count)
    slots = (order[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    return Paged([np.ones(shape, np.uint16) for _ in range(spec.layer_count)], slots)


def _copy_all(copies: Sequence[tuple[Any, Any, Any]]) -> None:
    for target, pages, source in copies:
        target[pages] = source


def measure_pages(client: Client, spec: Any, tokens: Any, copier: Copier, runs: int) -> tuple[float, float]:
    """Measure interleaved pairs of a fetch into pages and the bare copies, by one thread and by two: the faster of
    these two is the limit. Return (ratio, bytes per second)."""
    paged = random_pages(spec, len(tokens))
    copies = bare_copies(client, spec, tokens, paged)
    byte_count = sum(layer.nbytes for layer in paged.layers)

    def fetch() -> None:
        assert client.fetch(spec, tokens, into=paged).token_count == len(tokens)

    fetch()
    ours, one, two = [], [], []
    for _ in range(runs):
        two.append(shared.timed(lambda: copier.split(_copy_all, copies, 60.0)))
        ours.append(shared.timed(fetch))
        one.append(shared.timed(lambda: _copy_all(copies)))
    ratios = [limit / mine for limit, mine in zip(min(one, two, key=statistics.median), ours, strict=True)]
    return statistics.median(ratios), byte_count / statistics.median(ours)
