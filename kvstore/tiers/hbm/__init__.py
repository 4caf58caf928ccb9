"""The HBM tier: copies of chunks that memory has, in the memory of a GPU, for engines that compute on it.

- ``pool``  one region of the device, which clients map: extents, and a generation for each
- ``tier``  ``HbmTier``: copies into it, and what they must be

A chunk's copy is its header and strips, as in the arena, in one extent. Clients may write the memory of a CUDA device
that they map, so nothing is believed of it but by its checksums, which the tier keeps in memory of its own; what the
tier gives out was checked on the host. ``kvstore.movement.hbm`` decides what it holds.
"""

from kvstore.tiers.hbm.pool import Pool, PoolExtent
from kvstore.tiers.hbm.tier import HbmTier

__all__ = ["HbmTier", "Pool", "PoolExtent"]
