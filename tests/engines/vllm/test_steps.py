"""The steps from which the vLLM connector learns, without vLLM: each has its own results, whatever is in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_ops.sidecar import Sidecar

from tests.engines.vllm.engine import SPEC, blocks_of, scheduled
from tests.engines.vllm.test_planned import STEP, Planned

NOTHING = SimpleNamespace(
    scheduled_new_reqs=[], num_scheduled_tokens={},
    scheduled_cached_reqs=SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()),
)  # fmt: skip


def report(number: int, *received: str) -> Any:
    """Return the workers' report of the step of that number."""
    return SimpleNamespace(
        finished_recving=set(received) or None, invalid_block_ids=set(),
        kv_connector_worker_meta=SimpleNamespace(number=number),
    )  # fmt: skip


def test_the_results_of_a_step_that_computed_nothing_are_not_those_of_the_step_behind_it(sidecar: Sidecar) -> None:
    """While nothing but a load is on its way vLLM schedules steps without tokens, and the next step before it has
    their results: a prefill would seem to take no time."""
    engine = Planned(sidecar.address, "on")
    empty = engine.scheduler.step(NOTHING)
    prefill = engine.scheduler.step(scheduled("a", blocks_of(64), 0, 64))
    engine.scheduler.received(report(empty.number, "loaded"))
    behind = engine.scheduler.step(scheduled("a", blocks_of(64), 64, 64, is_new=False))
    engine.clock.advance(0.5)
    engine.scheduler.received(report(prefill.number))
    engine.clock.advance(0.25)
    engine.scheduler.received(report(behind.number))
    found: Any = [(each.context_tokens, each.seconds) for each in engine.planner._prefills[(SPEC, STEP)].prefills]
    assert found == [(0, pytest.approx(0.5)), (64, pytest.approx(0.25))]
    engine.close()


def test_a_step_whose_results_never_came_delays_no_other(sidecar: Sidecar) -> None:
    engine = Planned(sidecar.address, "on")
    engine.scheduler.step(scheduled("a", blocks_of(64), 0, 64))
    later = engine.scheduler.step(scheduled("b", blocks_of(32), 0, 32))
    engine.clock.advance(0.5)
    engine.scheduler.received(report(later.number))
    engine.scheduler.received(report(later.number + 1))
    assert [each.new_tokens for each in engine.planner._prefills[(SPEC, STEP)].prefills] == [32]
    engine.close()


def test_without_plans_no_step_has_a_number(sidecar: Sidecar) -> None:
    engine = Planned(sidecar.address, "off")
    assert engine.scheduler.step(NOTHING).number == 0
    engine.close()
