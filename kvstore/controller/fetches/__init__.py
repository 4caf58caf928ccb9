"""Reading: what is stored of a chain, and its bytes under a lease.

Where a chain goes on beyond the node, ``lookup_wide`` and ``fetch_wide`` ask the shared tiers.

A lookup promises nothing, unless it is asked to hold what it found by a ticket. A fetch leases the stored prefix and
has movement bring in what memory lacks; the slabs can be copied as they arrive. A miss is a value and never an error.
Cost: a lookup walks the chain, about 1 us per chunk and part; a fetch moves no byte itself.

- ``lookup``    how far a chain is stored
- ``tickets``   prefixes that one session found and others fetch
- ``fetch``     the stored prefix under a lease
- ``arrivals``  what lands of it, slab by slab
"""

from kvstore.controller.fetches.arrivals import arrivals_of
from kvstore.controller.fetches.fetch import Fetches
from kvstore.controller.fetches.lookup import Lookups, namespaces_of
from kvstore.controller.fetches.tickets import TICKET_BYTES, Tickets

__all__ = ["TICKET_BYTES", "Fetches", "Lookups", "Tickets", "arrivals_of", "namespaces_of"]
