"""The arena as a tier: volatile memory that sidecar and clients share. A copy is a placement; its residency is the
placement's generation slot, which no other copy uses while the copy is there.

This is the service's fastest tier, and the one that clients map. So it has two calls that no contract has: ``adopt``
and ``placement`` (see ``DramTier``).
"""

from kvstore.tiers.dram.tier import DramTier

__all__ = ["DramTier"]
