"""The page's content as plain values. Its size is bounded however many tenants and models there are."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from dataclasses import astuple
from heapq import nlargest
from typing import Any

from kvstore import __version__
from kvstore.controller import Controller
from kvstore.controller.benefit import Saving
from kvstore.controller.operators import HotEntry, Operators
from kvstore.controller.prefills import PartialPrefills, PlanRecord
from kvstore.controller.values import ModelCount
from kvstore.movement import TierAccount
from kvstore.planning.loading.outcome import carried_out
from kvstore.seams import Clock
from kvstore.server.web.history import INTERVAL_S, SAVED, HealthEvent, History, health_of

HOT_COUNT = 32
HOT_AGE_S = 10.0
"""Seconds after which a request has the tree of the hottest prefixes made anew."""
DIGEST_DIGITS = 16
MODEL_COUNT_MAX = 50
"""Models of a tenant that the page lists: those with the most bytes."""
TENANT_COUNT_MAX = 32
NAME_CHARACTERS_MAX = 200
PLAN_COUNT = 24
"""Partial prefills that the page shows: the last ones."""


class PageTenant:
    """One tenant on the page. Runs on the event loop's thread."""

    def __init__(
        self, controller: Controller, operators: Operators, prefills: PartialPrefills, clock: Clock, *,
        shows_digests: bool,
    ) -> None:  # fmt: skip
        """``shows_digests``: True to show prefixes' digests. A reader of digests can tell whether a prompt that he
        guesses was fetched."""
        self._controller = controller
        self._operators = operators
        self._prefills = prefills
        self._clock = clock
        self._shows_digests = shows_digests
        self._history = History()
        self._hot: list[dict[str, Any]] = []
        self._hot_since_s = -math.inf

    def note(self) -> None:
        """Record the interval that has just ended in the history. Cost: some 50 us."""
        stats = self._controller.stats()
        saved_s = stats.forgotten.seconds + sum(model.served.total.seconds for model in stats.models)
        self._history.note({**stats.counters, SAVED: int(1e3 * saved_s)}, self._operators.tiers(), self._clock.wall())

    async def facts(self) -> dict[str, Any]:
        """Return the page's content for the tenant, as plain values."""
        if self._clock.monotonic() - self._hot_since_s >= HOT_AGE_S:
            self._hot_since_s = self._clock.monotonic()
            self._hot = [self._prefix(each) for each in await self._operators.hottest(HOT_COUNT)]
        stats = self._controller.stats()
        largest = nlargest(MODEL_COUNT_MAX, stats.models, key=lambda each: each.byte_count)
        return {
            "name": self._controller.tenant,
            "session_count": stats.session_count, "chunk_count": stats.chunk_count,
            "leased_bytes": stats.leased_bytes, "pinned_bytes": stats.pinned_bytes,
            "quarantined_chunks": stats.counters["quarantined_chunks"],
            "tiers": [self._tier(each) for each in self._operators.tiers()],
            "absent": [each[:NAME_CHARACTERS_MAX] for each in self._operators.absent],
            "models": [_model(each) for each in largest], "model_count": len(stats.models),
            "served_hours": _together(stats.models), "hot": self._hot,
            "plans": [_plan(each) for each in self._prefills.records(PLAN_COUNT)],
            "flows": self._history.flows(), "events": [_event(each) for each in self._history.events],
        }  # fmt: skip

    def _prefix(self, entry: HotEntry) -> dict[str, Any]:
        return {
            "above": entry.above, "digest": entry.digest.hex()[:DIGEST_DIGITS] if self._shows_digests else "",
            "model_id": entry.model_id[:NAME_CHARACTERS_MAX], "token_count": entry.token_count,
            "heat": entry.heat, "own_heat": entry.own_heat, "tier": entry.tier,
        }  # fmt: skip

    def _tier(self, account: TierAccount) -> dict[str, Any]:
        stats = account.stats
        came, went = self._history.rates(stats.name)
        return {
            "name": stats.name, "health": health_of(account), "is_shared": stats.is_shared,
            "durability": account.durability.name, "chunk_count": stats.chunk_count,
            "allocated_bytes": stats.allocated_bytes, "capacity_bytes": stats.capacity_bytes,
            "backlog_count": account.backlog_count, "in_bytes_per_s": came, "out_bytes_per_s": went,
        }  # fmt: skip


