"""Crash, restart, check; again and again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from kvstore_client import connect
from kvstore_client.client import Client
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import KVStoreError, Unavailable
from kvstore.spec import Durability, MissReason
from tests.crash.contexts import content
from tests.crash.ledger import Chain, Ledger
from tests.crash.load import Findings, Load, fetch, store
from tests.crash.plan import POINTS, Crash, Series, again, series

LANE_COUNT = 2
LOAD_S = 6.0
"""How long a load runs at most before the server is killed from outside."""
STOP_AFTER_S = 0.4
SERVED_WITHIN_S = 10.0
ROOMY, FULL = "512 MiB", "7 MiB"
NOT_NOW = {MissReason.OVERLOADED, MissReason.UNAVAILABLE}
OUTSIDE = "outside"


@dataclass
class Outcome:
    """What a campaign met."""

    hits: Counter[str] = field(default_factory=Counter)
    findings: Findings = field(default_factory=Findings)

    @property
    def crash_count(self) -> int:
        return self.hits.total()

    @property
    def missed(self) -> list[str]:
        return [point for point in POINTS if not self.hits[point]]

    def is_good(self) -> bool:
        return self.findings.is_clean and not self.missed


def run(count: int, seed: int, say: Callable[[str], None] = lambda _: None) -> Outcome:
    """A whole campaign. Points that the load did not reach get three more tries."""
    outcome = Outcome()
    with ThreadPoolExecutor(LANE_COUNT) as lanes:
        list(lanes.map(lambda each: _Directory(each, outcome, say).run(), series(seed, count)))
        for attempt in range(3):
            more = [again(seed + attempt, point) for point in outcome.missed]
            list(lanes.map(lambda each: _Directory(each, outcome, say).run(), more))
    return outcome


class _Directory:
    """One directory and the crashes it goes through."""

    _lock = threading.Lock()

    def __init__(self, plan: Series, outcome: Outcome, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._outcome = outcome
        self._findings = Findings()
        self._say = say
        self._ledger = Ledger()
        self._random = np.random.default_rng(plan.seed)
        self._sidecar = Sidecar("--capacity", "6 MiB", nvme=FULL if plan.is_full else ROOMY)

    def run(self) -> None:
        try:
            for crash in self._plan.crashes:
                self._one(crash)
        finally:
            self._sidecar.stop(kill=True)
            if self._findings.is_clean:
                shutil.rmtree(self._sidecar.directory, ignore_errors=True)
            else:
                kept = Path(tempfile.mkdtemp(prefix="kvstore-crash-"))  # the sidecar's own goes with this process
                ignored = shutil.ignore_patterns("run")  # sockets
                shutil.copytree(self._sidecar.directory, kept, ignore=ignored, dirs_exist_ok=True)
                self._findings.other.append(f"{self._plan}: device and log are kept in {kept}")
            self._findings.acknowledged = self._ledger.promised_count()
            with self._lock:
                self._outcome.findings.add(self._findings)

    def _environment(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "KVSTORE__TIERS__NVME__REGION_BYTES": "1 MiB",
            "KVSTORE__TIERS__NVME__ENCODING": self._plan.encoding,
            "KVSTORE__POLICY__CANARY_INTERVAL_S": "0.3",
            "KVSTORE__SERVER__METRICS_PORT": "0",
            "KVSTORE__ARENA__PREFAULT": "false",
            **more,
        }

    def _one(self, crash: Crash) -> None:
        if crash.flip and self._flip():
            crash = replace(crash, count=1)
            self._findings.flipped += 1
        else:
            crash = replace(crash, flip=False)
        where = self._crash(crash)
        with self._lock:
            self._outcome.hits[where] += 1
            number = self._outcome.crash_count
        before = self._findings.checked
        self._check(where)
        self._say(
            f"{number:4d}  {where:22s} pass {crash.count:3d}  "
            f"{'full ' if self._plan.is_full else 'roomy'} {self._plan.encoding}  "
            f"{self._findings.checked - before:4d} promised chains checked"
        )

    # ------------------------------------------------------------ crash

    def _crash(self, crash: Crash) -> str:
        """Run a load until the server is dead. Returns the point that killed it, or OUTSIDE."""
        sidecar = self._sidecar
        sidecar.environment = self._environment(KVSTORE_CRASH=f"{crash.point}:{crash.count}")
        if crash.flip:  # what is erased is to be the spoiled chunk, not a canary
            sidecar.environment["KVSTORE__POLICY__CANARY_INTERVAL_S"] = "0"
        try:
            sidecar.start()
        except Unavailable as error:
            return self._cause(crash, error.fields["status"])
        load = Load(sidecar, self._ledger, self._findings, int(self._random.integers(1 << 31)),
                    may_evict=self._plan.is_full)  # fmt: skip
        load.start()
        where = self._await_death(crash)
        load.stop()
        return where

    def _await_death(self, crash: Crash) -> str:
        process = self._sidecar.process
        assert process is not None
        try:
            process.wait(STOP_AFTER_S if crash.stops else LOAD_S)
        except subprocess.TimeoutExpired:
            if crash.stops:
                process.terminate()
                try:
                    process.wait(LOAD_S)
                except subprocess.TimeoutExpired:
                    self._findings.other.append("a server did not stop on SIGTERM")
        if process.poll() is None:
            self._sidecar.stop(kill=True)
            return OUTSIDE
        status = process.wait(10.0)
        self._sidecar.stop()
        return self._cause(crash, status)

    def _cause(self, crash: Crash, status: int | None) -> str:
        if status == -signal.SIGKILL:
            return crash.point
        if status != 0:
            self._findings.other.append(f"the server ended with {status} by itself: {self._last_words()}")
        return OUTSIDE

    def _last_words(self) -> str:
        return (self._sidecar.directory / "log").read_text()[-1500:]

    # ------------------------------------------------------------ check

    def _check(self, where: str) -> None:
        """Start again, and see that everything promised is there and everything there is right."""
        sidecar = self._sidecar
        sidecar.environment = self._environment()
        try:
            sidecar.start()
        except Unavailable as error:
            self._findings.other.append(f"after {where}: the server does not start: {error.message}")
            raise
        try:
            with connect(sidecar.address) as client:
                self._account(client, where)
                for chain in list(self._ledger.chains):
                    self._is_served(client, chain, where)
                self._takes_more(client, where)
                self._account(client, where)
        except KVStoreError as error:
            self._findings.other.append(f"after {where}: {error.message}: {self._last_words()}")
        sidecar.stop(kill=bool(self._random.random() < 0.7))

    def _is_served(self, client: Client, chain: Chain, where: str) -> None:
        until = time.monotonic() + SERVED_WITHIN_S
        while True:
            count, reason = fetch(client, chain, self._findings)
            if count >= chain.due or reason not in NOT_NOW or time.monotonic() > until:
                break
            time.sleep(0.02)
        if chain.due:
            self._findings.checked += 1
        if count >= chain.due:
            return
        evicted = self._ledger.evicted or where in ("nvme.evict", "nvme.region.retired")
        if self._plan.is_full and evicted and reason in (MissReason.EVICTED, MissReason.COLD):
            self._findings.evicted += 1
            chain.promised = count  # at later checks no eviction may have been seen that explains it
            return
        self._findings.lost.append(f"after {where}: {chain}: {count} of {chain.due} tokens: {reason.name}")

    def _takes_more(self, client: Client, where: str) -> None:
        chain = self._ledger.fresh(self._random)
        level = store(client, chain)
        self._is_served(client, chain, where)
        if level is not Durability.LOCAL and not self._plan.is_full:
            self._findings.other.append(f"after {where}: a new store reached {level.name} only")

    def _account(self, client: Client, where: str) -> None:
        """The tier's account adds up, and its files on disk are what it says. Canaries come and go: wait a little."""
        until = time.monotonic() + 3.0
        while True:
            stats = client.stats()
            if len(stats.tiers) != 1:
                self._findings.other.append(f"after {where}: no device tier: {stats.tier_problem}")
                return
            tier = stats.tiers[0]
            parts = tier.allocated_bytes + tier.free_bytes + tier.quarantined_bytes + tier.overhead_bytes
            files = (self._sidecar.directory / "nvme").glob("region-*.kvs")
            on_disk = sum(path.stat().st_size for path in files)
            if parts == tier.file_bytes == on_disk:
                break
            if time.monotonic() > until:
                self._findings.other.append(
                    f"after {where}: the account says {tier.file_bytes} bytes of files, its parts {parts}, "
                    f"the disk {on_disk}"
                )
                break
            time.sleep(0.02)
        self._ledger.evicted += stats.counters["nvme_evicted_chunks"]
        if not self._plan.is_full and self._ledger.evicted:
            self._findings.other.append("the roomy device evicted: give it more room")

    # ------------------------------------------------------------ damage

    def _flip(self) -> bool:
        """Spoil one byte of a promised chunk on the device. False when none is found there as it was stored."""
        chains = [each for each in self._ledger.chains if each.due >= each.model.spec.chunk_tokens]
        for chain in [chains[index] for index in self._random.permutation(len(chains))[:5]]:
            step = chain.model.spec.chunk_tokens
            start = step * int(self._random.integers(chain.due // step))
            strip = content(chain.model, chain.tokens)[0][0][0][0, start : start + step].tobytes()
            for path in (self._sidecar.directory / "nvme").glob("region-*.kvs"):
                place = path.read_bytes().find(strip)
                if place >= 0:
                    with path.open("r+b") as file:
                        file.seek(place)
                        file.write(bytes([strip[0] ^ 0x40]))
                        file.flush()
                        os.fsync(file.fileno())
                    self._ledger.damage(chain, start)
                    return True
        return False
