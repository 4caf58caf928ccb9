"""CachedModel with a planner: what it loads, that the bits stay the same, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import CachedModel
from kvstore_client.loading import patience
from kvstore_client.loading.planner import ENGINES_MAX, told_facts
from kvstore_client.lookup.match import ChunkMatch
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import ASSUMED, BusyTime, BusyTimes, Prefill, TierFacts, Way
from kvstore.seams.jobs import begun
from kvstore.spec import ChunkState, Durability, Encoding, MissReason, Tier
from kvstore.v1alpha import admin_pb2
from tests.engines.test_transformers import STEP, logits, model_of, prompt
from tests.server.raw import eventually

COUNT = STEP * 6 + 5
STORED = STEP * 6


@pytest.fixture(scope="module")
def sidecar() -> Iterator[Sidecar]:
    with Sidecar("--capacity", "64 MiB", nvme="64 MiB") as running:
        yield running


@pytest.fixture
def client(sidecar: Sidecar) -> Iterator[Client]:
    with connect(sidecar.address, planning="on") as connected:
        yield connected


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are about choices: no load is given up, however busy the machine is."""
    monkeypatch.setattr(patience, "BUDGET", 1e4)


def cached(client: Client, seed: int = 0) -> CachedModel:
    return CachedModel(model_of(torch.float32, seed), client, chunk_tokens=STEP)


def is_link(client: Client, bytes_per_s: float) -> None:
    """The client has measured so, of moves of any size."""
    client.planner._link = BusyTimes(
        tuple(BusyTime(size, size / bytes_per_s) for size in (1000, 100_000, 10_000_000) for _ in range(3))
    )


