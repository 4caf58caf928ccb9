"""What leaves first. A policy orders opaque names by what it was told of their use; it does no I/O, reads no
clock and owns no bytes. The capacity code asks it for victims and decides which of them may go."""

from kvstore.policy.eviction import EvictionPolicy
from kvstore.policy.lru import LeastRecentlyUsed

__all__ = ["EvictionPolicy", "LeastRecentlyUsed"]
