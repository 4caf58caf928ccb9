"""The last plans, and their results: with these operators see how accurate plans are."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.planning.loading import LoadPlan, Prefill
from kvstore.planning.loading.outcome import PLANS_KEPT


class PlanState(StrEnum):
    """The state of a partial prefill."""

    ON_ITS_WAY = "on its way"
    DONE = "done"
    GIVEN_UP = "given up"
    """The load took too long or was lost, and the engine computed those tokens."""
    PLANNED = "planned"
    """An engine planned it by itself, and told nothing of its end."""
    GONE = "gone"
    """The client dropped it, or died, without reporting measurements."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """A client's measurements. ``ttft_s``: seconds from the request to the first token. ``wait_s``: seconds of these in
    which it waited for bytes and computed nothing. ``computed``: the prefill that it computed; None: it tells none."""

    ttft_s: float
    wait_s: float
    is_given_up: bool = False
    computed: Prefill | None = None


@dataclass(eq=False, slots=True)
class PlanRecord:
    """One partial prefill. ``began``: seconds since 1970. ``plan`` None: the client asked for none."""

    number: int
    began: float
    fingerprint: bytes
    model_id: str
    step_tokens: int
    mode: str
    plan: LoadPlan | None
    stored_token_count: int
    state: PlanState = PlanState.ON_ITS_WAY
    end: PrefillEnd | None = None


class Records:
    """The last ``PLANS_KEPT`` records."""

    def __init__(self) -> None:
        self._kept: deque[PlanRecord] = deque(maxlen=PLANS_KEPT)
        self._count = 0

    def number(self) -> int:
        """Return the number for the next record, from 1 on."""
        self._count += 1
        return self._count

    def keep(self, record: PlanRecord) -> None:
        """Keep a record. Past ``PLANS_KEPT`` it replaces the oldest."""
        self._kept.append(record)

    def last(self, count: int) -> Sequence[PlanRecord]:
        """Return the last ``count`` records, the newest first; 0: all that are kept."""
        found = list(self._kept)[::-1]
        return found[:count] if count else found
