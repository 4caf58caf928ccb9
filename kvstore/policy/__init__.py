"""Eviction and admission policies. A policy orders the chunks of one tier by their reported use; it does no I/O, reads
no clock and owns no bytes. Movement asks it for victims and decides which of them may go.

One file per policy; ``policy.eviction`` names one of ``POLICIES``.
"""

from collections.abc import Callable

from kvstore.policy.eviction import ABSENT, EvictionPolicy
from kvstore.policy.lru import LeastRecentlyUsed

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed}

__all__ = ["ABSENT", "POLICIES", "EvictionPolicy", "LeastRecentlyUsed"]
