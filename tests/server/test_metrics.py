"""Who sees whose metrics: with a token each tenant has rows of its own, without one all are one sum."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from kvstore_ops.pages.metrics import all_counters

from kvstore.controller import Stats
from kvstore.controller.benefit import Saving, ServedModel
from kvstore.seams import SystemClock
from kvstore.server.metrics import Scrape, exposition, metric_rows, sum_of_tenants
from kvstore.server.web.facts import Overview
from kvstore.server.web.site import Site
from kvstore.telemetry.counters import DESCRIPTIONS
from kvstore.tiers import EncodingFigures, TierStatistics
from tests.controller.service import Service

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def tier(name: str, count: int, **more: Any) -> TierStatistics:
    sizes = dict.fromkeys(("file_bytes", "free_bytes", "quarantined_bytes", "overhead_bytes", "read_bytes"), count)
    more = {"state": "up", **more}
    return TierStatistics(
        name=name, capacity_bytes=10 * count, allocated_bytes=count, chunk_count=count, written_bytes=0, **sizes, **more
    )


async def stats_of(count: int, **more: Any) -> Stats:
    """A tenant's with ``count`` of everything, and one model."""
    service = Service(chunks=8)
    await service.store(service.controller.open_session(), *range(count))
    found = service.controller.stats()
    served = ServedModel(Saving(count, 16 * count, 0.5 * count))
    models = tuple(replace(each, served=served, fingerprint=bytes([count] * 32)) for each in found.models)
    chosen = EncodingFigures(bytes([count] * 32), "lz4", 3, 0.75)
    tiers = (tier("nvme", count, **more), tier("redis", 100 + count, is_shared=True, encodings=(chosen,)))
    return replace(found, counters={"fetch_calls": count, "waited_milliseconds": 1500}, models=models, tiers=tiers)


async def test_the_sum_of_tenants_tells_nothing_of_one() -> None:
    counted = {"fetch_calls": "Fetches", "waited_milliseconds": "Time"}
    stats = {"red": await stats_of(2), "blue": await stats_of(3, state="failing")}
    stats["red"] = replace(stats["red"], forgotten=Saving(1, 20, 0.25))  # of a model that is not told any more
    said = exposition(Scrape({"": sum_of_tenants(stats.values())}, counted), TEXT).decode()
    for row in (
        "kvstore_arena_chunks 5.0", "kvstore_fetch_calls_total 5.0", "kvstore_waited_seconds_total 3.0",
        'kvstore_tier_allocated_bytes{tier="nvme"} 5.0',
        'kvstore_tier_chunk_count{tier="nvme"} 5.0', 'kvstore_tier_allocated_bytes{tier="redis"} 103.0',
        'kvstore_tier_up{tier="nvme"} 0.0',
        'kvstore_tier_up{tier="redis"} 1.0', 'kvstore_served_tokens_total{fingerprint=""} 100.0',
        'kvstore_saved_seconds_total{fingerprint=""} 2.75',
    ):  # fmt: skip
        assert f"{row}\n" in said, row
    assert 'kvstore_tier_chunk_count{tier="redis"}' not in said  # a shared engine does not count chunks
    assert not [each for each in ('"red"', '"blue"', "0202", "0303") if each in said]
    apart = exposition(Scrape(stats, counted), TEXT).decode()
    assert 'kvstore_fetch_calls_total{tenant="red"} 2.0' in apart
    assert 'kvstore_served_tokens_total{fingerprint="0303030303030303",tenant="blue"} 48.0' in apart
    assert 'kvstore_tier_encoded{fingerprint="0303030303030303",tenant="blue",tier="redis"} 1.0' in apart
    assert 'kvstore_tier_encoded_ratio{fingerprint="0202020202020202",tenant="red",tier="redis"} 0.75' in apart


@pytest.mark.parametrize("shows_tenants", [False, True])
async def test_a_site_shows_each_tenant_where_a_token_guards_it(*, shows_tenants: bool) -> None:
    controllers = {name: Service(chunks=2).controller for name in ("red", "blue")}
    site = Site(
        controllers, Overview([], SystemClock()), asyncio.get_running_loop(), SystemClock(), shows_tenants=shows_tenants
    )
    assert set((await site._scraped()).stats) == ({"red", "blue"} if shows_tenants else {""})


def test_times_are_in_seconds_whatever_is_counted() -> None:
    row = next(each for each in metric_rows(DESCRIPTIONS) if "saved" in each.name and "prefill" in each.name)
    assert (row.name, row.unit) == ("kvstore_partial_prefill_saved_seconds_total", "seconds")
    assert not [each.name for each in metric_rows(DESCRIPTIONS) if "milli" in each.name]


def test_a_tier_has_no_counter_that_never_grows() -> None:
    """Memory is filled by stores and loads, which have counters of their own, and keeps nothing over a start. Redis
    tells nobody what it evicts: a zero would say that it evicts nothing."""
    names = {each.name for each in metric_rows(all_counters().descriptions)}
    of_memory = {f"kvstore_{each}_total" for each in ("written_bytes", "verified_bytes", "refused_chunks")}
    of_memory |= {f"kvstore_{each}_total" for each in ("written_chunks", "recovered_chunks", "proven_chunks")}
    of_shared = {f"kvstore_redis_{each}_total" for each in ("evicted_chunks", "evicted_bytes", "demoted_chunks")}
    of_shared |= {f"kvstore_s3_{each}_total" for each in ("recovered_chunks", "proven_chunks")}
    assert names & (of_memory | of_shared) == set()
    assert names >= {"kvstore_evicted_chunks_total", "kvstore_nvme_evicted_chunks_total"}
    assert names >= {"kvstore_nvme_recovered_chunks_total", "kvstore_redis_refused_chunks_total"}
