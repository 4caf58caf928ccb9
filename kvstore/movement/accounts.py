"""Accounts of tiers for operators: the content, backlog and state of each, and for how long it has been so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstore.movement.queue import Waiting
from kvstore.movement.shared import SharedCopies
from kvstore.movement.writes import Writes
from kvstore.seams import Clock
from kvstore.spec import Durability, Tier
from kvstore.tiers import LocalTier, SharedTier, TierStatistics

REASON_CHARS_MAX = 1000
"""An engine's words may be of any length; a reply has room for this much."""
NOTHING = Waiting()


@dataclass(frozen=True, kw_only=True, slots=True)
class TierAccount:
    """One tier's account. ``backlog_count``: chunks that wait to be written to it. ``problem``: why it lacks chunks,
    empty while it takes all. ``write_policy``: for a shared tier, when chunks are written to it."""

    stats: TierStatistics
    kind: Tier
    durability: Durability
    stalled_s: float
    backlog_count: int = 0
    problem: str = ""
    write_policy: str = ""
    is_draining: bool = False
    waiting: Waiting = NOTHING


class TierStates:
    """The last known state of each tier, by its name, and the time since when it is known. It is as fresh as the last
    look: whoever wants it fresh looks often. A tier that is up at the first look counts as up since the start."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_s = clock.monotonic()
        self._known: dict[str, tuple[str, float]] = {}

    def seen(self, stats: TierStatistics, since_s: float | None = None) -> TierStatistics:
        """Return the statistics with the seconds for which the tier has been in this state. ``since_s``: the time since
        when, where that is known better than by the last look."""
        now_s = self._clock.monotonic()
        state, began_s = self._known.get(stats.name) or ("up", self._started_s)
        if state != stats.state:
            began_s = now_s if since_s is None else min(since_s, now_s)
        self._known[stats.name] = (stats.state, began_s)
        return replace(stats, state_s=now_s - began_s, reason=stats.reason[:REASON_CHARS_MAX])


def accounts_of(
    local: Iterable[LocalTier], shared: Iterable[SharedCopies], writes: Iterable[Writes], states: TierStates
) -> list[TierAccount]:
    """Return the account of every tier, in the order given. Nothing waits for a tier without ``writes``."""
    to = {each.target.name: each for each in writes}
    found = [_account(tier, states.seen(tier.statistics()), to.get(tier.name)) for tier in local]
    for each in shared:
        stats = states.seen(each.statistics(), each.failing_since_s())
        account = _account(each.tier, stats, to.get(each.tier.name))
        found.append(replace(account, write_policy=each.write_policy.value))
    return found


def _account(tier: LocalTier | SharedTier, stats: TierStatistics, writes: Writes | None) -> TierAccount:
    account = TierAccount(
        stats=stats, kind=tier.kind, durability=tier.durability, stalled_s=tier.stalled_s(), problem=stats.reason
    )
    if writes is None:
        return account
    return replace(
        account, backlog_count=writes.backlog_count, problem=writes.reason or stats.reason,
        is_draining=writes.is_draining, waiting=writes.waiting,
    )  # fmt: skip
