"""Clients of two nodes that store, look up and fetch, and note how long each call took and what was wrong."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from kvstore_client import Client, connect

from kvstore.spec import Durability, Tier
from tests.e2e.test_nvme import same
from tests.specs import random_cache, small_spec, tokens_of

STEP = 512
COUNT = 2 * STEP
SPEC = small_spec(model_id="outage", chunk_tokens=STEP)
THREAD_COUNT = 2
"""Of each node's clients."""
PAUSE_S = 0.01
STORED_PART, FETCHED_PART = 0.05, 0.4
"""Of all calls; the others are lookups."""
FRESH_FROM = 1_000_000
"""Seeds of contexts that the load makes; all below are of contexts that were there before."""


def tokens(seed: int) -> Any:
    return tokens_of(COUNT, seed)


REMEMBERED_COUNT = 256
"""Contexts of which the clients' process remembers what they should be."""


@lru_cache(maxsize=REMEMBERED_COUNT)
def cache(seed: int) -> Any:
    """What a context's cache is, whoever stored it."""
    return random_cache(SPEC, COUNT, seed)


class Call(NamedTuple):
    """One call: what, when it began and how long it took."""

    kind: str
    began_s: float
    took_s: float


@dataclass
class Findings:
    """What the clients met."""

    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    hits: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    """Of fetches, by the name of the phase and the tier; NONE: misses."""
    refused_count: int = 0
    """Stores that memory did not take."""

    def seconds(self, kind: str, start_s: float, stop_s: float) -> Sequence[float]:
        """Of the calls that began in between."""
        return [each.took_s for each in self.calls if each.kind == kind and start_s <= each.began_s < stop_s]


def fetch(client: Client, seed: int, findings: Findings) -> Tier:
    """A context, every bit compared. Where it came from."""
    fetched = client.fetch(SPEC, tokens(seed), verify=True)
    if not same(fetched, cache(seed), fetched.token_count):
        findings.wrong.append(f"context {seed}: {fetched.token_count} tokens from {fetched.tier.name}")
    return fetched.tier


class Load:
    """``THREAD_COUNT`` clients for each address, each with a thread and a random sequence of its own, which use the
    contexts of ``seeds`` and new ones. ``phase``: what is going on now."""

    def __init__(self, addresses: Sequence[str], seeds: range) -> None:
        self.findings = Findings()
        self.phase = ""
        self._seeds = seeds
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._live, args=(address, number), daemon=True)
            for number, address in enumerate(each for each in addresses for _ in range(THREAD_COUNT))
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)
            if thread.is_alive():
                self.findings.raised.append("a client's call did not end")

    def _live(self, address: str, number: int) -> None:
        random, fresh = np.random.default_rng(number), FRESH_FROM * (number + 1)
        with connect(address) as client:
            while not self._stop.wait(PAUSE_S):
                draw, seed = random.random(), int(random.choice(self._seeds))
                if draw < STORED_PART:
                    fresh += 1
                    self._timed("store", lambda seed=fresh: self._store(client, seed))
                elif draw < STORED_PART + FETCHED_PART:
                    self._timed("fetch", lambda seed=seed: self._fetch(client, seed))
                else:
                    self._timed("lookup", lambda seed=seed: client.lookup(SPEC, tokens(seed)))

    def _timed(self, kind: str, call: Callable[[], object]) -> None:
        began_s = time.monotonic()
        try:
            call()
        except Exception as error:
            self.findings.raised.append(f"{self.phase}: {kind}: {error!r}")
        self.findings.calls.append(Call(kind, began_s, time.monotonic() - began_s))

    def _store(self, client: Client, seed: int) -> None:
        if client.store(SPEC, tokens(seed), cache(seed), durability=Durability.MEMORY).wait(10.0) is Durability.NONE:
            self.findings.refused_count += 1

    def _fetch(self, client: Client, seed: int) -> None:
        self.findings.hits[self.phase, fetch(client, seed, self.findings)] += 1