class Overview:
    """All tenants on the page."""

    def __init__(
        self, tenants: Iterable[tuple[Controller, Operators, PartialPrefills]], clock: Clock, *,
        shows_digests: bool = False,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._started_s = clock.monotonic()
        self._shows_digests = shows_digests
        self._tenants = [PageTenant(*each, clock, shows_digests=shows_digests) for each in tenants]

    async def run(self) -> None:
        """Record each interval in the tenants' histories, for ever."""
        while True:
            await self._clock.sleep(INTERVAL_S)
            for tenant in self._tenants:
                tenant.note()
                await asyncio.sleep(0)

    async def facts(self) -> dict[str, Any]:
        """Return the page's content now. Other requests are answered between two tenants."""
        tenants = []
        for tenant in self._tenants[:TENANT_COUNT_MAX]:
            tenants.append(await tenant.facts())
            await asyncio.sleep(0)
        return {
            "version": __version__, "now_s": self._clock.wall(), "up_s": self._clock.monotonic() - self._started_s,
            "interval_s": INTERVAL_S, "tenant_count": len(self._tenants), "tenants": tenants,
            "shows_digests": self._shows_digests,
        }  # fmt: skip


def _together(models: Iterable[ModelCount]) -> list[tuple[int, int, int, float]]:
    """Return for each hour: its beginning (seconds since 1970), fetches, tokens, and the seconds that computing these
    tokens would have taken."""
    hours: dict[int, Saving] = {}
    for model in models:
        for hour in model.served.hours:
            hours[hour.start_s] = hours.get(hour.start_s, Saving()).plus(hour.saving)
    return [(start_s, *hours[start_s]) for start_s in sorted(hours)]


def _model(model: ModelCount) -> dict[str, Any]:
    return {
        "served_tokens": sum(hour.saving.token_count for hour in model.served.hours),
        "saved_seconds": sum(hour.saving.seconds for hour in model.served.hours),
        "model_id": model.model_id[:NAME_CHARACTERS_MAX], "fingerprint": model.fingerprint.hex()[:16],
        "chunk_count": model.chunk_count, "byte_count": model.byte_count,
    }  # fmt: skip


def _plan(record: PlanRecord) -> dict[str, Any]:
    """Return a partial prefill: what was planned (None: nothing), and what came of it (None: nobody has told). Seconds
    of a plan for an engine that nobody measured mean nothing."""
    plan, end = record.plan, record.end
    return {
        "number": record.number, "at_s": record.began, "model_id": record.model_id[:NAME_CHARACTERS_MAX],
        "stored_token_count": record.stored_token_count, "state": record.state, "mode": record.mode,
        "planned": None if plan is None else {
            "token_count": plan.token_count, "way": plan.chosen.way,
            "is_carried_out": carried_out(plan, record.mode) == plan.chosen,
            "load_start": plan.chosen.load_start, "load_stop": plan.chosen.load_stop, "is_measured": plan.is_measured,
            "ttft_s": plan.chosen.ttft_s, "prefill_s": plan.prefill.ttft_s,
            "bars": [astuple(each) for each in plan.chosen.bars] if plan.is_measured else [],
        },
        "took": None if end is None else {"ttft_s": end.ttft_s, "wait_s": end.wait_s},
    }  # fmt: skip


def _event(event: HealthEvent) -> dict[str, Any]:
    return {"at_s": event.at_s, "tier": event.tier, "text": event.text}
