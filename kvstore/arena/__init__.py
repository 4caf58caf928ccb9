"""The bytes in memory: a list of shared regions, the extents handed out of them, and the page of generations.

Placement of a chunk: its pieces (header, slab, slab, ...) lie in one extent where that fits, else split at piece
boundaries over several. Each resident chunk owns one generation slot; ``free`` changes the slot's value first and gives
the bytes away after. So a reader that copies and then finds the generation unchanged has copied the chunk and nothing
else.

Everything here runs on the event loop's thread; byte movers only write into extents they were given. Capacity is a hard
cap, headers and alignment included.
"""

from kvstore.arena.arena import Arena
from kvstore.arena.placement import Placement
from kvstore.arena.prefault import prefault
from kvstore.arena.region import Region
from kvstore.arena.staging import Staging

__all__ = ["Arena", "Placement", "Region", "Staging", "prefault"]
