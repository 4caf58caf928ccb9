"""operators: the delay of requests by operators. Lookups and fetches by calls run one after another, in turns: alone;
beside 10,000 listings a minute of another sidecar, which take the machine's processors; beside as many of their own
sidecar; and as a ``top`` looks each second and every request is traced. The client's own lookups and fetches, which
find all in shared memory, take turns with calls."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from kvstore_client import connect

from kvstore.keys import chain_digests, fingerprint
from kvstore.v1 import cache_pb2 as pb
from kvstore_ops.bench import copying as shared
from kvstore_ops.bench.beside import Process, running
from kvstore_ops.bench.page import KEYS, MODELS, P50_TARGET, P99_TARGET, calls_of, p99, spec_of, turn
from kvstore_ops.bench.result import Goal, Result, judged_by, quartiles, show
from kvstore_ops.sidecar import Sidecar

LISTINGS_PER_MINUTE = 10_000
TURN_S = {"full": 10.0, "quick": 2.0, "tiny": 0.1}
PAIRS = {"full": 15, "quick": 7, "tiny": 1}
Calls = dict[str, Callable[[], object]]
MEASURES: dict[str, Callable[[list[float]], float]] = {"p50": statistics.median, "p99": p99}


@dataclass
class Turns:
    """Ratios of turns beside something over the turns without it just before, by call and measure; and seconds of
    those."""

    ratios: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    alone: dict[str, list[float]] = field(default_factory=dict)

    def add(self, alone: dict[str, list[float]], beside: dict[str, list[float]]) -> None:
        """Add a pair of turns."""
        for name, took in alone.items():
            self.alone.setdefault(name, []).extend(took)
            for what, of in MEASURES.items():
                self.ratios.setdefault((name, what), []).append(of(beside[name]) / of(took))

    def middle(self, what: str, names: Collection[str]) -> float:
        """Return the worst of these calls' median ratios."""
        return max(statistics.median(self.ratios[name, what]) for name in names)


@contextmanager
def served(scale: str, environment: dict[str, str] | None = None) -> Iterator[tuple[Sidecar, Calls]]:
    """Yield a sidecar with the models of the page's benchmark, and calls to it."""
    spec, tokens = spec_of(0), shared.random_tokens(KEYS, 3)
    query = pb.ChainQuery(fingerprint=fingerprint(spec, spec.kind), digests=b"".join(chain_digests(tokens, 1)))
    plane = np.zeros((1, KEYS, 8), np.uint16)
    with Sidecar("--capacity", "64 MiB", environment=environment) as sidecar:
        sidecar.wait_prefaulted()
        with connect(sidecar.address, timeout_s=60.0) as client:
            for each in map(spec_of, range(MODELS[scale])):
                client.store(each, tokens, [(plane, plane)]).wait()
            called = calls_of(client.connect_now(), query)
            calls = {f"{name} by a call": call for name, call in called.items()}
            calls |= {"lookup": partial(client.lookup, spec, tokens), "fetch": partial(client.fetch, spec, tokens)}
            turn(TURN_S["tiny"], calls)
            yield sidecar, calls


def run(scale: str) -> Result:
    """Measure p50 and p99 of lookups and fetches beside listings over those beside another sidecar's listings, and
    watched and traced over alone; ``met`` needs all of them, but not of traced calls: each makes spans."""
    elsewhere, listings, watched, seconds = Turns(), Turns(), Turns(), TURN_S[scale]
    with ExitStack() as stack:
        is_traced = importlib.util.find_spec("opentelemetry.sdk") is not None
        receiver = stack.enter_context(running("spans")) if is_traced else None
        sidecar, calls = stack.enter_context(served(scale))
        lister = stack.enter_context(running("listings", sidecar.address, str(LISTINGS_PER_MINUTE)))
        other, _ = stack.enter_context(served(scale))
        other_lister = stack.enter_context(running("listings", other.address, str(LISTINGS_PER_MINUTE)))
        traced, traced_calls = stack.enter_context(served(scale, _traced_by(receiver)))
        top = stack.enter_context(running("top", traced.address))
        for _ in range(PAIRS[scale]):
            alone = turn(seconds, calls)
            with other_lister.at_work():
                beside_other = turn(seconds, calls)
            elsewhere.add(alone, beside_other)
            with lister.at_work():
                listings.add(beside_other, turn(seconds, calls))
            alone = turn(seconds, calls)
            with top.at_work():
                watched.add(alone, turn(seconds, traced_calls))
    span_count = receiver.count if receiver else 0
    per_minute = lister.count * 60 / (PAIRS[scale] * seconds)
    assert lister.count
    assert other_lister.count
    assert top.count
    said = f"{per_minute:,.0f} listings a minute of {KEYS * MODELS[scale]:,} chunks"
    _tell(f"{said}: of this sidecar over of another", listings)
    _tell(f"{said}, of another sidecar: with them over without", elsewhere)
    _tell(f"top each second, and {span_count:,} spans: with them over without", watched)
    return _result(scale, {"listings": listings, "watched": watched}, elsewhere, per_minute, span_count)


def _traced_by(receiver: Process | None) -> dict[str, str]:
    """Return the environment of a sidecar that traces every request; without a receiver, of one that traces none."""
    if receiver is None:
        return dict(os.environ)
    told = {"ENDPOINT": receiver.ready, "SAMPLE_ONE_IN": "1"}
    return {**os.environ, **{f"KVSTORE__TRACING__{name}": value for name, value in told.items()}}


def _tell(title: str, turns: Turns) -> None:
    rows = []
    for (name, what), values in turns.ratios.items():
        low, high = quartiles(values)
        alone = MEASURES[what](turns.alone[name]) * 1e6
        said = f"{statistics.median(values):.3f} ({low:.2f} to {high:.2f}) of {alone:.0f} us"
        rows.append((f"{name}, {what}", said))
    show(title, rows)


def _result(scale: str, found: dict[str, Turns], elsewhere: Turns, per_minute: float, span_count: int) -> Result:
    judged = {"listings": list(elsewhere.alone), "watched": ["lookup", "fetch"]}
    worst, tail = (max(found[kind].middle(what, names) for kind, names in judged.items()) for what in MEASURES)
    alone = statistics.median(elsewhere.alone["fetch by a call"])
    conditions: dict[str, Any] = {
        f"{kind}_{name.replace(' ', '_')}_{what}_ratio": statistics.median(values)
        for kind, turns in {**found, "elsewhere": elsewhere}.items() for (name, what), values in turns.ratios.items()
    }  # fmt: skip
    return Result(
        name="operators", value=worst * alone * 1e6, unit="us", limit=alone * 1e6, ratio=worst,
        **judged_by(
            Goal("p50", worst, P50_TARGET, is_upper=True), Goal("p99", tail, P99_TARGET, is_upper=True)
        ),
        runs=PAIRS[scale], spread=quartiles(found["listings"].ratios["fetch by a call", "p50"]),
        conditions={"scale": scale, "listings_per_minute": per_minute, "spans": span_count, **conditions},
    )  # fmt: skip
