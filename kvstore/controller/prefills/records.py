"""The last plans, and what became of them: for operators, who want to see how well plans were right."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvstore.planning.loading import LoadPlan, Prefill

PLANS_KEPT = 256
MODES = ("off", "observe", "on")
"""How a client takes plans: not at all, to look at them, or to follow them."""


class PlanState(StrEnum):
    """The state of a partial prefill."""

    ON_ITS_WAY = "on its way"
    DONE = "done"
    GIVEN_UP = "given up"
    """Its load took too long, or was lost, and was computed."""
    GONE = "gone"
    """Its client ended it, or died, before it had told anything."""


@dataclass(frozen=True, slots=True)
class PrefillEnd:
    """A client's measurements: seconds from the request to the first token; of these, those in which it waited for
    bytes and computed nothing; and the prefill that it computed, where that says something."""

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
    """The last ``PLANS_KEPT``."""

    def __init__(self) -> None:
        self._kept: deque[PlanRecord] = deque(maxlen=PLANS_KEPT)
        self._count = 0

    def number(self) -> int:
        """The number of the next one, from 1 on."""
        self._count += 1
        return self._count

    def keep(self, record: PlanRecord) -> None:
        """Keep one, instead of the oldest where there are too many."""
        self._kept.append(record)

    def last(self, count: int) -> Sequence[PlanRecord]:
        """The newest, as many as ``count``, the newest first; 0: all that are kept."""
        found = list(self._kept)[::-1]
        return found[:count] if count else found
