"""Every move of bytes between tiers, and every copy that goes: into memory on use, down to the device after a store,
out when room is needed, and read again to see that it is what it was.

``Movement`` is what the controller asks; nobody else calls the parts:

- ``residency`` where chunks lie, and how copies go
- ``capacity``  finding room in memory: demote, evict, revoke, or refuse
- ``writeback`` memory to device
- ``promotion`` device to memory
- ``scrub``     reads again what lies there
"""

from kvstore.movement.movement import Movement
from kvstore.movement.promotion import Loading

__all__ = ["Loading", "Movement"]
