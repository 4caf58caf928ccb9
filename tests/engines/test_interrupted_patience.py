"""An interrupt that comes while a thread is started: what the thread brings is given back, and the thread ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.loading import patience
from kvstore_client.loading.patience import Patience, result_in_time

from kvstore.planning.loading import ComputeRate, HeldRun, LoadFacts, Stock, TierRate, plan_loading
from kvstore.seams import SystemClock
from kvstore.spec import Tier


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that begin; an interrupt comes as soon as one has."""
    threads: list[threading.Thread] = []
    start = patience.start_thread

    def interrupted(run: Callable[[], None], name: str) -> None:
        threads.append(start(run, name))
        raise KeyboardInterrupt

    monkeypatch.setattr(patience, "start_thread", interrupted)
    return threads


def test_the_answer_to_a_question_is_undone(begun: list[threading.Thread]) -> None:
    undone = SimpleQueue[str]()
    with pytest.raises(KeyboardInterrupt):
        result_in_time(lambda: "answer", 10.0, undone.put)
    assert undone.get(timeout=10.0) == "answer"
    assert len(begun) == 1


def test_patience_ends(begun: list[threading.Thread]) -> None:
    """Else its thread asks for ever whether somebody waits for the load."""
    facts = LoadFacts(
        1000, 999, ComputeRate(token_s=1e-5, sample_count=9, caution=1.0), TierRate(0.0, 1e-12, 1.0),
        (Stock((HeldRun(999, Tier.DRAM, 1.0),)),),
    )  # fmt: skip
    plan, given_up = plan_loading(facts), list[None]()
    assert plan.loaded_tokens
    client: Any = SimpleNamespace(planner=SimpleNamespace(mode="on", clock=SystemClock()))
    with pytest.raises(KeyboardInterrupt), Patience(client, plan, 0.0, lambda: False, lambda: given_up.append(None)):
        pass
    begun[0].join(10.0)
    assert not begun[0].is_alive()
    assert not given_up
