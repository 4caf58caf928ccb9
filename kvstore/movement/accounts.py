"""Accounts of tiers for operators: the content, state and backlog of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvstore.movement.queue import Waiting
from kvstore.movement.shared import SharedCopies
from kvstore.movement.states import TierStates
from kvstore.movement.writes import Writes
from kvstore.spec import Durability, Tier
from kvstore.tiers import LocalTier, SharedTier, TierStatistics

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
