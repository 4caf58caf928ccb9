"""The metrics that Prometheus scrapes. With several tenants every sample has a tenant label, ``tenant="default"``, or
is of all tenants together, for readers who may not see each of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from kvstore.controller import Stats
from kvstore.controller.benefit import Saving, ServedModel
from kvstore.controller.values import ModelCount
from kvstore.tiers import TierStatistics

_GAUGES = {
    "arena_capacity_bytes": ("capacity_bytes", "Hard cap of the arena"),
    "arena_prefaulted_bytes": ("prefaulted_bytes", "Arena bytes backed by pages"),
    "arena_used_bytes": ("used_bytes", "Arena bytes handed out, headers included"),
    "arena_leased_bytes": ("leased_bytes", "Arena bytes under leases"),
    "arena_pinned_bytes": ("pinned_bytes", "Bytes of chunks under pins, as in memory"),
    "arena_reserved_bytes": ("reserved_bytes", "Arena bytes of stores in flight"),
    "arena_chunks": ("chunk_count", "Chunks in the arena"),
    "sessions": ("session_count", "Open sessions"),
    "reservations": ("reservation_count", "Stores in flight"),
    "tickets": ("ticket_count", "Tickets open"),
    "ticket_bytes": ("ticket_bytes", "Bytes of chunks that tickets hold"),
    "leases": ("lease_count", "Leases held"),
    "watchers": ("watcher_count", "Readers of events, the publisher for routers included"),
    "streams": ("stream_count", "Fetch streams open"),
    "staging_bytes": ("staging_bytes", "Staging of all sessions"),
    "backlog_chunks": ("backlog_count", "Writes of committed chunks to slower tiers that wait or are on their way"),
    "loading_bytes": ("loading_bytes", "Arena bytes of chunks on their way from slower tiers"),
}
_TIER_GAUGES = {
    "capacity_bytes": "Hard cap of the tier",
    "file_bytes": "Bytes of the tier's files",
    "allocated_bytes": "Bytes of slots that hold a chunk",
    "free_bytes": "Bytes of slots that are free",
    "quarantined_bytes": "Bytes of slots out of use: a check failed, or no key here opens them",
    "chunk_count": "Chunks in the tier; none of shared tiers, whose engines do not count them",
    "state_seconds": "Seconds for which the tier has been in its state: up, read-only or failing",
}
_MODEL_COUNTERS = {
    "served_tokens": "Tokens that engines fetched and did not compute",
    "saved_seconds": "What computing such tokens would have taken, once engines have told how long prefills take",
}
"""Counters of each model, by the beginning of its fingerprint: only readers of the page may see its name."""
FINGERPRINT_DIGITS = 16
_ENCODINGS = {
    "encoded": "1 where a shared tier with encoding = auto has chosen lz4 for a model's new copies, 0 for raw",
    "encoded_ratio": "Stored bytes per raw byte of a model as lz4, as measured there",
}
"""Gauges of each tier and model."""
OPEN_METRICS, OPEN_VERSION = "application/openmetrics-text", "1.0.0"
TIER_UP = "1 while the tier is up"
MILLISECONDS = "_milliseconds"
UNITS = ("bytes", "chunks", "seconds", "tokens")


class Scrape(NamedTuple):
    """The content of one scrape: each tenant's counts, and the meaning of each counter."""

    stats: Mapping[str, Stats]
    counted: Mapping[str, str]


class _Collector(Collector):
    """A collector of Prometheus' library: it gives the samples of one scrape."""

    def __init__(self, found: Scrape) -> None:
        self._found = found
        self._labels = ["tenant"] if len(found.stats) > 1 else []

    def _named(self, tenant: str) -> list[str]:
        return [tenant] if self._labels else []

    def collect(self) -> Iterator[Metric]:
        found = self._found.stats
        for name, (field, description) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"kvstore_{name}", description, labels=self._labels)
            for tenant, stats in found.items():
                gauge.add_metric(self._named(tenant), getattr(stats, field))
            yield gauge
        tiers = [(tenant, tier) for tenant, stats in found.items() for tier in stats.tiers]
        for name, description in _TIER_GAUGES.items() if tiers else ():
            gauge = GaugeMetricFamily(f"kvstore_tier_{name}", description, labels=[*self._labels, "tier"])
            for tenant, tier in tiers:
                if not (tier.is_shared and name == "chunk_count"):
                    gauge.add_metric([*self._named(tenant), tier.name], getattr(tier, name))
            yield gauge
        if tiers:
            is_up = GaugeMetricFamily("kvstore_tier_up", TIER_UP, labels=[*self._labels, "tier"])
            for tenant, tier in tiers:
                is_up.add_metric([*self._named(tenant), tier.name], tier.state == "up")
            yield is_up
            yield from self._encodings(tiers)
        for name, description in _MODEL_COUNTERS.items():
            counter = CounterMetricFamily(f"kvstore_{name}", description, labels=[*self._labels, "fingerprint"])
            for tenant, stats in found.items():
                for model in stats.models:
                    total = model.served.total
                    value = total.token_count if name == "served_tokens" else total.seconds
                    counter.add_metric([*self._named(tenant), model.fingerprint.hex()[:FINGERPRINT_DIGITS]], value)
            yield counter
        for name, description in self._found.counted.items():
            told, share = _in_seconds(name)
            counter = CounterMetricFamily(f"kvstore_{told}", description, labels=self._labels)
            for tenant, stats in found.items():
                counter.add_metric(self._named(tenant), stats.counters.get(name, 0) * share)
            yield counter

    def _encodings(self, tiers: list[tuple[str, TierStatistics]]) -> Iterator[Metric]:
        for name, description in _ENCODINGS.items():
            gauge = GaugeMetricFamily(
                f"kvstore_tier_{name}", description, labels=[*self._labels, "tier", "fingerprint"]
            )
            for tenant, tier in tiers:
                for each in tier.encodings:
                    model = each.fingerprint.hex()[:FINGERPRINT_DIGITS]
                    value = each.encoding == "lz4" if name == "encoded" else each.ratio
                    gauge.add_metric([*self._named(tenant), tier.name, model], value)
            yield gauge


