"""Rates of tiers in the running service: measured, shown, kept over restarts, and measured anew after damage."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest
from kvstore_client import connect
from kvstore_client.loading.call import Asked
from kvstore_client.loading.planner import TOLD_MAX, TOLD_S_MIN
from kvstore_client.lookup.match import Match
from kvstore_client.prompt import Prompt
from kvstore_ops.sidecar import Sidecar
from kvstore_ops.status import render
from rich.console import Console

from kvstore.controller.operators import Operators
from kvstore.controller.prefills import PartialPrefills
from kvstore.movement import TierMeters
from kvstore.planning.loading import Prefill
from kvstore.seams import SystemDisk
from kvstore.seams.pauses import STEP_S
from kvstore.server.kept import KeptFile
from kvstore.server.operators import AdminService
from kvstore.spec import ChunkState, Durability, Tier
from kvstore.v1alpha import admin_pb2, prefill_pb2
from kvstore.wire.plans import prefill_to_message
from tests.controller.service import Service
from tests.server.cut_short import Call
from tests.server.raw import eventually
from tests.simulated import InlineWorkers
from tests.simulated.clock import ManualClock
from tests.specs import random_cache, small_spec, tokens_of

SPEC = small_spec()


class Refusing:
    """No thread can be had."""

    def submit(self, *_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    def close(self) -> None:
        return None


async def test_a_write_that_nobody_makes_ends_nothing_and_is_owed(tmp_path: Path) -> None:
    clock = ManualClock()
    meters = TierMeters(clock)
    kept = KeptFile(tmp_path / "rates" / "default.json", SystemDisk(), meters, "rates of tiers")
    meters.began("nvme", Tier.NVME, 1 << 20)
    clock.advance(0.1)
    meters.ended("nvme", 1 << 20, has_come=True)
    (tmp_path / "rates").write_text("no directory")
    for workers, is_there in ((Refusing(), False), (InlineWorkers(), False), (InlineWorkers(), True)):
        if is_there:
            (tmp_path / "rates").unlink()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await kept.follow(clock, workers)
        assert not meters.is_changed
        assert kept.path.exists() == is_there
    kept.path.unlink()
    kept.save()
    assert not kept.path.exists(), "no news since"


def stats_of(sidecar: Sidecar) -> admin_pb2.StatsResponse:
    with connect(sidecar.address) as client:
        return client.stats()


def shown(stats: admin_pb2.StatsResponse) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(render(stats))
    return console.export_text()


def test_rates_are_measured_shown_and_kept() -> None:
    with Sidecar("--capacity", "32 MiB", nvme="64 MiB") as sidecar:
        with connect(sidecar.address) as client:
            assert client.store(SPEC, tokens_of(512), random_cache(SPEC, 512)).wait(10.0) is Durability.LOCAL
            (assumed,) = client.stats().rates
            assert (assumed.tier, assumed.kind, assumed.sample_count, assumed.confidence) == ("nvme", Tier.NVME, 0, 0)
            assert "assumed" in shown(client.stats())
        sidecar.stop()
        sidecar.start()
        with connect(sidecar.address) as client:
            assert client.fetch(SPEC, tokens_of(512)).tier is Tier.NVME
            eventually(lambda: client.stats().rates[0].sample_count >= 1)
            (measured,) = client.stats().rates
            assert measured.confidence > 0
            assert measured.bytes_per_second == float(f"{measured.bytes_per_second:.1e}"), "two digits, for tenants"
            assert f"{measured.sample_count} measured" in shown(client.stats())
            (hour,) = client.stats().models[0].served_hours
            assert (hour.saving.fetch_count, hour.saving.token_count) == (1, 512)
        sidecar.stop()
        sidecar.start()
        with connect(sidecar.address) as client:
            client.lookup(SPEC, tokens_of(512))
            (model,) = client.stats().models
            assert (model.served.token_count, list(model.served_hours)) == (0, [hour]), "hours are kept"
        (again,) = stats_of(sidecar).rates
        assert again.sample_count == measured.sample_count
        assert again.bytes_per_second == measured.bytes_per_second
        sidecar.stop()
        (path,) = sidecar.directory.rglob("rates/default.json")
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(path.read_bytes().replace(b"nvme", b"nvmf"))
        sidecar.start()
        (anew,) = stats_of(sidecar).rates
        assert (anew.tier, anew.sample_count) == ("nvme", 0)


def test_what_an_engine_measured_by_itself_is_told_and_the_next_one_plans_with_it() -> None:
    """As CachedModel and vLLM do, whose plans are their own: in batches, and beside the engine."""
    with Sidecar("--capacity", "16 MiB") as sidecar:
        with connect(sidecar.address, planning="on") as client:
            planner = client.planner
            for _ in range(100):
                planner.computed(SPEC, 256, Prefill(65, 0, 1e-4))
            assert not stats_of(sidecar).engines, "one report in a while is enough"
            planner._told_s -= TOLD_S_MIN
            planner.computed(SPEC, 256, Prefill(65, 0, 1e-4))
            eventually(lambda: len(stats_of(sidecar).engines) == 1)
            (told,) = stats_of(sidecar).engines
            assert (told.step_tokens, told.rate.sample_count) == (256, TOLD_MAX)
        with connect(sidecar.address, planning="on") as other:
            match = other.lookup(SPEC, tokens_of(64))
            chunks = tuple(each._replace(state=ChunkState.HIT, tier=Tier.DRAM) for each in match.chunks)
            other.planner.computed(SPEC, 256, Prefill(65, 0, 0.0))  # a time that no clock gives hides nothing
            plan = other.planner.plan(SPEC, Match(64, chunks), 65, 64, 256)
            assert plan.is_measured, "a new engine plans with what others measured"
            other.planner.computed(SPEC, 256, Prefill(65, 0, 1.0))
            own = other.planner.plan(SPEC, Match(64, chunks), 65, 64, 256)
            assert own.prefill.ttft_s == pytest.approx(1.0, rel=0.1), "its own measurements come first"


def test_durations_in_which_no_device_computes_are_left_out() -> None:
    with Sidecar("--capacity", "16 MiB") as sidecar, connect(sidecar.address) as client:
        client.lookup(SPEC, tokens_of(64))
        session, name = client._context.ready(SPEC)
        for seconds, count in ((1e-9, 1 << 30), (1e-4, 65)):
            told = prefill_pb2.MeasuredPrefill(new_tokens=count, seconds=seconds, passes=1)
            report = [
                admin_pb2.EnginePrefills(fingerprint=each, prefills=[told]) for each in (name, b"unknown", b"x" * 32)
            ]
            session.call(session.admin.Stats, admin_pb2.StatsRequest(computed=report), 10.0)
        (known,) = stats_of(sidecar).engines
        assert known.rate.sample_count == 1


async def test_a_long_report_of_prefills_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """To fit a rate takes a part of a millisecond, and one message may have thousands of prefills."""
    service, told = Service(), 0
    prefills = PartialPrefills(service.parts, service.controller.lookups, service.controller.tickets)
    admin = AdminService(
        service.controller, Operators(service.parts, service.controller), prefills, service.clock, 1, None
    )

    def takes_long(*_: object) -> None:
        nonlocal told
        service.clock.advance(STEP_S)
        told += 1

    monkeypatch.setattr(prefills.engines, "computed", takes_long)
    report = admin_pb2.StatsRequest()
    report.computed.add(prefills=[prefill_to_message(Prefill(100, 0, 1.0))] * 20)
    secret = service.controller.open_session().secret
    answer = asyncio.ensure_future(admin.Stats(report, cast("Any", Call(secret))))
    seen = set[int]()
    while not answer.done():
        await asyncio.sleep(0)
        seen.add(told)
    assert seen.issuperset(range(1, 21)), "others run between two of them"
    assert answer.result().server_pid == 1


def test_speeds_of_engines_are_kept() -> None:
    with Sidecar("--capacity", "16 MiB") as sidecar:
        with connect(sidecar.address, planning="on") as client:
            prompt = Prompt.of(SPEC, tokens_of(65), (), None)
            call = client.planner.begin(prompt, Asked(64, 256, (), "observe"))
            assert call is not None
            call.end(0.02, 0.0, is_given_up=False, computed=Prefill(65, 0, 1e-4))
            eventually(lambda: len(stats_of(sidecar).engines) == 1)
            (told,) = stats_of(sidecar).engines
        sidecar.stop()
        sidecar.start()
        (again,) = stats_of(sidecar).engines
        assert again == told
        sidecar.stop()
        (sidecar.directory / "models" / "default.json").unlink()
        sidecar.start()
        assert not stats_of(sidecar).engines, "nobody knows the model"
        with connect(sidecar.address) as client:
            client.lookup(SPEC, tokens_of(64))
            (again,) = stats_of(sidecar).engines
        assert again == told
        assert (again.model_id, again.step_tokens, again.rate.sample_count) == (SPEC.model_id, 256, 1)
