"""Accounts of tiers for operators: the content, state and backlog of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.catalog import Copies
from kvstore.movement.queue import Waiting
from kvstore.movement.shared import SharedCopies
from kvstore.movement.states import TierStates
from kvstore.movement.writes import Writes
from kvstore.spec import Durability, Tier
from kvstore.tiers import LocalTier, TierStatistics

NOTHING = Waiting()


@dataclass(frozen=True, kw_only=True, slots=True)
class TierAccount:
    """One tier's account. ``backlog_count``: chunks that wait to be written to it. ``problem``: why it lacks chunks,
    empty while it takes them. ``write_policy``: for a shared tier, when chunks are written to it."""

    stats: TierStatistics
    kind: Tier
    durability: Durability
    stalled_s: float
    backlog_count: int = 0
    problem: str = ""
    write_policy: str = ""
    is_draining: bool = False
    waiting: Waiting = NOTHING


def account_of(tier: LocalTier, states: TierStates) -> TierAccount:
    """Return the account of a tier to which nothing waits to be written."""
    return TierAccount(
        stats=states.seen(tier.statistics()), kind=tier.kind, durability=tier.durability, stalled_s=tier.stalled_s()
    )


def accounts_of(
    local: Iterable[Copies], shared: Iterable[SharedCopies], writes: Iterable[Writes], states: TierStates
) -> list[TierAccount]:
    """Return the account of every tier, in the order given."""
    to = {each.target.name: (each.backlog_count, each.reason, each.is_draining, each.waiting) for each in writes}
    found = []
    for copies in local:
        backlog_count, problem, is_draining, waiting = to.get(copies.tier.name, (0, "", False, NOTHING))
        found.append(
            TierAccount(
                stats=states.seen(copies.tier.statistics()), kind=copies.kind, durability=copies.durability,
                stalled_s=copies.tier.stalled_s(),
                backlog_count=backlog_count, problem=problem, is_draining=is_draining, waiting=waiting,
            )
        )  # fmt: skip
    for each in shared:
        backlog_count, problem, is_draining, waiting = to.get(each.tier.name, (0, "", False, NOTHING))
        stats = states.seen(each.statistics(), each.failing_since_s())
        found.append(
            TierAccount(
                stats=stats, kind=each.tier.kind, durability=each.tier.durability,
                stalled_s=each.tier.stalled_s(), backlog_count=backlog_count, problem=problem or stats.reason,
                write_policy=each.write_policy.value, is_draining=is_draining, waiting=waiting,
            )
        )  # fmt: skip
    return found