def sum_of_tenants(stats: Iterable[Stats]) -> Stats:
    """Return the sums over all tenants. Every row of a model is in one sum without a fingerprint, which would tell that
    somebody uses the model."""
    all_stats = list(stats)
    first = all_stats[0]
    sums = {
        each.name: sum(getattr(one, each.name) for one in all_stats)
        for each in fields(first) if type(getattr(first, each.name)) is int
    }  # fmt: skip
    counters: dict[str, int] = {}
    for one in all_stats:
        for name, count in one.counters.items():
            counters[name] = counters.get(name, 0) + count
    tiers: dict[str, list[TierStatistics]] = {}
    for tier in (tier for one in all_stats for tier in one.tiers):
        tiers.setdefault(tier.name, []).append(tier)
    models = [model for one in all_stats for model in one.models]
    return replace(
        first, **sums, counters=counters, models=(_all_of(models, all_stats),) if models else (),
        tiers=tuple(map(_whole, tiers.values())), tier_problem="", rates=(),
    )  # fmt: skip


def _all_of(models: list[ModelCount], stats: list[Stats]) -> ModelCount:
    total = Saving()
    for saving in (*(each.served.total for each in models), *(each.forgotten for each in stats)):
        total = total.plus(saving)
    return replace(models[0], model_id="", fingerprint=b"", served=ServedModel(total, ()))


def _whole(parts: list[TierStatistics]) -> TierStatistics:
    """Return the tenants' parts of a tier as one. A shared tier tells every tenant the numbers of its engine."""
    merge = max if parts[0].is_shared else sum
    merged = {name: merge(getattr(each, name) for each in parts) for name in _TIER_GAUGES if name != "state_seconds"}
    told = next((each for each in parts if each.state != "up"), parts[0])
    return replace(parts[0], **merged, state=told.state, state_s=told.state_s, reason="", encodings=())


def exposition_form(accept: str) -> str:
    """Return the content type of the form that a reader prefers (its Accept header): one of two. The library's own
    choice repeats any version that a reader names, and fails for what is none."""
    asked = [each.replace(" ", "").split(";") for each in accept.split(",")]
    is_open = any(kind == OPEN_METRICS and _is_known(parameters) for kind, *parameters in asked)
    return choose_encoder(f"{OPEN_METRICS}; version={OPEN_VERSION}" if is_open else "")[1]


def _is_known(parameters: Iterable[str]) -> bool:
    """True when an OpenMetrics reader names the version that there is, or none."""
    return all(each == f"version={OPEN_VERSION}" for each in parameters if each.startswith("version="))


def exposition(found: Scrape, form: str) -> bytes:
    """Return the metrics in one of the forms of ``exposition_form``."""
    registry = CollectorRegistry()
    registry.register(_Collector(found))
    return choose_encoder(form)[0](registry)


def _in_seconds(name: str) -> tuple[str, float]:
    """Return a counter's name in Prometheus, whose unit of time is the second, and the factor to it. Counters are whole
    numbers, so those of short times are in milliseconds."""
    stem = name.removesuffix(MILLISECONDS)
    return (name, 1) if stem == name else (f"{stem}_seconds", 1e-3)


class MetricRow(NamedTuple):
    """One metric: its name in Prometheus, its kind, its unit, its labels beside ``tenant``, and its meaning."""

    name: str
    kind: str
    unit: str
    labels: str
    description: str


def metric_rows(counted: Mapping[str, str]) -> list[MetricRow]:
    """Return every metric. ``counted``: the meaning of each counter, by its name."""
    rows = [_row(name, "gauge", "", said) for name, (_, said) in _GAUGES.items()]
    rows += [_row(f"tier_{name}", "gauge", "tier", said) for name, said in _TIER_GAUGES.items()]
    rows.append(_row("tier_up", "gauge", "tier", TIER_UP))
    rows += [_row(f"tier_{name}", "gauge", "tier, fingerprint", said) for name, said in _ENCODINGS.items()]
    rows += [_row(f"{name}_total", "counter", "fingerprint", said) for name, said in _MODEL_COUNTERS.items()]
    return rows + [_row(f"{_in_seconds(name)[0]}_total", "counter", "", said) for name, said in counted.items()]


def _row(name: str, kind: str, labels: str, description: str) -> MetricRow:
    words = name.removesuffix("_total").split("_")
    unit = next((each for each in reversed(words) if each in UNITS), "number")
    return MetricRow(f"kvstore_{name}", kind, unit, labels, description)
