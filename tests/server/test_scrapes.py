"""Many scrapes at once: readers share answers and renderings, and the service goes on meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.seams import SystemClock
from kvstore.server.metrics import exposition_form
from kvstore.server.web.facts import Overview
from kvstore.server.web.listener import Reply, WebRequest
from kvstore.server.web.site import Site, WebQuestion
from tests.controller.service import Service
from tests.simulated import ManualClock

OPEN_METRICS = "application/openmetrics-text"


def site_of(tenant_count: int) -> Site:
    """A site of so many tenants. Made inside the loop that serves them."""
    controller, clock = Service().controller, SystemClock()
    tenants = {f"tenant-{number}": controller for number in range(tenant_count)}
    return Site(tenants, Overview([], clock), asyncio.get_running_loop(), clock, shows_tenants=True)


async def test_readers_that_waited_share_an_answer_however_long_it_took() -> None:
    """What took longer than its age to render was asked for and rendered anew for each of them."""
    clock, rendered = ManualClock(), list[str]()

    async def told() -> str:
        return "told"

    def render(told: str, form: str) -> Reply:
        rendered.append(told)
        clock.advance(1.0)
        return Reply(200, told.encode())

    question = WebQuestion(told, render, asyncio.get_running_loop(), clock, 0.25)
    await asyncio.gather(*(question.get() for _ in range(50)))
    assert len(rendered) <= 2


async def test_others_are_answered_between_two_tenants_of_a_scrape() -> None:
    """A hundred tenants with many models each kept every call waiting for a tenth of a second."""
    site, rounds = site_of(5), 0

    async def others() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    assert len((await site._scraped()).stats) == 5
    beside.cancel()
    assert rounds >= 4


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain"), ("text/plain; version=none", "text/plain"), ("text/plain; version=1.2.3", "text/plain"),
        (f"{OPEN_METRICS}; version=9.9", "text/plain"), (f"{OPEN_METRICS}; version=x", "text/plain"),
        (f"{OPEN_METRICS};version=1.0.0;q=0.5,{OPEN_METRICS};version=0.0.1", OPEN_METRICS),
        (OPEN_METRICS, OPEN_METRICS),
    ],
)  # fmt: skip
async def test_a_reader_of_metrics_has_one_of_two_forms_whatever_it_asks_for(accept: str, kind: str) -> None:
    """What is no version failed, with a page of log; any other one was rendered for its reader alone."""
    reply = await site_of(1)._metrics(WebRequest("GET", "/metrics", {"accept": accept}))
    assert (reply.status, reply.kind.partition(";")[0]) == (200, kind)
    assert reply.body.endswith(b"# EOF\n") == (kind == OPEN_METRICS)
    assert exposition_form(accept) in (exposition_form(""), exposition_form(OPEN_METRICS))
