"""gpu-store: a store from a GPU's pages and dense planes, until it is acknowledged, over a copy of as many bytes into
pinned memory. Beside it stands the time for which the engine is blocked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from kvstore_client.client import Client

from kvstore_ops.bench import card
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.gpu_fetch import CAPACITY, CASE_S_MAX, CONTEXTS, FORMS, RUNS, Form
from kvstore_ops.bench.result import Result, note, quartiles, show

TARGET = 0.90
SEEDS_PER_CASE = 1000


def run(scale: str) -> Result:
    """Measure a store and the copy limit in turns, from each form, of each number of tokens."""
    device, spec, cases = card.device_of(scale), shared.geometry(scale), dict[str, Result]()
    with shared.ready(scale, CAPACITY) as (_, client):
        for count in CONTEXTS[scale]:
            for name, form in FORMS.items():
                note(f"gpu-store: {count} tokens from {name}")
                seed = SEEDS_PER_CASE * len(cases)
                cases[f"{count} tokens, {name}"] = _case(scale, device, client, spec, count, form, seed)
    rows = []
    for case, found in cases.items():
        blocked = found.conditions["blocked_ratio"]
        rows.append((case, f"{found.value / 1e9:.2f} GB/s, {found.ratio:.3f} of {found.limit / 1e9:.2f} GB/s"))
        rows.append(("  until the tensors may be reused", f"{blocked:.3f}"))
    show("gpu-store: beside a copy into pinned memory", rows)
    return card.joined("gpu-store", cases, card.least(cases))


def _case(
    scale: str, device: str, client: Client, spec: Any, count: int, form: Callable[..., Form], seed: int
) -> Result:  # fmt: skip
    """Measure one form, each time under new tokens, of the seeds from ``seed`` on. What the first store kept is
    fetched, and each bit compared."""
    source = form(spec, count, device, card.random_bits)
    byte_count = spec.layer_count * sum(plane.nbytes for plane in source.planes(0))
    limit = card.PinnedCopy(device, byte_count, to_device=False)
    receipts: list[Any] = []

    def store(number: int) -> None:
        receipts.append(client.store(spec, shared.random_tokens(count, seed + number), source.memory))

    def acknowledged() -> None:
        receipt = receipts.pop()
        receipt.wait(60.0)
        assert receipt.stored_token_count == count, receipt.reason

    store(0)
    acknowledged()
    _check(client, spec, shared.random_tokens(count, seed), source)
    limit.seconds()
    limits, blocked, ours = list[float](), list[float](), list[float]()
    until_s = time.monotonic() + CASE_S_MAX[scale]
    while not ours or (len(ours) < RUNS[scale] and time.monotonic() < until_s):
        limits.append(limit.seconds())
        number = 1 + len(ours)
        blocked.append(card.timed(device, lambda number=number: store(number)))  # type: ignore[misc]  # no type of a lambda's default
        ours.append(blocked[-1] + card.timed(device, acknowledged))
    ratios = [least / mine for least, mine in zip(limits, ours, strict=True)]
    ratio = statistics.median(ratios)
    return Result(
        name="gpu-store", value=byte_count / statistics.median(ours), unit="B/s",
        limit=byte_count / statistics.median(limits), ratio=ratio, target=f">= {TARGET}", met=ratio >= TARGET,
        runs=len(ours), spread=quartiles(ratios),
        conditions={
            "scale": scale, "device": device, "bytes": byte_count, "tokens": count,
            "blocked_ratio": statistics.median(least / mine for least, mine in zip(limits, blocked, strict=True)),
        },
    )  # fmt: skip


def _check(client: Client, spec: Any, tokens: Any, source: Form) -> None:
    fetched = client.fetch(spec, tokens, verify=True)
    assert fetched.token_count == len(tokens)
    for layer, pair in enumerate(fetched):
        for there, kept in zip(pair, source.planes(layer), strict=True):
            assert card.same_bits(there, kept.cpu()), f"layer {layer} was kept with other bits than were given"
