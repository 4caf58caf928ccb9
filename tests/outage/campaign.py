"""A cluster under load whose shared tiers stand still for a while, and what is asked of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from kvstore_client import connect
from kvstore_ops.sidecar import Sidecar

from kvstore.config import RedisSettings, S3Settings
from kvstore.spec import Tier
from tests.e2e.two_nodes import Cluster, quiet, two_nodes
from tests.outage.load import COUNT, REMEMBERED_COUNT, SPEC, STEP, Findings, Load, cache, fetch, tokens

LOOKUP_S_MAX = {"redis": RedisSettings().lookup_s_max, "s3": S3Settings().lookup_s_max}
"""How long a lookup waits for each tier: as long as the settings have it where nobody changes them."""
BESIDES_S_MAX = 0.005
"""What 99 of 100 lookups may take beside their wait for tiers."""
LOOKUP_COUNT_MIN = 200
"""Of a phase with fewer lookups a percentile says nothing."""
CALL_S_MAX = 8.0
"""No call takes longer, whatever the tiers do: a read gives a tier up that stalls for 2 s, and there are two."""
GROWN_BYTES_MAX = 64 << 20
"""Of a sidecar and its byte movers, after their first seconds."""
CLIENTS_GROWN_BYTES_MAX = GROWN_BYTES_MAX + REMEMBERED_COUNT * sum(k.nbytes + v.nbytes for k, v in cache(0))
"""Of the clients, whose process also remembers what the last contexts should be."""
POOL = range(1, 41)
"""Contexts that both tiers have. A node's memory has room for 15."""
OUTAGES = (("redis",), ("s3",), ("redis", "s3"))
KINDS = {"redis": Tier.REDIS, "s3": Tier.S3}


@dataclass
class Phase:
    """A stretch of time. ``still``: which tiers stood still; none before the first outage, and after each."""

    name: str
    still: tuple[str, ...]
    start_s: float
    stop_s: float = 0.0
    back_s: dict[str, float] = field(default_factory=dict)
    """Of each tier that stood still, how long after its return it was hit again; inf: not in time."""


@dataclass
class Outcome:
    """What a campaign met. ``grown_bytes``: of each sidecar, and of the clients. ``lookups_wait_s``: for how long they
    wait for all tiers together, at most: the longest of the tiers' bounds. ``is_timed``: the machine is quiet
    enough to judge how long lookups take."""

    findings: Findings
    phases: list[Phase]
    grown_bytes: list[int]
    back_s_max: float
    lookups_wait_s: float
    is_timed: bool = False

    @property
    def bound_s(self) -> float:
        """What 99 of 100 lookups may take."""
        return self.lookups_wait_s + BESIDES_S_MAX

    def slow_lookups(self) -> Iterator[str]:
        """Phases whose lookups took longer than they may."""
        for phase in self.phases:
            took_s = self.findings.seconds("lookup", phase.start_s, phase.stop_s)
            p99_s = float(np.percentile(took_s, 99)) if len(took_s) >= LOOKUP_COUNT_MIN else 0.0
            if p99_s > self.bound_s:
                yield f"SLOW LOOKUPS: {phase.name}: p99 {p99_s * 1e3:.1f} ms, bound {self.bound_s * 1e3:.0f} ms"

    @property
    def faults(self) -> list[str]:
        """What should not be; empty: all is well."""
        found = [f"WRONG BYTES: {each}" for each in self.findings.wrong]
        found += [f"RAISED: {each}" for each in self.findings.raised[:20]]
        slow = [each for each in self.findings.calls if each.took_s > CALL_S_MAX]
        found += [f"WAITED: a {each.kind} took {each.took_s:.1f} s" for each in slow[:20]]
        for phase in self.phases:
            late = {name: took_s for name, took_s in phase.back_s.items() if took_s > self.back_s_max}
            found += [f"NOT BACK: {name} after {phase.name}: {took_s:.1f} s" for name, took_s in late.items()]
            found += [] if self.findings.seconds("fetch", phase.start_s, phase.stop_s) else [f"NO LOAD: {phase.name}"]
        found += self.slow_lookups() if self.is_timed else ()
        bounds = [GROWN_BYTES_MAX] * (len(self.grown_bytes) - 1) + [CLIENTS_GROWN_BYTES_MAX]
        grown = zip(self.grown_bytes, bounds, strict=False)
        found += [f"GROWN by {each >> 20} MiB" for each, bound in grown if each > bound]
        return found

    def report(self) -> str:
        """Lookups and hits of each phase, then faults."""
        waits_ms = self.lookups_wait_s * 1e3
        lines = [f"lookups wait for shared tiers for {waits_ms:.0f} ms at most, together; p99 <= {self.bound_s:.3f} s"]
        for phase in self.phases:
            lines.append(f"{phase.name}: {phase.stop_s - phase.start_s:.1f} s")
            for kind in ("lookup", "fetch", "store"):
                took_s = self.findings.seconds(kind, phase.start_s, phase.stop_s)
                if took_s:
                    p50, p99 = np.percentile(took_s, (50, 99)) * 1e3
                    most = max(took_s) * 1e3
                    lines.append(f"  {len(took_s):6d} {kind:6s} p50 {p50:7.1f} ms, p99 {p99:7.1f}, most {most:7.1f}")
            hits = {tier.name.lower(): self.findings.hits[phase.name, tier] for tier in Tier}
            lines.append("  fetched from " + ", ".join(f"{name} {count}" for name, count in hits.items() if count))
            lines += [f"  {name} was hit again after {took_s:.1f} s" for name, took_s in phase.back_s.items()]
        grown = ", ".join(f"{each / (1 << 20):.1f} MiB" for each in self.grown_bytes)
        lines.append(f"sidecars and clients have grown by {grown}; stores refused: {self.findings.refused_count}")
        return "\n".join([*lines, *(self.faults or ["no faults"])])


