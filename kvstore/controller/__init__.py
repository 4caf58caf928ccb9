"""What a request means: sessions, leases, reservations and the limits on all of them.

No gRPC and no protobuf here: the same controller runs under a simulation. All state changes on the event loop's
thread; only the byte movers' jobs (copy and checksum) run elsewhere, and they touch nothing but extents that a
reservation owns.

- ``sessions``  who is connected and what ends with the connection
- ``capacity``  finding room: evict, revoke, or refuse
- ``fetching``  lookups and leases
- ``storing``   reserve, fill, commit, abort
- ``moving``    the byte movers' job: staging to arena, checksummed
"""

from kvstore.controller.controller import Controller
from kvstore.controller.sessions import Session
from kvstore.controller.values import (
    ChainQuery,
    FetchResult,
    Fill,
    LookupResult,
    ReserveRequest,
    Resident,
    Stats,
    StoreResult,
    Tail,
)

__all__ = [
    "ChainQuery",
    "Controller",
    "FetchResult",
    "Fill",
    "LookupResult",
    "ReserveRequest",
    "Resident",
    "Session",
    "Stats",
    "StoreResult",
    "Tail",
]
