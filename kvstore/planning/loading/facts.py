"""The inputs of a loading plan. They are plain values: the caller does the I/O that gathers them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from kvstore.planning.loading.compute import ComputeRate
from kvstore.planning.loading.operations import Operations
from kvstore.planning.loading.rates import ASSUMED, SLOWEST, TierRate
from kvstore.planning.loading.timeline import Way
from kvstore.planning.setting import Recompute
from kvstore.planning.terms import ANY_TERMS, RequestClass, Terms
from kvstore.spec import ModelSpec, Tier

IN_MEMORY = (Tier.DRAM, Tier.HBM)
PIECE_BYTES = 4 << 20
"""Neighbouring layers of a chunk, up to so many bytes, are read from a tier as one request."""


@dataclass(frozen=True)
class HeldRun:
    """Adjacent tokens of a prefix that lie in one tier, with ``token_bytes`` bytes each."""

    token_count: int
    tier: Tier
    token_bytes: float


def merged_runs(runs: Iterable[HeldRun]) -> tuple[HeldRun, ...]:
    """Merge adjacent runs of the same tier and bytes per token; drop empty runs."""
    merged: list[HeldRun] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last is not None and (last.tier, last.token_bytes) == (run.tier, run.token_bytes):
            merged[-1] = HeldRun(last.token_count + run.token_count, run.tier, run.token_bytes)
        elif run.token_count:
            merged.append(run)
    return tuple(merged)


@dataclass(frozen=True)
class Stock:
    """A prefix as it is stored in one form: "KV", or "E", from which K and V are projected. ``work_share``: the time of
    that projection per token, as a share of ``ComputeRate.token_s``."""

    runs: tuple[HeldRun, ...]
    form: str = "KV"
    work_share: float = 0.0

    @property
    def token_count(self) -> int:
        return self.starts[-1]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first token of each run, and the end of the last run."""
        return (0, *accumulate([run.token_count for run in self.runs]))

    @cached_property
    def tiers(self) -> tuple[Tier, ...]:
        found: list[Tier] = []
        for run in self.runs:
            if run.tier not in found:
                found.append(run.tier)
        return tuple(found)

    def bytes_of(self, tier: Tier, start: int, stop: int) -> float:
        """Return the number of bytes of tokens ``start .. stop`` that lie in a tier."""
        if tier not in self.tiers:
            return 0.0
        position = self.tiers.index(tier)
        return self.bytes_until(stop)[position] - self.bytes_until(start)[position]

    def bytes_until(self, token: int) -> tuple[float, ...]:
        """Return the number of bytes of the tokens before ``token`` in each of ``tiers``."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._counted(token)
        return found

    @cached_property
    def _known(self) -> dict[int, tuple[float, ...]]:
        """Bytes before a token. Kept because a search asks for the same tokens many times."""
        return {0: (0.0,) * len(self.tiers)}

    @cached_property
    def _columns(self) -> tuple[_Column, ...]:
        pairs = list(zip(self.starts, self.runs, strict=False))
        return tuple(_Column.of([pair for pair in pairs if pair[1].tier is tier]) for tier in self.tiers)

    def _counted(self, token: int) -> tuple[float, ...]:
        return tuple([column.bytes_until(token) for column in self._columns])


class _Column(NamedTuple):
    """The runs of one tier: the first token of each, and the bytes of all before it."""

    starts: list[int]
    sums: list[float]
    runs: list[HeldRun]

    @staticmethod
    def of(pairs: list[tuple[int, HeldRun]]) -> _Column:
        """Return the column of these runs, each with its first token, in order."""
        runs = [run for _, run in pairs]
        sums = list(accumulate([run.token_count * run.token_bytes for run in runs], initial=0.0))
        return _Column([start for start, _ in pairs], sums, runs)

    def bytes_until(self, token: int) -> float:
        """Return the bytes of the tokens before ``token``."""
        index = bisect_left(self.starts, token) - 1
        if index < 0:
            return 0.0
        run, part = self.runs[index], token - self.starts[index]
        return self.sums[index] + run.token_bytes * (part if part < run.token_count else run.token_count)


@dataclass(frozen=True)
class Blend:
    """Reuse of documents or of a sibling's cache, with the one setting that a profile or the caller allows. Rates
    choose between this reuse and exact work, never between settings: else answers would change with load.

    ``stock``: all that is loaded, the exact prefix too. ``exact_tokens``: reused tokens of which nothing is computed
    again. ``lossy_tokens``: the others; the last of them ends at ``lossy_stop`` in the prompt."""

    setting: Recompute
    exact_tokens: int
    lossy_tokens: int
    lossy_stop: int
    stock: Stock

    @property
    def token_count(self) -> int:
        return self.exact_tokens + self.lossy_tokens


@dataclass(frozen=True)
class TierFacts:
    """A tier's rate, and the bytes that other requests wait for in its queue."""

    rate: TierRate
    queued_bytes: float = 0.0


