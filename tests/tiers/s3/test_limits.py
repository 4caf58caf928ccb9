"""The S3 tier stays within its limits: of a day, of a second, and of what a stall is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.config import S3Settings
from kvstore.errors import DeadlineExceeded, Exhausted, PermissionDenied, Unavailable
from kvstore.seams import SystemClock, WorkerThreads
from kvstore.tiers import IS_FULL, pace
from kvstore.tiers.s3 import Lanes, S3Tier, looking, reading, writing
from kvstore.tiers.s3 import tier as s3_tier
from kvstore.tiers.s3.allowance import DAY_S, Allowance
from tests.contracts.chunks import LARGE, SMALL, chunk
from tests.contracts.shared.s3_stand import S3Stand, tier_of
from tests.contracts.shared.stands import TIMEOUT_S, found, write
from tests.fakes.switches import POLL_S, Switch
from tests.scenario import scenario

STALL_S = 1.0
HEARD_S_MAX = 20.0


@pytest.mark.parametrize("limit", ["day_bytes_max", "day_request_count_max"])
@scenario()
async def test_a_day_has_its_limit(stand: S3Stand, limit: str) -> None:
    tier = tier_of(replace(stand.settings, **{limit: 100_000 if limit == "day_bytes_max" else 10}))
    with pytest.raises(Exhausted, match=f"tiers.s3.{limit}") as caught:
        for number in range(100):
            await write(tier, chunk(number))
    assert IS_FULL in caught.value.fields, "others need not be tried"
    before = len(stand.switches.asked)
    with pytest.raises(Exhausted, match=f"tiers.s3.{limit}"):
        await tier.open(chunk(0).name)
    keys = [chunk(number).header.storage_key for number in (0, 1000)]
    assert list(await tier.probe(keys, TIMEOUT_S)) == [None, None], "it may be there"
    assert len(stand.switches.asked) == before, "nothing was asked"
    assert tier.statistics().state == "failing"
    assert await found(stand.other, chunk(0))
    await tier.close()


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "late"])
@scenario()
async def test_questions_without_an_answer_count_for_the_day(stand: S3Stand, is_refused: bool) -> None:
    """They are billed like others, and a bucket that is far away answers most lookups too late."""
    tier = tier_of(replace(stand.settings, day_request_count_max=8))
    stand.switches.refusals = [(500, "InternalError")] * 20 * is_refused
    if not is_refused:
        stand.switches.turn_on(Switch.STALLED)
    keys = [chunk(number).header.storage_key for number in range(4)]
    for _ in range(2):
        with pytest.raises((Unavailable, DeadlineExceeded)):
            await tier.probe(keys, TIMEOUT_S if is_refused else 0.01)
    assert list(await tier.probe(keys, TIMEOUT_S)) == [None] * 4, "eight were sent: nothing more is asked"
    stand.switches.turn_off()
    await tier.close()


@pytest.mark.parametrize("is_denied", [False, True])
@scenario()
async def test_bytes_that_a_read_did_not_get_count_for_no_limit(stand: S3Stand, is_denied: bool) -> None:
    """A chunk's first bytes are asked for with its header. Where many are gone, as after a scan that deleted them, the
    tier would be left alone for the rest of the day, and reads would wait for a turn that nobody needs."""
    what = chunk(1, LARGE)
    target = [np.empty(slab.byte_count, np.uint8) for slab in LARGE.slabs]
    settings = replace(stand.settings, range_bytes=LARGE.total_bytes, day_bytes_max=3 * LARGE.total_bytes,
                       bytes_per_s_max=LARGE.total_bytes)  # fmt: skip
    tier = tier_of(settings)
    stand.switches.denied = frozenset({"GET"} if is_denied else ())
    for _ in range(13):
        assert await tier.open(what.name, target) is None
    stand.switches.turn_off()
    await write(stand.other, what)
    assert await found(tier, what)
    await tier.close()


@scenario()
async def test_a_node_that_may_not_write_does_not_send_chunk_after_chunk(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is sent whole before it is denied: a node that only reads would use up its day's bytes by that, and read
    nothing any more."""
    await write(stand.other, chunk(0))
    tier = tier_of(replace(stand.settings, day_bytes_max=25 * SMALL.header_bytes + 6 * SMALL.body_bytes))
    stand.switches.asked.clear()
    stand.switches.denied = frozenset({"PUT"})
    for number in range(1, 20):
        with pytest.raises(PermissionDenied, match="s3:PutObject"):
            await write(tier, chunk(number))
    assert sum(method == "PUT" for method, *_ in stand.switches.asked) == 1
    await write(tier, chunk(0))  # it is there: nothing is sent
    assert await found(tier, chunk(0))
    await tier.close()


