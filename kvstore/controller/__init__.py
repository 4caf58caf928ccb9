"""What a request means: sessions, leases, reservations and the limits on all of them.

No gRPC and no protobuf here: the same controller runs under a simulation. All state changes on the event loop's
thread; only the byte movers' jobs (copy and checksum) run elsewhere, and they touch nothing but extents that a
reservation owns.

- ``sessions``  who is connected and what ends with the connection
- ``fetching``  lookups and leases
- ``tickets``   prefixes held for other processes' fetches
- ``claiming``  reserve: who stores which chunk, and where it will lie
- ``storing``   fill, commit, abort
- ``moving``    the byte movers' job: staging to arena, checksummed
- ``residency`` where chunks lie, and how copies go
- ``capacity``  finding room in memory: demote, evict, revoke, or refuse
- ``writeback`` memory to device
- ``promotion`` device to memory
- ``scrub``     reads again what lies there
"""

from kvstore.controller.controller import Controller
from kvstore.controller.sessions import Session
from kvstore.controller.values import (
    Arrival,
    ChainQuery,
    FetchResult,
    Fill,
    LookupResult,
    ReserveRequest,
    Resident,
    Settled,
    Stats,
    StoreResult,
    Tail,
)

__all__ = [
    "Arrival",
    "ChainQuery",
    "Controller",
    "FetchResult",
    "Fill",
    "LookupResult",
    "ReserveRequest",
    "Resident",
    "Session",
    "Settled",
    "Stats",
    "StoreResult",
    "Tail",
]