def slowest_tiers(tiers: Iterable[tuple[Tier, TierFacts]]) -> dict[Tier, TierFacts]:
    """Return the slowest tier of each kind: a chunk's place names a kind, and not which tier of that kind holds it."""
    found: dict[Tier, TierFacts] = {}
    for kind, facts in tiers:
        if kind not in found or facts.rate.byte_s > found[kind].rate.byte_s:
            found[kind] = facts
    return found


@dataclass(frozen=True)
class Prices:
    """The price of a busy second of the engine, and of tiers, in seconds of waiting; both 0 while no request waits."""

    compute: float = 0.0
    tier: float = 0.0


BATCH_PRICES = Prices(compute=1.0)
"""The prices of requests that nobody waits for."""


@dataclass(frozen=True)
class LoadFacts:
    """One prompt of ``token_count`` tokens, of which those from ``reusable_tokens`` on are computed in any case.

    ``stocks``: the stored part of its exact prefix, in each form. ``tiers``: the tiers below memory. ``link``: the way
    from memory to the engine, by copies or a network; all bytes take it. ``step_tokens``: rows of one forward pass, 0:
    all at once. ``unit_tokens``: loads begin and end at multiples of it. ``ways``: the ways that the engine supports.
    ``blends``: what may be reused beside the exact prefix. ``deadline_s``: seconds within which the first token is
    wanted.
    """

    token_count: int
    reusable_tokens: int
    compute: ComputeRate
    link: TierRate
    stocks: tuple[Stock, ...] = ()
    tiers: Mapping[Tier, TierFacts] = field(default_factory=dict)
    layer_count: int = 1
    unit_tokens: int = 1
    piece_count: int = 0
    step_tokens: int = 0
    blends: tuple[Blend, ...] = ()
    ways: frozenset[Way] = frozenset(Way)
    prices: Prices = Prices()
    deadline_s: float = math.inf

    @cached_property
    def pieces(self) -> int:
        """Number of pieces in which tiers deliver the layers of a chunk."""
        return min(self.piece_count or self.layer_count, self.layer_count)

    def usable(self, stock: Stock) -> int:
        """Return the number of leading tokens of a stock that may be loaded, in whole units."""
        return min(stock.token_count, self.reusable_tokens) // self.unit_tokens * self.unit_tokens


def token_bytes_of(spec: ModelSpec, layers: Iterable[int]) -> float:
    """Return the bytes of one token in these layers of a cache."""
    return float(sum(heads * sum(dims) for heads, dims in map(spec.kept, layers)) * spec.item_size)


def prompt_facts(
    spec: ModelSpec, stored: Iterable[tuple[int, Tier]], *, token_count: int, reusable_tokens: int,
    compute: ComputeRate, link: TierRate, tiers: Mapping[Tier, TierFacts], step_tokens: int, ways: frozenset[Way],
    terms: Terms = ANY_TERMS, others: Iterable[Tier] = (),
) -> LoadFacts:  # fmt: skip
    """Return the facts of a prompt. ``stored``: its exact prefix as (token count, tier) runs. ``others``: the tiers of
    other caches that it may reuse. A tier that is missing in ``tiers`` gets the assumed rate of its kind."""
    token_bytes = token_bytes_of(spec, spec.slab_layers)
    runs = merged_runs(HeldRun(count, tier, token_bytes) for count, tier in stored)
    known = dict(tiers)
    for tier in (*(run.tier for run in runs), *others):
        if tier not in IN_MEMORY:
            known.setdefault(tier, TierFacts(ASSUMED.get(tier, SLOWEST)))
    share = Operations.of(spec).projection_share if spec.keeps_e else 0.0
    stocks = (Stock(runs, "E" if spec.keeps_e else "KV", share),) if runs else ()
    return LoadFacts(
        token_count=token_count, reusable_tokens=reusable_tokens, compute=compute, link=link, stocks=stocks,
        tiers=known, layer_count=spec.layer_count, unit_tokens=max(spec.chunk_tokens, step_tokens),
        piece_count=math.ceil(spec.chunk_tokens * token_bytes / PIECE_BYTES), step_tokens=step_tokens, ways=ways,
        prices=BATCH_PRICES if terms.request_class is RequestClass.BATCH else Prices(), deadline_s=terms.deadline_s,
    )  # fmt: skip
