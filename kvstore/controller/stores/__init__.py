"""Writing: a chain's chunks, from a reservation to their commit.

A chunk has one writer; other stores of it wait for its end. A chunk becomes visible when every strip was moved and
checksummed, its parent is visible, and its writers committed; a single writer may ask for it before the commit
(``at_once``), and an abort leaves such chunks as they are. A move that a mover refused, lost or failed at leaves its
strips unfilled. A move that has begun is finished even if its caller is gone: until then the memory is in use.

- ``reservation``  a store in flight, and its chunks
- ``reservations`` all stores in flight: their beginning and their end
- ``claim``        reserve: it claims the chunks to store, and allocates room for them
- ``replacement``  removes the older value of an opaque name before the new one is stored
- ``fill``         strips from staging to the arena
- ``mover``        the byte movers' job
- ``publish``      a whole chunk becomes visible
- ``commit``       complete chunks become visible
- ``filling``      a chunk that is being written: its filled strips, and its readers
- ``join``         fetches of a store in flight
"""

from kvstore.controller.stores.claim import Claims
from kvstore.controller.stores.commit import Commits
from kvstore.controller.stores.fill import Fills
from kvstore.controller.stores.join import Joins
from kvstore.controller.stores.reservations import Reservations

__all__ = ["Claims", "Commits", "Fills", "Joins", "Reservations"]
