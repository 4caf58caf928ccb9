"""Writing: a chain's chunks, from a reservation to their commit.

A chunk has one writer; other stores of it wait for how that ends. It becomes visible when every strip of it was moved
and checksummed, its writers committed, and its parent is visible. A move that a mover refused, lost or failed at leaves
its strips unfilled. A move that has begun is finished even if its caller is gone: until then the memory is in use.

- ``reservation``  a store in flight: its chunks, and what of them is there
- ``reservations`` all stores in flight, and how they end
- ``claim``        reserve: who stores which chunk, and where it will lie
- ``replacement``  the older value of an opaque name goes first
- ``fill``         strips from staging to the arena
- ``mover``        the byte movers' job
- ``commit``       what is whole becomes visible
- ``filling``      a chunk that is read while it is written
- ``join``         fetches of a store in flight
"""

from kvstore.controller.stores.claim import Claims
from kvstore.controller.stores.commit import Commits
from kvstore.controller.stores.fill import Fills
from kvstore.controller.stores.join import Joins
from kvstore.controller.stores.reservations import Reservations

__all__ = ["Claims", "Commits", "Fills", "Joins", "Reservations"]
