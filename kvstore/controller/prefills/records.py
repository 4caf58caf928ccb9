"""Records of plans and their results: with these operators see how accurate plans are."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.planning.loading import LoadPlan, Prefill


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
