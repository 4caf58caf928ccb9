"""gpu-fetch: a fetch from the sidecar's memory into a GPU's pages and into dense planes, RPC included, over a copy of
as many bytes from pinned memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvstore_client import Paged
from kvstore_client.client import Client

from kvstore_ops.bench import card
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, note, quartiles, show

CONTEXTS = {"full": (4096, 32768), "quick": (4096, 32768), "tiny": (512,)}
RUNS = {"full": 10, "quick": 5, "tiny": 1}
CASE_S_MAX = {"full": 20.0, "quick": 4.0, "tiny": 1.0}
"""Seconds after which a case has no further run; the first is always run to its end."""
CAPACITY = "12 GiB"
PAGE_TOKENS = 16
TARGET = 0.90


@dataclass(frozen=True)
class Form:
    """Memory of one form on the device. ``memory``: what a call gets, ``into`` or as the source of a store.
    ``planes``: of a layer, K and V as [kv_heads, tokens, dim], copied out of that memory."""

    memory: Any
    planes: Callable[[int], tuple[Any, Any]]


def dense(spec: Any, count: int, device: str, fill: Callable[..., Any]) -> Form:
    """Return dense planes, filled by ``fill``."""
    shape = (spec.layers[0].kv_heads, count, spec.layers[0].k_dim)
    planes = [(fill(shape, device), fill(shape, device)) for _ in range(spec.layer_count)]
    return Form(planes, lambda layer: planes[layer])


def pages(spec: Any, count: int, device: str, fill: Callable[..., Any]) -> Form:
    """Return pages of 16 tokens in FlashAttention's layout, NHD, with the prompt's pages in random order."""
    import torch
    from kvstore_kernels import slots_of

    page_count, layer = count // PAGE_TOKENS, spec.layers[0]
    shape = (2, page_count, PAGE_TOKENS, layer.kv_heads, layer.k_dim)
    every = [fill(shape, device) for _ in range(spec.layer_count)]
    order = torch.from_numpy(np.random.default_rng(7).permutation(page_count))
    numbers = order.to(device)

    def planes(number: int) -> tuple[Any, Any]:
        k, v = (half[numbers].flatten(0, 1).transpose(0, 1) for half in every[number])
        return k, v

    return Form(Paged(every, slots_of(order, PAGE_TOKENS, count)), planes)


FORMS = {"pages": pages, "planes": dense}


def run(scale: str) -> Result:
    """Measure a fetch and the copy limit in turns, into each form, of each number of tokens."""
    device, spec, cases = card.device_of(scale), shared.geometry(scale), dict[str, Result]()
    with shared.ready(scale, CAPACITY) as (_, client):
        for count in CONTEXTS[scale]:
            tokens, source = shared.random_tokens(count, count), dense(spec, count, device, card.random_bits)
            receipt = client.store(spec, tokens, source.memory)
            receipt.wait(60.0)
            assert receipt.stored_token_count == count, receipt.reason
            for name, form in FORMS.items():
                note(f"gpu-fetch: {count} tokens into {name}")
                cases[f"{count} tokens, {name}"] = _case(scale, device, client, spec, tokens, source, form)
            del source
    show(
        "gpu-fetch: beside a copy from pinned memory",
        [
            (case, f"{found.value / 1e9:.2f} GB/s, {found.ratio:.3f} of {found.limit / 1e9:.2f} GB/s")
            for case, found in cases.items()
        ],
    )
    return card.joined("gpu-fetch", cases, card.least(cases))


def _case(
    scale: str, device: str, client: Client, spec: Any, tokens: Any, source: Form, form: Callable[..., Form]
) -> Result:
    """Measure one form. The first fetch goes into poisoned memory, and each bit that it brought is compared."""
    target = form(spec, len(tokens), device, card.poisoned)
    byte_count = spec.layer_count * sum(plane.nbytes for plane in source.planes(0))

    def fetch() -> None:
        assert client.fetch(spec, tokens, into=target.memory).token_count == len(tokens)

    first_s = card.timed(device, fetch)
    for layer in range(spec.layer_count):
        for there, kept in zip(target.planes(layer), source.planes(layer), strict=True):
            assert card.same_bits(there, kept), f"layer {layer} came with other bits than were stored"
    limit = card.PinnedCopy(device, byte_count, to_device=True)
    limits, ours = list[float](), list[float]()
    limit.seconds()
    until_s = time.monotonic() + CASE_S_MAX[scale]
    while not ours or (len(ours) < RUNS[scale] and time.monotonic() < until_s):
        limits.append(limit.seconds())
        ours.append(card.timed(device, fetch))
    ratios = [least / mine for least, mine in zip(limits, ours, strict=True)]
    ratio = statistics.median(ratios)
    return Result(
        name="gpu-fetch", value=byte_count / statistics.median(ours), unit="B/s",
        limit=byte_count / statistics.median(limits), ratio=ratio, target=f">= {TARGET}", met=ratio >= TARGET,
        runs=len(ours), spread=quartiles(ratios),
        conditions={
            "scale": scale, "device": device, "bytes": byte_count, "tokens": len(tokens), "first_s": first_s,
            "page_tokens": PAGE_TOKENS,
        },
    )  # fmt: skip
