"""Patience: gives up a load that takes much longer than planned, so that the prompt is computed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from kvstore.errors import KVStoreError
from kvstore.planning.loading import LoadPlan, Operations
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec
from kvstore_client.caches import Caches
from kvstore_client.streams import within_streams
from kvstore_client.tracing import within_trace

BUDGET = 0.05
"""The share of a plain prefill's time by which a load may take longer than that prefill."""
LOOK_S_MIN = 0.005
LEFT_S_MIN, LEFT_S_MAX = 0.05, 3600.0
"""Bounds of the time after which a load is given up: a busy scheduler may take as long as the first."""
SLOW_OPERATIONS_S = {"cpu": 2e10, "cuda": 2e13}
"""Multiplications and additions per second of an engine that is slow for its kind of device."""
Result = TypeVar("Result")
_log = logging.getLogger("kvstore.client")


def prior_s(spec: ModelSpec, token_count: int, device_type: str) -> float:
    """Return the seconds that a prefill by a slow engine takes, for engines that have measured none. A faster engine
    then waits longer than it would have to, but not for a call's deadline."""
    operations = Operations.of(spec)
    speed = SLOW_OPERATIONS_S.get(device_type, SLOW_OPERATIONS_S["cuda"])
    return token_count * (operations.token + operations.pair * token_count / 2) / speed


def with_budget(prefill_s: float) -> float:
    """Return the seconds after which a prompt is computed that takes ``prefill_s``: they were spent in vain then."""
    return (1 + BUDGET) * prefill_s


def result_in_time(action: Callable[[], Result], left_s: float, undo: Callable[[Result], object]) -> Result | None:
    """Return the result of ``action``, which runs on a thread of its own, or raise its error. None after ``left_s``
    seconds: then ``undo`` gets a result that comes later. For calls to a sidecar that may have stalled."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(action())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            outcome.set_exception(error)

    is_there = False
    try:
        try:
            start_thread(within_trace(within_streams(run)), "kvstore-in-time")
        except KVStoreError:
            return action()
        is_there = bool(wait([outcome], min(max(left_s, LEFT_S_MIN), LEFT_S_MAX)).done)
        return outcome.result() if is_there else None
    finally:
        if not is_there:  # also after an interrupt: nobody else gives back what comes
            outcome.add_done_callback(partial(_undone, undo))


def _undone(undo: Callable[[Result], object], outcome: Future[Result]) -> None:
    if outcome.exception() is None:
        undo(outcome.result())


def patience_s(plan: LoadPlan) -> float:
    """Return how many seconds a load may take: as long as in nine of ten cases, or as a plain prefill where that is
    sooner, and a part of a prefill more. So a load that stalls costs little beside the prefill after it. A load whose
    front is computed beside it may only be late by that part: giving it up loses no more than the tokens it was to
    bring."""
    chosen, prefill_s = plan.chosen, plan.prefill.ttft_s
    late_s = max(chosen.front_s, chosen.load_s) + chosen.ttft_high_s - chosen.ttft_s
    return (late_s if chosen.front_s else min(prefill_s, chosen.ttft_high_s)) + BUDGET * prefill_s


class Patience:
    """Ends a load that has not landed in time (``patience_s``): the waiting caller then computes the prompt. So a tier
    that stops in the middle of a plan costs what the load was expected to take, and a twentieth of a prefill, not the
    deadline of a call. ``with`` it around the load; ``end`` it once all has landed. Cost: a thread per load."""

    def __init__(
        self, client: Caches, plan: LoadPlan | None, since_s: float, is_waiting: Callable[[], bool],
        give_up: Callable[[], None], unmeasured_s: float = 0.0,
    ) -> None:  # fmt: skip
        """``since_s``: when the request began, on the client's clock. ``is_waiting``: returns True while a caller waits
        for the load; a load that nobody waits for yet is not given up. ``unmeasured_s``: what a prefill may take where
        none was measured, or the load has no plan; 0: then a load is waited for. Gives nothing up where plans are not
        carried out, or load no tokens."""
        self._client, self._is_waiting, self._give_up = client, is_waiting, give_up
        self._has_ended = threading.Event()
        self._deciding = threading.Lock()
        self._has_thread = self.is_spent = False
        is_measured = plan is not None and plan.is_measured
        loads_nothing = plan is not None and not plan.loaded_tokens
        if client.planner.mode != "on" or loads_nothing or not (is_measured or unmeasured_s):
            return
        self._prefill_s = plan.prefill.ttft_s if plan is not None and is_measured else unmeasured_s
        self._patience_s = patience_s(plan) if plan is not None and is_measured else with_budget(unmeasured_s)
        self._left_s = since_s + self._patience_s - client.planner.clock.monotonic()
        self._has_thread = True

    def _wait(self) -> None:
        left_s = min(max(self._left_s, LEFT_S_MIN), LEFT_S_MAX)
        while not self._has_ended.wait(left_s):
            left_s = min(max(BUDGET * self._prefill_s, LOOK_S_MIN), LEFT_S_MAX)
            with self._deciding:
                if self._has_ended.is_set():  # the load landed just now
                    return
                self.is_spent = self._is_waiting()
            if self.is_spent:
                self._client.planner.given_up()
                _log.warning("kvstore: a load has not landed in %.3f s: given up", self._patience_s)
                self._give_up()
                return

    def end(self) -> None:
        """Give nothing up from now on: all has landed, or the caller is gone. Idempotent."""
        with self._deciding:
            self._has_ended.set()

    def __enter__(self) -> Self:
        try:
            if self._has_thread:
                start_thread(self._wait, "kvstore-patience")
        except KVStoreError as error:
            _log.warning("kvstore: a load is waited for until its call ends: %s", error.message)
        except BaseException:  # an interrupt: the thread may run, and nobody else would end it
            self.end()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end()
