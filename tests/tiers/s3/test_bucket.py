"""A bucket that is not there is told from an empty one, also by a node that only reads, and found again once it is."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvstore.catalog import Catalog
from kvstore.config import PolicySettings
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.movement.canary import Canaries
from kvstore.movement.shared import SharedCopies
from kvstore.seams import SystemClock, SystemMemory, SystemRandom, WorkerThreads
from kvstore.telemetry import Counters
from kvstore.tiers import SharedUse, WritePolicy
from kvstore.tiers.s3 import Lanes, S3Tier
from kvstore.tiers.s3.bucket import AGAIN_S, SEEN_S, SOON_S
from tests.contracts.chunks import chunk
from tests.contracts.shared.s3_stand import LANES, S3Stand
from tests.contracts.shared.stands import found, write
from tests.scenario import scenario

NUMBERS = itertools.count(1)
ANSWER_S = 20.0
"""Seconds for a first answer: to make the S3 client takes one by itself on a busy machine."""
KEY = chunk(1).header.storage_key


class Hand(SystemClock):
    """A clock that is moved by hand."""

    now_s = 1e6

    def monotonic(self) -> float:
        return self.now_s


class World:
    """A tier whose bucket is not there yet."""

    def __init__(self, stand: S3Stand) -> None:
        self.stand = stand
        self.clock = Hand()
        self.bucket = f"kvstore-missing-{os.getpid()}-{next(NUMBERS)}"
        lanes = Lanes(*(WorkerThreads(count, f"s3-{name}") for name, count in LANES))
        self.tier = S3Tier(replace(stand.settings, bucket=self.bucket), lanes, self.clock)

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        self.stand.run(scenario)

    async def probe(self) -> bool:
        """Return True when a chunk is said to be there. Raises Unavailable."""
        return (await self.tier.probe([KEY], ANSWER_S))[0]

    def asked(self) -> list[str]:
        """The methods of the requests since the last time."""
        methods = [method for method, _, _ in self.stand.switches.asked]
        self.stand.switches.asked.clear()
        return methods

    @property
    def state(self) -> tuple[str, bool]:
        """The tier's state, and whether its reason names the setting and what to do."""
        said = self.tier.statistics()
        return said.state, all(word in said.reason for word in ("NoSuchBucket", "create it", "tiers.s3.bucket"))

    @contextmanager
    def made(self) -> Iterator[None]:
        """The bucket is there."""
        client = self.stand.server.client
        client.create_bucket(Bucket=self.bucket)
        try:
            yield
        finally:
            for each in client.list_objects_v2(Bucket=self.bucket).get("Contents", []):
                client.delete_object(Bucket=self.bucket, Key=each["Key"])
            client.delete_bucket(Bucket=self.bucket)


@pytest.fixture
def world(stand: S3Stand) -> World:
    return World(stand)


@scenario()
async def test_a_reader_finds_out_and_finds_it_again_without_a_request_per_miss(world: World) -> None:
    for _ in range(5):
        with pytest.raises(Unavailable, match=r"tiers\.s3\.bucket"):
            await world.probe()
    assert world.asked() == ["HEAD", "GET"], "one miss asks, the others are told"
    assert world.state == ("failing", True)
    with world.made():
        world.clock.now_s += AGAIN_S
        assert await world.probe() is False
        assert world.state == ("up", False)
        world.asked()
        for _ in range(5):
            assert await world.probe() is False
        assert world.asked() == ["HEAD"] * 5
        world.clock.now_s += SEEN_S
        assert await world.probe() is False
        assert world.asked() == ["HEAD", "GET"]
    world.clock.now_s += SEEN_S
    with pytest.raises(Unavailable):
        await world.probe()
    assert world.state == ("failing", True), "it was removed meanwhile"
    await world.tier.close()


@scenario()
async def test_a_node_without_requests_finds_it_again(world: World) -> None:
    catalog, counters = Catalog(1, SystemMemory(), 1), Counters()
    use = SharedUse(tier=world.tier, lookup_s_max=ANSWER_S, write=WritePolicy.NEVER)
    shared = SharedCopies(use, catalog, SystemClock(), counters, 0)
    counters.add_tier(shared.tier.name, is_shared=True)
    canaries = Canaries(catalog.table, [shared], SystemClock(), SystemRandom(), counters, PolicySettings())
    await canaries.ask_if_failing(shared)
    assert world.asked() == [], "nothing is asked of one that is well"
    with pytest.raises(Unavailable):
        await world.probe()
    with world.made():
        for _ in range(500):
            world.clock.now_s += AGAIN_S
            await canaries.ask_if_failing(shared)
            if shared.statistics().state == "up":
                break
            await asyncio.sleep(ANSWER_S / 500)
        assert shared.statistics().state == "up"
    await shared.close()


@scenario()
async def test_a_caller_without_time_for_the_question_has_it_asked_beside(world: World) -> None:
    with pytest.raises(DeadlineExceeded):
        await world.tier.probe([KEY], 1e-4)
    for _ in range(500):
        if world.state == ("failing", True):
            break
        await asyncio.sleep(ANSWER_S / 500)
    assert world.state == ("failing", True)
    await world.tier.close()


@scenario()
async def test_a_hit_needs_no_question_for_the_bucket(world: World) -> None:
    with world.made():
        await write(world.tier, chunk(1))
        world.clock.now_s += SEEN_S
        world.asked()
        assert await world.probe() is True
        assert world.asked() == ["HEAD"]
    await world.tier.close()


@scenario()
async def test_reads_and_writes_tell_it_too(world: World) -> None:
    with pytest.raises(Unavailable, match=r"tiers\.s3\.bucket"):
        await world.tier.open(chunk(1).name)
    assert world.state == ("failing", True)
    with world.made():
        await write(world.tier, chunk(1))
        assert world.state == ("up", False)
        assert await found(world.tier, chunk(1))
    await world.tier.close()


@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchKey"])
@scenario()
async def test_what_does_not_speak_against_the_bucket_is_a_miss(world: World, code: str) -> None:
    """Without the right to list, nothing is told of a bucket: it may be there."""
    world.stand.switches.refusals = [(404, "NoSuchKey"), (403 if code == "AccessDenied" else 404, code)]
    assert await world.probe() is False
    assert world.state == ("up", False)
    world.clock.now_s += AGAIN_S
    assert await world.probe() is False
    assert world.asked() == ["HEAD", "GET", "HEAD"]
    await world.tier.close()


@scenario()
async def test_an_endpoint_that_is_overloaded_has_told_nothing(world: World) -> None:
    for pause_s in (SOON_S, 2 * SOON_S, 4 * SOON_S):
        world.stand.switches.refusals = [(404, "NoSuchKey"), (503, "SlowDown"), (503, "SlowDown")]
        assert await world.probe() is False
        world.clock.now_s += pause_s - 0.1
        assert await world.probe() is False, "it is not asked again at once"
        assert world.asked() == ["HEAD", "GET", "GET", "HEAD"]
        assert world.state == ("up", False)
        world.clock.now_s += 0.1
    with pytest.raises(Unavailable):
        await world.probe()
    await world.tier.close()


@scenario()
async def test_another_outage_says_nothing_of_the_bucket(world: World) -> None:
    for call in (world.probe, lambda: world.tier.open(chunk(1).name)):
        world.stand.switches.refusals = [(500, "Odd")] * 8
        with pytest.raises(Unavailable, match=r"500|Odd"):
            await call()
        assert world.state == ("up", False)
    world.stand.switches.refusals = []
    await world.tier.close()
