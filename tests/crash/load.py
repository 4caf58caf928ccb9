"""Clients that store and fetch until the server is dead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from kvstore_client import connect
from kvstore_client.client import Client
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import KVStoreError
from kvstore.spec import Durability, MissReason
from tests.crash.contexts import content, is_right
from tests.crash.ledger import Chain, Ledger

CLIENT_COUNT = 3
CHAINS_PER_CRASH = 14
"""New contexts per client and crash; after them it only fetches, so that a large device never has to evict."""
FAILED_FOR_GOOD = {MissReason.COLD, MissReason.EVICTED, MissReason.STALE, MissReason.CORRUPT}


@dataclass
class Findings:
    """What went wrong, and how much was looked at."""

    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    acknowledged: int = 0
    checked: int = 0
    flipped: int = 0
    evicted: int = 0
    """Promised chains that were missing because the device had to evict."""

    @property
    def is_clean(self) -> bool:
        return not (self.wrong or self.lost or self.other)

    def add(self, other: Findings) -> None:
        self.wrong += other.wrong
        self.lost += other.lost
        self.other += other.other
        self.acknowledged += other.acknowledged
        self.checked += other.checked
        self.evicted += other.evicted
        self.flipped += other.flipped


def store(client: Client, chain: Chain) -> Durability:
    """Store a context; when the receipt says LOCAL, that is a promise."""
    cache, hidden = content(chain.model, chain.tokens)
    receipt = client.store(chain.model.spec, chain.tokens, cache, hidden=hidden)
    level = receipt.wait(10.0)
    if level is Durability.LOCAL:
        chain.promised = max(chain.promised, receipt.stored_token_count)
    return level


def fetch(client: Client, chain: Chain, findings: Findings) -> tuple[int, MissReason]:
    """Fetch a context, every strip hashed and every bit compared. Returns how much came, and why not more."""
    fetched = client.fetch(chain.model.spec, chain.tokens, hidden_layers=chain.model.hidden_layers, verify=True)
    if not is_right(chain.model, chain.tokens, fetched):
        findings.wrong.append(f"{chain}: {fetched.token_count} tokens, from {fetched.tier.name}")
    return fetched.token_count, fetched.reason


class Load:
    """Several clients of one server, each with a thread and a random sequence of its own."""

    def __init__(self, sidecar: Sidecar, ledger: Ledger, findings: Findings, seed: int, *, may_evict: bool) -> None:
        self._sidecar = sidecar
        self._ledger = ledger
        self._findings = findings
        self._may_evict = may_evict
        self._stop = threading.Event()
        jobs: list[Callable[[Client], None]] = [self._watch]
        for number in range(CLIENT_COUNT):
            random = np.random.default_rng([seed, number])
            jobs.append(lambda client, random=random: self._work(client, random))
        self._threads = [threading.Thread(target=self._live, args=(job,), daemon=True) for job in jobs]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """After the server is dead: every call ends by itself."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)
            if thread.is_alive():
                self._findings.other.append("a client's call did not end after the server's death")

    @property
    def _is_over(self) -> bool:
        process = self._sidecar.process
        return self._stop.is_set() or process is None or process.poll() is not None

    def _live(self, job: Callable[[Client], None]) -> None:
        try:
            with connect(self._sidecar.address, timeout_s=5.0) as client:
                while not self._is_over:
                    job(client)
        except KVStoreError as error:
            time.sleep(0.05)
            if not self._is_over:
                self._findings.other.append(f"a live server failed a call: {error.message}")
        except Exception as error:
            self._findings.other.append(f"a client failed: {error!r}")

    def _work(self, client: Client, random: np.random.Generator) -> None:
        for _ in range(CHAINS_PER_CRASH):
            for chain in self._ledger.some(random, int(random.integers(0, 3))):
                self._look(client, chain)
            if self._is_over:
                return
            store(client, self._ledger.fresh(random))
        while not self._is_over:
            for chain in self._ledger.some(random, 1):
                self._look(client, chain)
            time.sleep(0.005)

    def _look(self, client: Client, chain: Chain) -> None:
        due = chain.due
        count, reason = fetch(client, chain, self._findings)
        if count < min(due, chain.due) and reason in FAILED_FOR_GOOD and not self._may_evict:
            self._findings.lost.append(f"{chain}: {due - count} of {due} tokens while the server was up: {reason.name}")

    def _watch(self, client: Client) -> None:
        """Remember evictions: a server that is killed cannot tell of them."""
        before = self._ledger.evicted
        while not self._is_over:
            try:
                self._ledger.evicted = before + client.stats().counters["nvme_evicted_chunks"]
            except KVStoreError:
                return
            time.sleep(0.01)
