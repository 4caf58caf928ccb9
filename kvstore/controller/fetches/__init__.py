"""Reading: lookups of a chain's stored prefix, and fetches of its bytes under a lease.

Where a chain goes on beyond the node, ``lookup_wide`` and ``fetch_wide`` ask the shared tiers.

A lookup promises nothing, unless it is asked for a ticket, which holds the hits. A fetch leases the stored prefix and
has movement bring in chunks that memory lacks; slabs can be copied as they arrive. A miss is a value, never an error.
Cost: a lookup walks the chain, about 1 us per chunk and part; a fetch moves no byte itself.

- ``lookup``    the length and the places of a chain's stored prefix
- ``tickets``   prefixes that one session found and others fetch
- ``fetch``     the stored prefix under a lease
- ``arrivals``  the slabs of a fetch as they land in memory
"""

from kvstore.controller.fetches.arrivals import arrivals_of
from kvstore.controller.fetches.fetch import Fetches
from kvstore.controller.fetches.lookup import Lookups, namespaces_of
from kvstore.controller.fetches.tickets import TICKET_BYTES, Tickets

__all__ = ["TICKET_BYTES", "Fetches", "Lookups", "Tickets", "arrivals_of", "namespaces_of"]
