"""The controller: it carries out every request (sessions, stores, fetches) and enforces the limits on all of them.

Neither gRPC nor protobuf is used here: the same controller runs under a simulation. All state changes on the event
loop's thread. Only the byte movers' jobs (copy and checksum) run elsewhere, and they touch nothing but extents that a
reservation owns. ``Controller`` has one method per request and passes it on to a room. The doors call its methods and
reach no further.

- ``parts``     what the rooms share: memory, catalog, movement, seams, settings
- ``sessions``  connected clients, with their staging and leases
- ``fetches``   lookup, tickets, fetch, arrivals
- ``prefills``  plans of the chunks worth loading, and the results of these plans
- ``profiles``  what clients measured of lossy reuse, kept for the tenant's others
- ``stores``    reserve, fill, commit, join
- ``locating``  the nodes and tiers that have a prompt's prefix
- ``pins``      chunks that an operator keeps in place
- ``benefit``   what engines did not compute thanks to the cache
- ``operators`` operators' requests, behind a front of their own
- ``values``    arguments and results of the requests
"""

from kvstore.controller.controller import Controller
from kvstore.controller.parts import Parts
from kvstore.controller.sessions import Session
from kvstore.controller.values import (
    Arrival,
    ChainQuery,
    FetchResult,
    Fill,
    Located,
    LookupResult,
    ReserveRequest,
    Resident,
    Settled,
    Stats,
    StoreResult,
    Tail,
    UsedChain,
)

__all__ = [
    "Arrival",
    "ChainQuery",
    "Controller",
    "FetchResult",
    "Fill",
    "Located",
    "LookupResult",
    "Parts",
    "ReserveRequest",
    "Resident",
    "Session",
    "Settled",
    "Stats",
    "StoreResult",
    "Tail",
    "UsedChain",
]