@scenario()
async def test_a_node_that_may_write_again_finds_out(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_tier, "DENIED_S", 0.0)
    stand.switches.denied = frozenset({"PUT"})
    with pytest.raises(PermissionDenied):
        await write(stand.tier, chunk(1))
    assert stand.tier.statistics().state == "read-only"
    stand.switches.turn_off()
    await write(stand.tier, chunk(1))
    assert stand.tier.statistics().state == "up"


@scenario()
async def test_one_chunk_at_a_time_finds_out_if_a_node_may_write_by_now(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand.switches.denied = frozenset({"PUT"})
    with monkeypatch.context() as context:
        context.setattr(s3_tier, "DENIED_S", 0.0)
        with pytest.raises(PermissionDenied):
            await write(stand.tier, chunk(0))
    stand.switches.asked.clear()
    writes = (write(stand.tier, chunk(number)) for number in range(1, 9))
    ends = await asyncio.gather(*writes, return_exceptions=True)
    assert all(isinstance(each, PermissionDenied) for each in ends)
    assert sum(method == "PUT" for method, *_ in stand.switches.asked) == 1


class Hand(SystemClock):
    """A clock that is moved by hand; sleepers wake at once."""

    now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s + 1e9

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def test_bytes_pass_at_their_pace_and_a_new_day_begins(stand: S3Stand) -> None:
    clock = Hand()
    allowance = Allowance(replace(stand.settings, bytes_per_s_max=1000, day_bytes_max=5000), clock)
    began_s = clock.now_s
    for _ in range(5):
        await allowance.turn(1000)
        assert not allowance.reached
        allowance.used(1000, 1)
    assert 3.0 <= clock.now_s - began_s <= 4.0
    assert allowance.reached == "day_bytes_max"
    clock.now_s += DAY_S
    assert not allowance.reached
    await allowance.turn(50_000)
    with pytest.raises(Exhausted, match="bytes_per_s_max"):
        await allowance.turn(1)


@pytest.mark.parametrize("ends", ["stop", "kill"])
async def test_a_days_limit_outlives_the_process(tmp_path: Path, ends: str) -> None:
    """One that is killed may forget a thousandth of the limit, and does not begin the day anew."""
    clock, account = Hand(), tmp_path / "s3" / "default"
    settings = S3Settings(bucket="a-bucket", day_bytes_max=5_000_000)
    first = Allowance(settings, clock, account)
    assert not first.reached
    for _ in range(499):
        first.used(10_000, 1)
    first.used(3_000, 1)
    if ends == "stop":
        first.keep()
    clock.now_s = 50.0  # the machine was started anew: its monotonic clock, too
    clock.wall = lambda: 1e9 + 1e6 + 100
    second = Allowance(settings, clock, account)
    assert not second.reached
    second.used(7_000 + 5_000 * (ends == "kill"), 1)
    assert second.reached == "day_bytes_max"
    clock.wall = lambda: 1e9 + 1e6 + DAY_S + 1
    assert not second.reached


async def test_an_account_that_cannot_be_kept_is_told_and_limits_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = S3Settings(bucket="a-bucket", day_request_count_max=10)
    (tmp_path / "odd").write_text("[1, 2")
    for account in (tmp_path / "odd", tmp_path / "odd" / "below a file"):
        allowance = Allowance(settings, Hand(), account)
        assert not allowance.reached
        allowance.used(0, 10)
        assert allowance.reached == "day_request_count_max"
    assert "is not kept" in caplog.text
    assert Allowance(settings, Hand(), tmp_path / "odd").reached


@pytest.mark.parametrize("is_ahead", [True, False])
@scenario()
async def test_a_large_read_on_a_slow_line_is_no_stall(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch, is_ahead: bool
) -> None:
    """Eight reads side by side would each take longer than a tier may be silent."""
    what = chunk(1)
    await write(stand.tier, what)
    target = [np.empty(slab.byte_count, np.uint8) for slab in what.layout.slabs]
    for rate, is_stalled in ((1.0, False), (1e12, True)):
        monkeypatch.setattr(pace, "SLOW_BYTES_PER_S", rate)
        stand.switches.turn_off()
        stored = None if is_ahead else await stand.tier.open(what.name)
        looked = stand.switches.hears("GET")
        if stored is None:
            reading: asyncio.Future[Any] = asyncio.ensure_future(stand.tier.open(what.name, target))
        else:
            reading = asyncio.ensure_future(stored.read(range(len(target)), target))
        await asyncio.to_thread(looked.wait, 10.0)
        assert bool(stand.tier.stalled_s()) == is_stalled
        stand.switches.turn_off()
        await reading
    assert stand.tier.stalled_s() == 0.0


@pytest.mark.parametrize("lane", ["read", "write"])
@scenario()
async def test_a_job_that_waits_behind_large_ones_is_no_stall(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """A look has no bytes, and no thread while a slow line keeps all of them busy: the tier would be left alone, and
    the reads that it gives at that moment would be lost."""
    await write(stand.other, chunk(1))
    settings = replace(stand.settings, reader_count=1, writer_count=1)
    lanes = Lanes(*(WorkerThreads(1, f"s3-{name}") for name in ("read", "write", "ask", "near")))
    tier = S3Tier(settings, lanes, SystemClock())
    target = [np.empty(slab.byte_count, np.uint8) for slab in chunk(1).layout.slabs]
    for number, (rate, is_stalled) in enumerate(((1.0, False), (1e12, True)), 2):
        monkeypatch.setattr(pace, "SLOW_BYTES_PER_S", rate)
        looked = stand.switches.hears("GET" if lane == "read" else "PUT")
        moves = (lambda: tier.open(chunk(1).name, target)), (lambda: write(tier, chunk(number)))  # noqa: B023 - at once
        moving: asyncio.Future[Any] = asyncio.ensure_future(moves[lane == "write"]())
        await asyncio.to_thread(looked.wait, 10.0)
        workers = lanes.readers if lane == "read" else lanes.writers
        waiting = asyncio.ensure_future(tier._run(workers, int))
        await asyncio.sleep(POLL_S)
        assert not waiting.done()
        assert bool(tier.stalled_s()) == is_stalled
        stand.switches.turn_off()
        await asyncio.gather(moving, waiting)
    await tier.close()


@scenario()
async def test_a_large_chunk_on_a_slow_line_is_no_stall(stand: S3Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the tier, that others go on asking; one of the same size that was to be sent long ago is."""
    for rate, is_stalled in ((1.0, False), (1e12, True)):
        monkeypatch.setattr(pace, "SLOW_BYTES_PER_S", rate)
        stand.switches.turn_off()
        await stand.tier.remove([chunk(1).header.storage_key])
        looked = stand.switches.hears("PUT")
        sending = asyncio.ensure_future(write(stand.tier, chunk(1)))
        await asyncio.to_thread(looked.wait, 10.0)
        assert bool(stand.tier.stalled_s()) == is_stalled
        stand.switches.turn_off()
        await sending
    assert stand.tier.stalled_s() == 0.0


@pytest.mark.parametrize("way", ["read", "read ahead", "write"])
@pytest.mark.parametrize("is_slow_line", [True, False])
@scenario()
async def test_a_job_has_time_for_its_bytes(
    stand: S3Stand, monkeypatch: pytest.MonkeyPatch, way: str, is_slow_line: bool
) -> None:
    """A large chunk on a slow line would never arrive within a limit that knows no bytes."""
    what = chunk(1)

    async def moved() -> None:
        target = [np.empty(slab.byte_count, np.uint8) for slab in what.layout.slabs]
        if way == "write":
            await write(stand.tier, what)
            return
        stored = await stand.tier.open(what.name, target if way == "read ahead" else ())
        assert stored is not None
        if way == "read":
            stand.switches.hears("GET")
        await stored.read(range(len(target)), target)

    if way != "write":
        await write(stand.other, what)
    for module, name in ((reading, "READ_S_MAX"), (looking, "READ_S_MAX"), (writing, "WRITE_S_MAX")):
        monkeypatch.setattr(module, name, STALL_S / 3)
    least_bytes = what.layout.slabs[0].byte_count
    monkeypatch.setattr(pace, "BYTES_PER_S_MIN", least_bytes / (10 * TIMEOUT_S) if is_slow_line else 1e12)
    if way != "read":
        stand.switches.hears("PUT" if way == "write" else "GET")
    moving = asyncio.ensure_future(moved())
    async with asyncio.timeout(HEARD_S_MAX):
        while not stand.switches.is_stalled and not moving.done():  # noqa: ASYNC110 - another thread stalls it
            await asyncio.sleep(POLL_S)
    await asyncio.wait([moving], timeout=STALL_S)
    stand.switches.turn_off()
    if is_slow_line:
        await moving
    else:
        with pytest.raises(Unavailable, match="no end after"):
            await moving


def test_small_chunks_are_none_of_its(stand: S3Stand) -> None:
    tier = tier_of(replace(stand.settings, chunk_bytes_min=SMALL.total_bytes + 1))
    assert not tier.takes(SMALL)
    assert tier.takes(LARGE)
    asyncio.run(tier.close())
