"""The vLLM connector's plans, without vLLM: what is loaded, what is computed, and what steps and loads teach."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm.hashes import block_hashes
from kvstore_client.engines.vllm.identity import Adapters
from kvstore_client.engines.vllm.planning import Decision, behind
from kvstore_client.engines.vllm.scheduler import SchedulerSide
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_ops.sidecar import Sidecar

from kvstore.errors import InvalidRequest
from kvstore.planning.loading import (
    BusyTime,
    BusyTimes,
    ComputeRate,
    HeldRun,
    LoadFacts,
    Prefill,
    Stock,
    TierRate,
    Way,
    plan_loading,
)  # fmt: skip
from kvstore.planning.loading.outcome import PlanOutcome
from kvstore.spec import Tier
from tests.engines.vllm.engine import BLOCK, SPEC, Engine, blocks_of, matched, request, scheduled
from tests.server.raw import eventually
from tests.simulated import ManualClock
from tests.specs import tokens_of

COUNT, STEP = 90, 64  # five chunks of 16, and two blocks and a half
SEEDS = itertools.count(900)  # each test's own: the sidecar still has the prompts of the tests before


class Planned(Engine):
    """An engine whose scheduler plans, by a clock that stands."""

    def __init__(self, address: str, mode: str, load: str = "async", **options: Any) -> None:
        super().__init__(address, load=load, **options)
        self.clock = ManualClock()
        self.scheduler.close()
        from kvstore_client import connect

        self.clients[0] = connect(address, planning=mode)
        settings = ConnectorSettings(chunk_tokens=16, planning=mode, load=load, **options)
        self.scheduler = SchedulerSide(
            self.clients[0], Adapters(SPEC), settings, BLOCK, step_tokens=STEP, clock=self.clock
        )
        self.planner = self.clients[0].planner

    def is_link(self, bytes_per_s: float) -> None:
        """Measured so, of moves of any size."""
        sizes = (100, 1000, 10_000, 100_000) * 3
        self.planner._link = BusyTimes(tuple(BusyTime(size, size / bytes_per_s) for size in sizes))

    def is_computing(self, tokens_per_s: float) -> None:
        for count in (16, 64) * 6:
            self.planner.computed(SPEC, STEP, Prefill(count, 0, count / tokens_per_s))

    def decision(self, name: str) -> Decision:
        found = self.scheduler._lookups._found[name].decision
        assert found is not None
        return found


@pytest.fixture
def stored(sidecar: Sidecar) -> Iterator[tuple[Any, Any]]:
    """A prompt that another engine has kept."""
    engine, tokens = Engine(sidecar.address), tokens_of(COUNT, next(SEEDS))
    yield tokens, engine.keep(asked("kept", tokens), blocks_of(COUNT))
    engine.close()


asked = request


def told(*received: str, failed: Any = ()) -> SimpleNamespace:
    """What the workers say after a step."""
    return SimpleNamespace(finished_recving=set(received) or None, invalid_block_ids=set(failed))


def test_what_is_faster_computed_is_computed_and_nothing_is_held(sidecar: Sidecar, stored: Any) -> None:
    engine = Planned(sidecar.address, "on")
    engine.is_link(100.0)
    engine.is_computing(1e6)
    assert engine.admit(asked("a", stored[0]), blocks_of(COUNT)) == 0
    assert engine.scheduler._planner.counts == {Way.PREFILL: 1}
    assert not engine.scheduler._loads
    step = engine.compute(asked("a", stored[0]), blocks_of(COUNT), 0, COUNT)
    assert not step.saves, "what is stored is not kept once more"
    eventually(lambda: engine.clients[0].stats().sessions.ticket_count == 0)
    assert not engine.planner.may_look(), "what was left out has just been looked at"
    engine.close()


def test_what_is_faster_loaded_is_loaded_whole(sidecar: Sidecar, stored: Any) -> None:
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e12)
    engine.is_computing(10.0)
    assert engine.admit(asked("a", stored[0]), blocks_of(COUNT)) == 88
    # The two tokens behind the load take 0.2 s, and a prefill 9 s: a load that stalls does not cost another 9 s.
    assert 0.2 < engine.scheduler._loads[0].give_up_s < 3.0
    engine.close()


def test_the_first_tokens_are_loaded_where_the_rest_lies_too_deep(sidecar: Sidecar, stored: Any) -> None:
    """The rest is in a tier that is slower than computing. Only what is loaded is held and fetched."""
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e12)
    engine.is_computing(1e3)
    lookup = engine.clients[0].lookup

    def deep(*given: Any, **how: Any) -> Any:
        match = lookup(*given, **how)
        chunks = tuple(each._replace(tier=Tier.S3) if each.token_start >= 32 else each for each in match.chunks)
        return SimpleNamespace(**{**vars(match), "chunks": chunks, "tier": None})

    engine.clients[0].lookup = deep  # type: ignore[method-assign]  # replaced
    engine.planner._tiers = {}
    engine.planner._asked_s = engine.planner.clock.monotonic() + 1e6  # the sidecar has no such tier: 50 MB/s and 50 ms
    mine, blocks = asked("a", stored[0]), blocks_of(COUNT, 30)
    assert engine.admit(mine, blocks) == 32
    assert engine.scheduler._planner.counts == {Way.FIRST: 1}
    assert engine.scheduler._loads[0].token_count == 32, "the ticket holds no more"
    engine.worker.begin(engine.scheduler.step(scheduled("x", [], 0, 0)))
    assert engine.landed() == {"a"}
    for ours, theirs in zip(engine.content(blocks[:8]), stored[1], strict=True):
        assert (ours == theirs[:8]).all()
    assert all(not page[blocks[8:]].any() for page in engine.pages)
    engine.close()


def test_what_vllm_has_is_neither_loaded_nor_computed(sidecar: Sidecar, stored: Any) -> None:
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e12)
    engine.is_computing(1e3)
    assert matched(engine.scheduler, asked("a", stored[0]), 40) == (48, True)
    found = engine.decision("a")
    assert (found.computed, found.facts.token_count, found.plan.chosen.loaded_tokens) == (40, 50, 48)
    assert found.bytes_in_memory(88) == 48 * 128
    engine.close()


def test_observing_says_what_it_would_do_and_loads_all_the_same(
    sidecar: Sidecar, stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Planned(sidecar.address, "observe")
    engine.is_link(100.0)
    engine.is_computing(1e6)
    with caplog.at_level(logging.INFO, "kvstore.vllm"):
        assert engine.admit(asked("a", stored[0]), blocks_of(COUNT)) == 88
    assert "0 of 88 stored tokens would be loaded: prefill" in caplog.text
    assert engine.scheduler._planner.counts == {Way.PREFILL: 1}
    assert engine.scheduler._loads[0].give_up_s == 0.0, "no load is given up"
    engine.close()


def test_off_plans_nothing(sidecar: Sidecar, stored: Any) -> None:
    engine = Planned(sidecar.address, "off")
    engine.is_link(100.0)
    engine.is_computing(1e6)
    assert engine.admit(asked("a", stored[0]), blocks_of(COUNT)) == 88
    engine.compute(asked("b", stored[0]), blocks_of(COUNT), 0, COUNT)
    engine.scheduler.received(told())
    assert not engine.scheduler._planner.counts
    engine.close()


def test_it_decides_once_and_the_engine_waits_for_no_decision(sidecar: Sidecar, stored: Any) -> None:
    """While vLLM has no room for a request it asks at every step."""
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e12)
    engine.is_computing(1e3)
    assert matched(engine.scheduler, asked("a", stored[0]), 0) == (88, True)
    decision = engine.decision("a")
    engine.is_link(100.0)
    for _ in range(50):
        assert engine.scheduler.matched(asked("a", stored[0]), 0) == (88, True)
    assert engine.decision("a") is decision
    assert engine.scheduler._planner.counts == {Way.LOAD: 1}
    engine.close()


def test_steps_teach_what_computing_takes(sidecar: Sidecar) -> None:
    engine = Planned(sidecar.address, "observe")
    clock = engine.clock
    for number in range(6):
        count = 16 * (1 + number % 4)
        engine.scheduler.step(scheduled(f"a{number}", blocks_of(count), 0, count))
        clock.advance(count / 500)
        engine.scheduler.received(told())
        clock.advance(5.0)  # the engine stands idle
    found = engine.planner._prefills[(SPEC, STEP)].rate
    assert found.seconds(64) == pytest.approx(64 / 500, rel=0.02)
    assert len(engine.planner._prefills[(SPEC, STEP)].prefills) == 6
    engine.scheduler.step(scheduled("a", [], 90, 1, is_new=False))
    clock.advance(1.0)
    engine.scheduler.received(told())
    assert len(engine.planner._prefills[(SPEC, STEP)].prefills) == 6, "a step that only decodes is no prefill"
    engine.close()


def test_a_step_that_was_scheduled_ahead_begins_when_the_one_before_it_ends(sidecar: Sidecar) -> None:
    engine = Planned(sidecar.address, "observe")
    engine.scheduler.step(scheduled("a", blocks_of(64), 0, 64))
    engine.clock.advance(0.01)
    engine.scheduler.step(scheduled("a", blocks_of(64), 64, 64, is_new=False))
    for _ in range(2):
        engine.clock.advance(0.64)
        engine.scheduler.received(told())
    first, second = engine.planner._prefills[(SPEC, STEP)].prefills
    assert (first.context_tokens, second.context_tokens) == (0, 64)
    assert first.seconds == pytest.approx(0.65)
    assert second.seconds == pytest.approx(0.64)
    engine.close()


def test_loads_teach_what_they_take_and_a_failed_one_that_it_took_longer(sidecar: Sidecar, stored: Any) -> None:
    """The scheduler hears of a load's end with a step's results: it lies between two of them."""
    engine = Planned(sidecar.address, "on")
    engine.is_computing(1e3)
    token_bytes = 2 * 2 * 2 * 8 * 2
    blocks = blocks_of(COUNT)
    for name, failed in (("a", ()), ("b", blocks[:2])):
        engine.is_link(1e12)
        assert engine.admit(asked(name, stored[0]), blocks) == 88
        step = engine.scheduler.step(scheduled("x", [], 0, 0))
        assert [load.stop for load in step.loads] == [88]
        for _ in range(3):
            engine.clock.advance(2.0)
            engine.scheduler.step(scheduled("x", [], 0, 0))
        engine.scheduler.received(told(name, failed=failed))
        took_s = 2.0 if failed else 4.0  # still on its way after 2 s, and here after 6 s
        assert engine.planner._link.times[-1] == BusyTime(88 * token_bytes, took_s, is_cut=bool(failed)), name
        engine.scheduler.finished(name)
        engine.scheduler._planner._took_s.clear()  # as if steps took no time
    assert engine.scheduler._planner.counts["failed"] == 1
    engine.close()


@pytest.mark.parametrize("has_failed", [True, False], ids=["a rank could not load it", "the caches were reset"])
def test_a_load_that_failed_on_one_rank_alone_has_failed(sidecar: Sidecar, stored: Any, has_failed: bool) -> None:
    engine, blocks = Planned(sidecar.address, "on"), blocks_of(COUNT)
    engine.is_computing(1e3)
    engine.is_link(1e12)
    assert engine.admit(asked("a", stored[0]), blocks) == 88
    engine.scheduler.received(told(failed=blocks[:2])) if has_failed else engine.scheduler.reset()
    engine.scheduler.received(told("a"))  # a rank says that a load failed in the step in which it knows
    assert engine.scheduler._planner.counts["failed"] == has_failed
    engine.close()


def test_a_small_load_that_waits_for_a_long_step_does_not_make_memory_slow(sidecar: Sidecar, stored: Any) -> None:
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e9)
    engine.is_computing(1e3)
    before = engine.planner._link
    assert engine.admit(asked("a", stored[0]), blocks_of(COUNT)) == 88
    engine.scheduler.step(scheduled("x", blocks_of(64), 0, 64))
    engine.clock.advance(0.5)
    engine.scheduler.received(told("a"))
    assert engine.planner._link is before, "half a second is the step's, not the load's"
    engine.scheduler.step(scheduled("x", blocks_of(64), 0, 64))
    decision = engine.scheduler._planner.decide(engine.clients[0].lookup(SPEC, stored[0]), COUNT, 0, 0)
    load = next(each for each in decision.plan.candidates if each.way is Way.LOAD)
    assert load.ttft_s > 0.25, "but the request waits for it"
    engine.close()


def by_hashes(name: str, tokens: Any) -> Any:
    made = asked(name, tokens)
    made.block_hashes = block_hashes(made.all_token_ids, BLOCK)
    return made


@pytest.mark.parametrize(("digests", "load"), [("vllm", "async"), ("kvstore", "layerwise")])
def test_a_link_that_was_never_measured_is_measured_whatever_names_the_prompt(
    sidecar: Sidecar, digests: str, load: str
) -> None:
    """The assumed rate says nothing of this machine: an engine that computes faster would never load again."""
    tokens = tokens_of(COUNT, 77)
    make = by_hashes if digests == "vllm" else asked
    keeper = Planned(sidecar.address, "off", digests=digests)
    keeper.keep(make("kept", tokens), blocks_of(COUNT))
    keeper.close()
    engine = Planned(sidecar.address, "on", load, digests=digests)
    engine.is_computing(1e9)
    assert matched(engine.scheduler, make("a", tokens), 0)[0] == 0
    assert engine.scheduler._planner.counts == {Way.PREFILL: 1}
    eventually(lambda: engine.planner.is_link_measured)
    engine.close()


def test_a_load_that_takes_longer_than_computing_is_given_up(sidecar: Sidecar, stored: Any) -> None:
    """Its blocks are failed, so that vLLM computes them."""
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e12)
    engine.is_computing(1e3)
    mine, blocks = asked("a", stored[0]), blocks_of(COUNT)
    assert engine.admit(mine, blocks) == 88
    step = engine.scheduler.step(scheduled("x", [], 0, 0))
    clock = ManualClock()
    engine.worker._clock = clock
    stopped: list[bool] = []

    class Stuck:
        is_done = failed = False
        error = None

        def cancel(self, _timeout_s: float) -> bool:
            stopped.append(True)
            return False

    engine.worker.begin(step)
    engine.worker._moving["a"].transfers[0].wait(10.0)
    stuck: Any = Stuck()
    engine.worker._moving["a"].transfers = [stuck]
    clock.advance(0.99 * step.loads[0].give_up_s)
    assert engine.worker.landed() == set()
    assert not stopped
    clock.advance(0.02 * step.loads[0].give_up_s)
    assert engine.worker.landed() == set()
    assert stopped
    stuck.is_done = stuck.failed = True
    stuck.error = InvalidRequest("given up")
    assert engine.worker.landed() == {"a"}
    assert engine.worker.failed_blocks() == set(blocks[:22])
    engine.close()


def test_once_in_a_while_it_says_what_came_of_it(
    sidecar: Sidecar, stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Planned(sidecar.address, "observe")
    engine.is_link(1e4)  # 1.02 s for the chunks
    engine.is_computing(1e6)
    for name in ("a", "b"):
        assert matched(engine.scheduler, asked(name, stored[0]), 0) == (88, True)
        engine.clock.advance(61.0)
    assert "planning is observe: prefill 2; by what was measured, first tokens come 2.0" in caplog.text
    assert caplog.text.count("planning is") == 1
    engine.close()


def test_the_sidecar_hears_of_its_plans_and_of_what_came_of_them(sidecar: Sidecar, stored: Any) -> None:
    """Behind others the time to the first token is the queue's, and a load that failed brings no time."""
    engine = Planned(sidecar.address, "on")
    engine.is_link(1e9)
    engine.is_computing(100.0)
    told: list[PlanOutcome] = []
    engine.planner.planned = lambda _spec, _step, outcome: told.append(outcome)  # type: ignore[method-assign]  # replaced
    for name in ("a", "b", "c"):
        request_of, blocks = asked(name, stored[0]), blocks_of(COUNT)
        if name == "b":
            engine.scheduler._lookups.waiting.add("another")
        count, _ = matched(engine.scheduler, request_of, 0)
        engine.scheduler._lookups.waiting.discard("another")
        engine.scheduler.allocated(request_of, (blocks,), count)
        engine.clock.advance(0.25)
        if name == "c":
            engine.scheduler.received(SimpleNamespace(invalid_block_ids=blocks, finished_recving=[name]))
            continue
        engine.scheduler.step(scheduled(name, blocks, count, 1))
        engine.clock.advance(0.25)
        engine.scheduler.received(SimpleNamespace(invalid_block_ids=None, finished_recving=None))
        assert len(told) == "ab".index(name), "its last token was not computed"
        engine.scheduler.step(scheduled(name, [], count + 1, COUNT - count - 1, is_new=False))
        engine.scheduler.received(SimpleNamespace(invalid_block_ids=None, finished_recving=None))
    assert [(each.plan.chosen.way, each.stored_tokens, each.ttft_s, each.is_given_up) for each in told] == [
        (Way.LOAD, 88, 0.5, False), (Way.LOAD, 88, None, False), (Way.LOAD, 88, None, True)
    ]  # fmt: skip
    engine.scheduler.finished("a")
    assert len(told) == 3, "each is told once"
    engine.close()


def test_what_lies_behind_costs_what_it_costs_there() -> None:
    rate = ComputeRate(0.5, 0.01, 1e-5, sample_count=1)
    stock = Stock((HeldRun(100, Tier.DRAM, 8.0), HeldRun(60, Tier.NVME, 8.0)))
    facts = LoadFacts(200, 199, rate, TierRate(0.0, 1e-9, 1.0), (stock,))
    later = behind(facts, 120)
    assert later.stocks[0].runs == (HeldRun(40, Tier.NVME, 8.0),)
    assert (later.token_count, later.reusable_tokens) == (80, 79)
    assert later.compute.seconds(80) == pytest.approx(rate.seconds(80, 120))
    assert later.compute.seconds(30, 50) == pytest.approx(rate.seconds(30, 170))
    assert behind(facts, 160).stocks == ()
    assert plan_loading(behind(facts, 160)).chosen.way is Way.PREFILL


def test_another_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="planning 'auto' must be one of off, observe, on"):
        ConnectorSettings(planning="auto")