def is_engine(client: Client, model: CachedModel, token_s: float) -> None:
    for count in (100, 200, 100, 200, 100, 200, 100, 200):
        client.planner.computed(model.spec, STEP, Prefill(count, 0, count * token_s, count // 50))


def test_modes_are_three(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as plain:
        assert plain.planner.mode == "off"
    for mode in ("off", "observe", "on"):
        with connect(sidecar.address, planning=mode) as each:
            assert each.planner.mode == mode


def test_a_client_with_an_unknown_mode_is_closed(sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Client] = []
    monkeypatch.setattr(Client, "close", lambda client: closed.append(client))
    with pytest.raises(InvalidRequest, match="off, observe, on"):
        connect(sidecar.address, planning="auto")
    assert len(closed) == 1


def test_the_first_requests_teach_it_and_the_bits_stay(client: Client) -> None:
    model, ids = cached(client), prompt(COUNT, 1)
    cold, first = logits(model, ids)
    assert first.plan is not None
    assert (first.plan.chosen.way, first.reused_token_count) == (Way.PREFILL, 0)
    assert first.wait_stored(10.0) is not Durability.NONE
    plan = client.plan(model.spec, ids[0], step_tokens=STEP)
    assert plan.is_measured, "one prefill is enough to begin with"
    assert {each.way for each in plan.candidates} >= {Way.PREFILL, Way.LOAD}
    is_link(client, 1e12)
    is_engine(client, model, 1e-3)
    warm, second = logits(model, ids)
    assert second.plan is not None
    assert second.plan.chosen.way is Way.LOAD
    assert second.reused_token_count == STORED
    assert torch.equal(cold, warm)


def test_what_is_faster_computed_is_computed_and_the_bits_stay(client: Client) -> None:
    model, ids = cached(client), prompt(COUNT, 2)
    cold, first = logits(model, ids)
    first.wait_stored(10.0)
    is_link(client, 100.0)
    is_engine(client, model, 1e-6)
    again, second = logits(model, ids)
    assert second.plan is not None
    assert (second.plan.chosen.way, second.reused_token_count, second.fetched_bytes) == (Way.PREFILL, 0, 0)
    assert "would take" in second.plan.why
    assert torch.equal(cold, again)


def test_observing_says_what_it_would_do_and_loads_all_the_same(client: Client) -> None:
    model, ids = cached(client), prompt(COUNT, 3)
    _, first = logits(model, ids)
    first.wait_stored(10.0)
    is_link(client, 100.0)
    is_engine(client, model, 1e-6)
    client.planner.mode = "observe"
    _, second = logits(model, ids)
    assert second.plan is not None
    assert second.plan.chosen.way is Way.PREFILL
    assert second.reused_token_count == STORED


def test_off_makes_no_plans(client: Client) -> None:
    client.planner.mode = "off"
    model = cached(client)
    _, report = logits(model, prompt(COUNT, 4))
    assert report.plan is None
    assert client.planner._prefills, "what prefills take is learned all the same"


def test_the_first_tokens_alone_are_loaded_where_the_rest_lies_in_a_slow_tier(client: Client) -> None:
    """Half of the prompt is in memory, the other half only on a device that is said to be slow."""
    model, ids = cached(client), prompt(COUNT, 5)
    cold, first = logits(model, ids)
    assert first.wait_stored(10.0) is Durability.LOCAL
    half = STEP * 3
    real = client.peek

    def partly_cold(*arguments: object, **options: object) -> object:
        match = real(*arguments, **options)
        assert match is not None
        chunks = [each._replace(tier=Tier.NVME if each.token_start >= half else Tier.DRAM) for each in match.chunks]
        return type(match)(match.prefix_token_count, tuple(chunks), match.ticket)

    client.peek = partly_cold
    is_link(client, 1e12)
    is_engine(client, model, 1e-6)
    warm, second = logits(model, ids)
    assert second.plan is not None
    assert (second.plan.chosen.way, second.reused_token_count) == (Way.FIRST, half)
    assert torch.equal(cold, warm)


def test_a_tier_that_plans_leave_out_is_measured_on_the_side(sidecar: Sidecar) -> None:
    with connect(sidecar.address) as writer:
        model, ids = cached(writer, seed=7), prompt(COUNT, 6)
        cold, first = logits(model, ids)
        assert first.wait_stored(10.0) is Durability.LOCAL
    sidecar.stop()
    sidecar.start()
    with connect(sidecar.address, planning="on") as client:
        model = cached(client, seed=7)
        is_engine(client, model, 1e-9)  # nothing is as fast as that
        again, report = logits(model, ids)
        while report.plan is None:  # the question took longer than such a fast engine waits
            assert report.reason is MissReason.UNAVAILABLE
            again, report = logits(model, ids)
        assert report.plan.chosen.way is Way.PREFILL
        assert torch.equal(cold, again)
        eventually(lambda: client.stats().rates[0].sample_count > 0)
        held = client.lookup(model.spec, ids[0])
        assert [chunk.tier for chunk in held.chunks[:3]] == [Tier.DRAM, Tier.NVME, Tier.NVME], "one chunk, no more"
        client.planner._probed_s[Tier.NVME] = client.planner.clock.monotonic() + 3600.0  # just now
        assert client.planner.probe(model.spec, held.chunks[1:], 0) is None, "the next one has time"


def test_several_chunks_are_read_where_reads_of_one_size_tell_no_latency(client: Client) -> None:
    spec = cached(client).spec
    chunks = [
        ChunkMatch(start, start + STEP, ChunkState.HIT, tier, Encoding.RAW, MissReason.NONE)
        for start, tier in zip(range(0, 9 * STEP, STEP), [Tier.NVME] * 6 + [Tier.S3] * 3, strict=True)
    ]
    times = BusyTimes()
    for read_count, nvme, s3 in ((0, 1, 7), (1, 1, 7), (3, 4, 9)):
        while len(times.times) < read_count:
            times = times.observed(BusyTime(1 << 20, 0.05))
        rates = {tier: TierFacts(times.rate or ASSUMED[tier]) for tier in (Tier.NVME, Tier.S3)}
        client.planner._tiers = rates
        for loaded, expected in ((0, nvme), (6 * STEP, s3)):
            client.planner._probed_s.clear()
            due = client.planner.probe(spec, chunks, loaded)
            assert due is not None
            assert due.token_stop == expected * STEP


def test_a_way_from_memory_that_was_slow_for_a_while_is_found_to_be_fast_again(client: Client) -> None:
    """Nothing is loaded any more, and nothing would be measured: a chunk is, on the side."""
    model, ids = cached(client, seed=8), prompt(COUNT, 9)
    cold, first = logits(model, ids)
    first.wait_stored(10.0)
    for size in (1 << 20, 1 << 20):
        client.planner._link = BusyTimes((*client.planner._link.times, BusyTime(size, 60.0)))
    is_engine(client, model, 1e-3)
    chosen = []
    for _ in range(8):
        again, report = logits(model, ids)
        assert torch.equal(cold, again)
        assert report.plan is not None
        chosen.append(report.plan.chosen.way)
        begun(model._background, lambda: None).result(10.0)  # what went before it, the probe, has ended
        client.planner._probed_s.clear()  # as if an hour had passed
        is_engine(client, model, 1e-3)
    assert chosen[0] is Way.PREFILL
    assert Way.LOAD in chosen


def test_specs_that_come_and_go_leave_no_heap_behind(client: Client) -> None:
    """A model in training has other weights at each call."""
    spec = cached(client).spec
    for number in range(200):
        other = replace(spec, weights_digest=f"{number:064x}")
        client.planner.computed(other, STEP, Prefill(100, 0, 0.1))
    assert len(client.planner._prefills) == ENGINES_MAX
    assert (other, STEP) in client.planner._prefills


def test_what_a_sidecar_tells_of_its_tiers_may_be_absurd() -> None:
    told = {"kind": int(Tier.NVME), "bytes_per_second": 1e8, "latency_seconds": 0.01, "caution": 1.5}
    (sound,) = told_facts([admin_pb2.TierRate(**told)]).values()
    assert (sound.rate.byte_s, sound.rate.latency_s, sound.rate.caution) == (1e-8, 0.01, 1.5)
    for name in ("bytes_per_second", "latency_seconds", "caution"):
        for value in (math.nan, math.inf, -math.inf, -1.0, 1e300, *((0.0,) if name != "latency_seconds" else ())):
            assert not told_facts([admin_pb2.TierRate(**{**told, name: value})]), (name, value)
    slow = {**told, "bytes_per_second": 1e6}
    for rates in ([told, slow], [slow, told]):
        assert told_facts([admin_pb2.TierRate(**each) for each in rates])[Tier.NVME].rate.byte_s == 1e-6
    later = admin_pb2.TierRate(**{**told, "kind": 77})
    assert list(told_facts([later])) == [Tier.NONE], "a tier that only a later release knows"


def test_absurd_durations_teach_nothing(client: Client) -> None:
    model = cached(client)
    is_engine(client, model, 1e-3)
    before = client.plan(model.spec, prompt(COUNT, 8)[0], step_tokens=STEP).prefill.ttft_s
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e30):
        client.planner.computed(model.spec, STEP, Prefill(100, 0, seconds))
        client.planner.landed(BusyTime(1 << 20, seconds))
    assert client.plan(model.spec, prompt(COUNT, 8)[0], step_tokens=STEP).prefill.ttft_s == before
