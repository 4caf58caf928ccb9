"""gpu-hbm: chunks in the pool on a GPU copied into pages there, over a copy of as many bytes on the device. Where there
is no GPU, the pool and the pages are in the host's memory."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from kvstore_client import Paged, connect
from kvstore_client.client import Client
from kvstore_client.copying import Copier
from kvstore_client.fetch.open import open_prefix
from kvstore_client.fetch.target import device_of, given_places
from kvstore_client.fetch.wanted import Wanted
from kvstore_client.lookup.presence import ChainName

from kvstore.errors import Unavailable
from kvstore.keys import chain_digests, fingerprint
from kvstore.seams import FaultPoints
from kvstore.spec import Tier
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.result import Result, note, quartiles, show
from kvstore_ops.sidecar import Sidecar

CONTEXTS = {"full": (4096, 32768), "quick": (4096,), "tiny": (512,)}
CAPACITY = {"full": "10 GiB", "quick": "2 GiB", "tiny": "64 MiB"}
RUNS = {"full": 30, "quick": 10, "tiny": 2}
PAGE_TOKENS = 16
FILL_S_MAX = 60.0
STEP_S = 0.05
TARGET = 0.80


@dataclass(frozen=True)
class Figures:
    """Seconds of each run: the copies of an opened prefix, a whole fetch, and the copy limit."""

    copies: list[float]
    fetches: list[float]
    limits: list[float]
    byte_count: int

    @property
    def ratios(self) -> list[float]:
        return [limit / mine for limit, mine in zip(self.limits, self.copies, strict=True)]

    @property
    def fetch_ratio(self) -> float:
        return statistics.median([limit / mine for limit, mine in zip(self.limits, self.fetches, strict=True)])


def run(scale: str) -> Result:
    """Measure copies, fetches and the copy limit in turns, for each number of tokens."""
    import torch

    device, spec = "cuda:0" if torch.cuda.is_available() else "cpu", shared.geometry(scale)
    own = {"KVSTORE__TIERS__HBM__CAPACITY_BYTES": CAPACITY[scale], "KVSTORE__TIERS__HBM__DEVICE": device}
    found: dict[int, Figures] = {}
    with Sidecar("--capacity", CAPACITY[scale], environment={**os.environ, **own}) as sidecar:
        sidecar.wait_prefaulted()
        with connect(sidecar.address, timeout_s=60.0) as client:
            for count in CONTEXTS[scale]:
                note(f"gpu-hbm: {count} tokens")
                found[count] = _measured(client, spec, count, device, RUNS[scale])
    worst = min(found, key=lambda count: statistics.median(found[count].ratios))
    figures, ratio = found[worst], statistics.median(found[worst].ratios)
    rows = [
        (
            f"{count} tokens",
            f"{statistics.median(each.ratios):.3f} of a device copy, with the call {each.fetch_ratio:.3f}",
        )
        for count, each in found.items()
    ]
    show("gpu-hbm: from the pool into pages", rows)
    return Result(
        name="gpu-hbm", value=figures.byte_count / statistics.median(figures.copies), unit="B/s",
        limit=figures.byte_count / statistics.median(figures.limits), ratio=ratio, target=f">= {TARGET}",
        met=ratio >= TARGET, runs=len(figures.copies), spread=quartiles(figures.ratios),
        conditions={
            "scale": scale, "device": device, "bytes": figures.byte_count, "tokens": worst, "page_tokens": PAGE_TOKENS,
            "fetch_ratios": {str(count): round(each.fetch_ratio, 4) for count, each in found.items()},
            "ratios": {str(count): round(statistics.median(each.ratios), 4) for count, each in found.items()},
        },
    )  # fmt: skip


def _measured(client: Client, spec: Any, count: int, device: str, runs: int) -> Figures:
    """Store a prompt, have it copied to the pool, and measure. The first fetch from there is compared bit for bit."""
    import torch

    tokens, layer, page_count = shared.random_tokens(count, count), spec.layers[0], count // PAGE_TOKENS
    shape = (2, page_count, PAGE_TOKENS, layer.kv_heads, layer.k_dim)
    order = np.random.default_rng(7).permutation(page_count)
    slots = (order[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)
    sources = [torch.randint(0, 0x7F00, shape, dtype=torch.int16, device=device) for _ in spec.layers]
    targets = [torch.full_like(each, -1) for each in sources]
    stored, paged = (Paged([each.view(torch.bfloat16) for each in some], slots) for some in (sources, targets))
    receipt = client.store(spec, tokens, stored)
    receipt.wait(60.0)
    assert receipt.stored_token_count == count, receipt.reason
    until_s = time.monotonic() + FILL_S_MAX
    while client.fetch(spec, tokens, into=paged).tier is not Tier.HBM:
        if time.monotonic() > until_s:
            raise Unavailable(f"the prompt was not copied to the pool: {client.stats().tier_problem}")
        time.sleep(STEP_S)
    for there, kept in zip(targets, sources, strict=True):
        assert torch.equal(there, kept), "the pool gave other bits than were stored"
    settle = torch.cuda.synchronize if device != "cpu" else _nothing
    byte_count = sum(each.nbytes for each in sources)
    flat = [each.reshape(-1) for each in sources], [each.reshape(-1) for each in targets]

    def limit() -> None:
        for source, target in zip(*flat, strict=True):
            target.copy_(source)

    def fetch() -> None:
        assert client.fetch(spec, tokens, into=paged).token_count == count

    copies = _copies(client, spec, tokens, paged)
    figures = Figures([], [], [], byte_count)
    for action in (limit, fetch, copies):
        _timed(action, settle)
    for _ in range(runs):
        figures.limits.append(_timed(limit, settle))
        figures.copies.append(_timed(copies, settle))
        figures.fetches.append(_timed(fetch, settle))
    return figures


def _copies(client: Client, spec: Any, tokens: Any, paged: Paged) -> Callable[[], None]:
    """Return the copies that a fetch makes of a prefix that it has opened."""
    wanted = Wanted.of(spec, None, None, (), verify=False).on(device_of(paged))
    name = fingerprint(spec, spec.kind)
    prefix = open_prefix(
        client.connect_now(), wanted, ChainName(name, 1, 0), chain_digests(tokens, spec.chunk_tokens), 10.0
    )
    assert prefix.tier is Tier.HBM
    target, copier = given_places(wanted, paged)(prefix.token_count), Copier()

    def copy() -> None:
        prefix.copy_all(target, copier, FaultPoints(), set(), 60.0)
        assert prefix.settle(set()) == len(tokens)

    return copy


def _timed(action: Callable[[], object], settle: Callable[[], object]) -> float:
    def settled() -> None:
        action()
        settle()

    settle()
    return shared.timed(settled)


def _nothing() -> None:
    """Do nothing: the host's copies have ended when they return."""
