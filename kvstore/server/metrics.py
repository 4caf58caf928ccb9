"""The Prometheus page. Where there are several tenants every sample says whose it is: ``tenant="default"``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.config import LoadedSettings
from kvstore.controller import Controller, Stats
from kvstore.errors import Unavailable

COLLECT_TIMEOUT_S = 5.0
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
    "quarantined_bytes": "Bytes of slots out of use because a check failed",
    "chunk_count": "Chunks in the tier",
}
_log = logging.getLogger("kvstore.metrics")


class _Collector(Collector):
    """Asks the tenants' controllers on their own thread; the page is served from another."""

    def __init__(self, controllers: Mapping[str, Controller], loop: asyncio.AbstractEventLoop) -> None:
        self._controllers = controllers
        self._labels = ["tenant"] if len(controllers) > 1 else []
        self._loop = loop

    async def _stats(self) -> dict[str, Stats]:
        return {tenant: controller.stats() for tenant, controller in self._controllers.items()}

    def _named(self, tenant: str) -> list[str]:
        return [tenant] if self._labels else []

    def collect(self) -> Iterator[Metric]:
        found = asyncio.run_coroutine_threadsafe(self._stats(), self._loop).result(COLLECT_TIMEOUT_S)
        for name, (field, description) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"kvstore_{name}", description, labels=self._labels)
            for tenant, stats in found.items():
                gauge.add_metric(self._named(tenant), getattr(stats, field))
            yield gauge
        tiers = [(tenant, tier) for tenant, stats in found.items() for tier in stats.tiers]
        for name, description in _TIER_GAUGES.items() if tiers else ():
            gauge = GaugeMetricFamily(f"kvstore_tier_{name}", description, labels=[*self._labels, "tier"])
            for tenant, tier in tiers:
                gauge.add_metric([*self._named(tenant), tier.name], getattr(tier, name))
            yield gauge
        if tiers:
            is_up = GaugeMetricFamily("kvstore_tier_up", "1 while the tier is up", labels=[*self._labels, "tier"])
            for tenant, tier in tiers:
                is_up.add_metric([*self._named(tenant), tier.name], tier.state == "up")
            yield is_up
        counted: dict[str, str] = {}
        for controller in self._controllers.values():
            counted |= controller.counted
        for name, description in counted.items():
            counter = CounterMetricFamily(f"kvstore_{name}", description, labels=self._labels)
            for tenant, stats in found.items():
                counter.add_metric(self._named(tenant), stats.counters.get(name, 0))
            yield counter

    def describe(self) -> list[Metric]:
        return []


def start_metrics(
    loaded: LoadedSettings, controllers: Mapping[str, Controller], loop: asyncio.AbstractEventLoop
) -> str:
    """Serve the page and return its address. A default port that is taken is replaced by a free one; a configured
    one that is taken stops the start with Unavailable."""
    settings = loaded.settings.server
    registry = CollectorRegistry()
    registry.register(_Collector(controllers, loop))
    try:
        server, _ = start_http_server(settings.metrics_port, settings.metrics_host, registry)
    except OSError as error:
        if not loaded.is_default("server.metrics_port"):
            raise Unavailable(
                f"metrics port {settings.metrics_port} on {settings.metrics_host} cannot be had ({error.strerror}): "
                "set server.metrics_port to a free one"
            ) from error
        server, _ = start_http_server(0, settings.metrics_host, registry)
        _log.warning("the default metrics port is taken, using another", extra={"port": server.server_port})
    return f"http://{settings.metrics_host}:{server.server_port}/metrics"
