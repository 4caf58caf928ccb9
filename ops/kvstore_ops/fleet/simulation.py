"""The simulation: requests come, wait for an engine, are planned, and played out layer by layer.

A request goes to the engine with the fewest tokens ahead of it, and is computed in the order of arrival, with plans and
without. Only prefills are simulated, as in a fleet that decodes on other engines.
Writes take place while a tier has nothing to read, so that they delay no request.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvstore.planning.loading import (
    ASSUMED,
    BusyTime,
    BusyTimes,
    LoadFacts,
    Prefill,
    Prefills,
    Stock,
    Way,
    plan_loading,
)
from kvstore.spec import Tier
from kvstore_ops.fleet.hardware import Hardware
from kvstore_ops.fleet.nodes import Line, Node, Room
from kvstore_ops.fleet.playout import play
from kvstore_ops.fleet.trace import TracedRequest

WAYS = frozenset({Way.PREFILL, Way.LOAD, Way.FIRST})


@dataclass
class FleetReport:
    """The results of all requests. ``ttfts_s``: one per request, from its arrival on. ``read_bytes`` and
    ``written_bytes``: bytes moved from and to each tier; engines read memory. ``refused_bytes``: stored bytes that a
    plan did not load, because computing their tokens was faster; ``refused_requests``: the number of requests with such
    bytes."""

    ttfts_s: list[float] = field(default_factory=list)
    read_bytes: Counter[Tier] = field(default_factory=Counter)
    written_bytes: Counter[Tier] = field(default_factory=Counter)
    refused_bytes: Counter[Tier] = field(default_factory=Counter)
    refused_requests: int = 0
    computed_tokens: int = 0
    loaded_tokens: int = 0

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttfts_s) / len(self.ttfts_s)

    @property
    def p99_ttft_s(self) -> float:
        return sorted(self.ttfts_s)[min(len(self.ttfts_s) - 1, len(self.ttfts_s) * 99 // 100)]


class FleetEngine:
    """One engine: its queue, and its measured rates of computing and of the link from memory."""

    def __init__(self, node: Node, pair_share: float) -> None:
        self.node = node
        self.queue = deque[TracedRequest]()
        self.tokens_ahead = 0
        self.is_busy = False
        self.prefills = Prefills(pair_share)
        self.link = BusyTimes()


class Fleet:
    """A fleet that plays requests out. ``plans``: load stored tokens only where that is faster; false: load all.
    ``keeps`` False: nothing is stored, and everything is computed."""

    def __init__(self, hardware: Hardware, *, plans: bool, keeps: bool = True) -> None:
        self._hardware = hardware
        self._plans, self._keeps = plans, keeps
        shared, room = Line(Tier.S3, hardware.shared), Room()
        self._nodes = [Node(hardware, shared, room) for _ in range(hardware.nodes)]
        pair_share = hardware.compute.pair_s / hardware.compute.token_s
        self._engines = [
            FleetEngine(self._nodes[number % hardware.nodes], pair_share) for number in range(hardware.engines)
        ]
        self.report = FleetReport()

    def run(self, requests: Sequence[TracedRequest]) -> FleetReport:
        """Play all requests out, and return the report. Cost: about a millisecond per request."""
        ends: list[tuple[float, int, TracedRequest]] = []
        for request in requests:
            self._end_until(ends, request.at_s)
            number = min(range(len(self._engines)), key=lambda each: self._engines[each].tokens_ahead)
            engine = self._engines[number]
            engine.queue.append(request)
            engine.tokens_ahead += request.token_count
            if not engine.is_busy:
                self._begin(ends, number, request.at_s)
        self._end_until(ends, float("inf"))
        return self.report

    def _end_until(self, ends: list[tuple[float, int, TracedRequest]], at_s: float) -> None:
        while ends and ends[0][0] <= at_s:
            now_s, number, done = heapq.heappop(ends)
            engine = self._engines[number]
            engine.is_busy = False
            engine.tokens_ahead -= done.token_count
            if self._keeps:
                self.report.written_bytes.update(engine.node.keep(self._whole_blocks(done)))
            if engine.queue:
                self._begin(ends, number, now_s)

    def _begin(self, ends: list[tuple[float, int, TracedRequest]], number: int, now_s: float) -> None:
        engine = self._engines[number]
        request = engine.queue.popleft()
        engine.is_busy = True
        took_s = self._play(engine, request, now_s)
        self.report.ttfts_s.append(now_s - request.at_s + took_s)
        heapq.heappush(ends, (now_s + took_s, number, request))

    def _play(self, engine: FleetEngine, request: TracedRequest, now_s: float) -> float:
        truth = self._truth(engine, request, now_s)
        stock = truth.stocks[0] if truth.stocks else Stock(())
        stop = usable = truth.usable(stock) if truth.stocks else 0
        if self._plans and usable:
            stop = plan_loading(self._known(engine, truth, now_s)).chosen.load_stop
        played = play(truth, stock, 0, stop)
        self._learn(engine, truth, stop, now_s, played.busy)
        self._account(engine, truth, stock, stop, usable, now_s)
        return played.ttft_s

    def _whole_blocks(self, request: TracedRequest) -> tuple[int, ...]:
        return request.blocks[: request.token_count // self._hardware.block_tokens]

    def _truth(self, engine: FleetEngine, request: TracedRequest, now_s: float) -> LoadFacts:
        hardware, runs = self._hardware, engine.node.runs(self._whole_blocks(request))
        return LoadFacts(
            token_count=request.token_count, reusable_tokens=request.token_count - 1, compute=hardware.compute,
            link=hardware.link, stocks=(Stock(runs),) if runs else (),
            tiers={tier: line.truth(now_s) for tier, line in engine.node.lines.items()},
            layer_count=hardware.layers, unit_tokens=hardware.block_tokens, ways=WAYS,
        )  # fmt: skip

    def _known(self, engine: FleetEngine, truth: LoadFacts, now_s: float) -> LoadFacts:
        """Return the facts with measured rates in place of the true ones."""
        return replace(
            truth, tiers={tier: line.known(now_s) for tier, line in engine.node.lines.items()},
            link=engine.link.rate or ASSUMED[Tier.DRAM], compute=engine.prefills.rate,
        )  # fmt: skip

    def _learn(
        self, engine: FleetEngine, truth: LoadFacts, stop: int, now_s: float, busy: dict[Tier, BusyTime]
    ) -> None:
        for tier, time in busy.items():
            if tier in engine.node.lines:
                engine.node.lines[tier].delivered(now_s, time)
            else:
                engine.link = engine.link.observed(time)
        rest = truth.token_count - stop
        engine.prefills = engine.prefills.observed(Prefill(rest, stop, truth.compute.seconds(rest, stop)))

    def _account(
        self, engine: FleetEngine, truth: LoadFacts, stock: Stock, stop: int, usable: int, now_s: float
    ) -> None:
        report = self.report
        report.loaded_tokens += stop
        report.computed_tokens += truth.token_count - stop
        report.refused_requests += stop < usable
        for tier in stock.tiers:
            report.read_bytes[tier] += int(stock.bytes_of(tier, 0, stop))
            refused = int(stock.bytes_of(tier, stop, usable))
            report.refused_bytes[tier] += refused
            if refused and tier in engine.node.lines and not stock.bytes_of(tier, 0, stop):
                report.read_bytes[tier] += engine.node.lines[tier].probe(now_s, self._hardware.block_bytes)
