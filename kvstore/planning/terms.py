"""Terms: the conditions that a caller sets for one answer. Plans keep them; nothing that is measured changes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from kvstore.errors import InvalidRequest

DEADLINE_MS_MAX = 1e15
"""No deadline lies so far away: 30,000 years."""


class RequestClass(StrEnum):
    """The kind of a request."""

    INTERACTIVE = "interactive"
    """Somebody waits for the first token: a plan takes the way that is there first."""
    BATCH = "batch"
    """Nobody waits: a second of the engine's counts like a second of waiting, so that a plan leaves the engine to
    others where a load does."""


@dataclass(frozen=True)
class Terms:
    """``quality``: the least share of full prefill's quality that an answer may have; None: the client's gate's floor
    where documents or siblings are reused. ``deadline_s``: seconds from now within which the first token is wanted;
    infinite: there is no deadline; 0 or less: it has passed. ``is_deterministic``: the plan may not depend on what was
    measured, so all that is stored of the exact prefix is loaded, and nothing that is not exact."""

    quality: float | None = None
    deadline_s: float = math.inf
    is_deterministic: bool = False
    request_class: RequestClass = RequestClass.INTERACTIVE

    @staticmethod
    def of(quality: Any, deadline_ms: Any, deterministic: Any, request_class: Any) -> Terms:
        """Check a call's arguments. Raises: InvalidRequest naming the argument that is wrong. A deadline in the past is
        not wrong: its prompt is computed, for nothing is worth waiting for."""
        if quality is not None and not (_is_number(quality) and 0.0 <= quality <= 1.0):
            raise InvalidRequest(f"quality {quality!r:.40} must be in 0..1, a share of full prefill's quality")
        if deadline_ms is not None and not (_is_number(deadline_ms) and abs(deadline_ms) < DEADLINE_MS_MAX):
            raise InvalidRequest(f"deadline_ms {deadline_ms!r:.40} must be a number of milliseconds from now")
        if not isinstance(deterministic, bool):
            raise InvalidRequest(f"deterministic {deterministic!r:.40} must be True or False")
        if request_class not in list(RequestClass):
            raise InvalidRequest(f"request_class {request_class!r:.40} must be one of {', '.join(RequestClass)}")
        deadline_s = math.inf if deadline_ms is None else float(deadline_ms) / 1e3
        return Terms(
            None if quality is None else float(quality), deadline_s, deterministic, RequestClass(request_class)
        )

    def after(self, seconds: float) -> Terms:
        """Return the terms that are left when so many seconds have passed."""
        return replace(self, deadline_s=self.deadline_s - seconds)

    @property
    def allows_lossy(self) -> bool:
        """True when the answer may be less than exact, in return for time."""
        return self.quality is not None and self.quality < 1.0 and not self.is_deterministic and not self.is_overdue

    @property
    def is_overdue(self) -> bool:
        """True when the deadline has passed: then nothing is loaded, because no wait can be worth it."""
        return self.deadline_s <= 0.0


ANY_TERMS = Terms()
"""The terms of a caller that sets none."""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
