"""Whose a line is: said by the tasks, calls and threads that work for a tenant, and by nobody else."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from kvstore.seams import WorkerThreads
from kvstore.telemetry import BoundedLines, configure_logging, log_as, log_on_as
from kvstore.telemetry.logs import MINUTE_LINES_MAX
from tests.simulated.clock import ManualClock

_log = logging.getLogger("kvstore.test")


@pytest.fixture(params=["json", "text"])
def form(request: pytest.FixtureRequest) -> Iterator[str]:
    root = logging.getLogger("kvstore")
    before = root.handlers[:], root.level, root.propagate
    configure_logging("info", request.param)
    yield request.param
    root.handlers[:], root.level, root.propagate = before


def whose(form: str, captured: str) -> dict[str, str]:
    """Message to tenant, of lines of either form."""
    if form == "json":
        return {line["message"]: line.get("tenant", "") for line in map(json.loads, captured.splitlines())}
    return {line.split()[2]: line.partition("tenant=")[2] for line in captured.splitlines()}


async def test_a_line_says_for_which_tenant_it_was_written(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", form)  # on the stream that is captured
    threads = WorkerThreads(1, "test")
    goes = asyncio.Event()

    async def later(message: str) -> None:
        await goes.wait()
        _log.info(message)
        await asyncio.wrap_future(threads.submit(_log.info, f"{message}-thread"))

    async def remote() -> None:
        log_on_as("c")
        _log.info("remote")

    async with asyncio.TaskGroup() as group:
        for name in ("a", "b"):
            with log_as(name):
                group.create_task(later(f"of-{name}"))
        group.create_task(later("of-nobody"))
        group.create_task(remote())
        goes.set()
    _log.info("after")
    threads.close()
    assert whose(form, capfd.readouterr().err) == {
        "of-a": "a", "of-a-thread": "a", "of-b": "b", "of-b-thread": "b", "of-nobody": "", "of-nobody-thread": "",
        "remote": "c", "after": "",
    }  # fmt: skip


def test_a_name_that_a_client_chose_is_no_line_of_its_own(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", form)
    name = "m\n00:00:00 error   forged\x1b[2J\u2028 jörg"
    _log.info("warmed", extra={"model": name})
    _log.info("a message of %s", name)
    captured = capfd.readouterr().err
    assert len(captured.splitlines()) == 2
    assert "\x1b" not in captured
    assert form == "json" or "jörg" in captured


def test_a_line_says_its_day_and_that_its_time_is_utc(form: str, capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", form)
    _log.info("said")
    line = capfd.readouterr().err
    when = datetime.fromisoformat(json.loads(line)["time"] if form == "json" else line.split()[0])
    assert abs((datetime.now(UTC) - when).total_seconds()) < 60


def test_lines_that_peers_cause_are_bounded_and_what_was_left_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    lines = BoundedLines(_log, clock)
    for _ in range(2):
        for _ in range(MINUTE_LINES_MAX):
            lines.line(logging.DEBUG, "lost")  # what the level hides takes no other line's place
        for _ in range(MINUTE_LINES_MAX + 7):
            lines.line(logging.WARNING, "refused", reason="no hello")
        clock.advance(60.0)
    lines.line(logging.WARNING, "refused", reason="no hello")
    left_out = [getattr(each, "left_out", 0) for each in caplog.records]
    assert len(left_out) == 2 * MINUTE_LINES_MAX + 1
    assert [count for count in left_out if count] == [7, 7]
    assert (left_out[MINUTE_LINES_MAX], left_out[-1]) == (7, 7)