def run(
    seconds: float, calm_s: float, back_s_max: float, say: Callable[[str], None] = lambda _: None, *,
    lookup_s_max: Mapping[str, float] = LOOKUP_S_MAX, is_timed: bool = False,
) -> Outcome:  # fmt: skip
    """Each outage takes so long, and at least ``calm_s`` pass between two. ``lookup_s_max``: how long a lookup waits
    for each tier. ``is_timed``: see ``Outcome``."""
    bounds = {f"TIERS__{name.upper()}__LOOKUP_S_MAX": f"{bound} s" for name, bound in lookup_s_max.items()}
    with two_nodes(nvme="0", **bounds) as cluster:
        nodes = (cluster.a, cluster.b)
        held_back = _contexts(cluster)
        phases: list[Phase] = []
        with Load([each.socket_address for each in nodes], POOL) as load:

            @contextmanager
            def phase(name: str, *still: str) -> Iterator[Phase]:
                say(name)
                load.phase = name
                phases.append(Phase(name, still, time.monotonic()))
                yield phases[-1]
                phases[-1].stop_s = time.monotonic()

            with phase("before"):
                time.sleep(calm_s)
            sizes = _sizes(nodes)
            for still in OUTAGES:
                what = " and ".join(still)
                with phase(f"{what} standing still", *still), _standing_still(cluster, still):
                    time.sleep(seconds)
                with phase(f"after {what}") as after:
                    for name in still:
                        seed = held_back[name].pop()
                        after.back_s[name] = _back_s(cluster, seed, KINDS[name], after.start_s + back_s_max, load)
                    time.sleep(max(0.0, after.start_s + calm_s - time.monotonic()))
            grown = [after - before for before, after in zip(sizes, _sizes(nodes), strict=True)]
        return Outcome(load.findings, phases, grown, back_s_max, max(lookup_s_max.values()), is_timed)


def _contexts(cluster: Cluster) -> dict[str, list[int]]:
    """Have those of POOL in both tiers, and of each tier as many more as it has outages, which it alone has."""
    held_back: dict[str, list[int]] = {}
    with connect(cluster.a.socket_address) as client:
        for seed in POOL:
            client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
        quiet(client)
        for name in KINDS:
            before = set(cluster.in_redis())
            held_back[name] = [POOL.stop + len(held_back) * len(OUTAGES) + number for number in range(len(OUTAGES))]
            for seed in held_back[name]:
                client.store(SPEC, tokens(seed), cache(seed)).wait(10.0)
            quiet(client)
            names = set(cluster.in_redis()) - before
            assert len(names) == len(OUTAGES) * COUNT // STEP
            cluster.drop(*names, redis=name != "redis", s3=name != "s3")
    return held_back


@contextmanager
def _standing_still(cluster: Cluster, names: tuple[str, ...]) -> Iterator[None]:
    switches = {
        "redis": (cluster.redis.stop, cluster.redis.go_on), "s3": (cluster.s3.stand_still, cluster.s3.go_on)
    }  # fmt: skip
    for name in names:
        switches[name][0]()
    try:
        yield
    finally:
        for name in names:
            switches[name][1]()


def _back_s(cluster: Cluster, seed: int, kind: Tier, until_s: float, load: Load) -> float:
    """How long it takes until the node that never had a context gets it from the tier that alone has it."""
    began_s = time.monotonic()
    with connect(cluster.b.socket_address) as client:
        while time.monotonic() < until_s:
            if fetch(client, seed, load.findings) is kind:
                return time.monotonic() - began_s
            time.sleep(0.05)
    return float("inf")


def _sizes(nodes: Iterable[Sidecar]) -> list[int]:
    """Of each sidecar, and of the clients, which are threads of this process."""
    return [*(anonymous_bytes(each.pid, *each.mover_pids()) for each in nodes), anonymous_bytes(os.getpid())]


def anonymous_bytes(*pids: int) -> int:
    """Memory of these processes that is neither the arena nor a file."""
    pages = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return sum(int(line.split()[1]) << 10 for page in pages for line in page.splitlines() if "RssAnon" in line)
