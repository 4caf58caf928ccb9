"""The client of a kvstore sidecar.

    from kvstore_client import connect, ModelSpec
    client = connect()
    receipt = client.store(spec, tokens, kv)
    kv = client.fetch(spec, tokens)

A miss is a value, and false where a truth is asked for. When the sidecar is gone, lookups and fetches miss, stores
report that nothing was kept, one warning is logged, and the client connects again by itself. Every error is a
``KVStoreError``. Needs no torch.
"""

from kvstore.errors import (
    DataLoss,
    DeadlineExceeded,
    Exhausted,
    Internal,
    InvalidRequest,
    KVStoreError,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)
from kvstore.keys import Extra
from kvstore.planning import Recompute
from kvstore.spec import (
    CacheKind,
    ChunkState,
    Durability,
    EventKind,
    Exactness,
    LayerKind,
    LayerSpec,
    MissReason,
    ModelSpec,
    RopeSpec,
    Tier,
)
from kvstore_client.aio import AsyncClient, connect_async
from kvstore_client.begin import connect
from kvstore_client.client import Client
from kvstore_client.fetch.fetched import FetchedKV
from kvstore_client.fetch.paged import Paged
from kvstore_client.fetch.stream import LayerStream
from kvstore_client.fetch.transfer import Transfer
from kvstore_client.gate import Gate
from kvstore_client.lookup.locate import Location, PrefixAt
from kvstore_client.lookup.match import ChunkMatch, Match, SegmentMatch
from kvstore_client.lookup.watch import ChunkEvent, Watch
from kvstore_client.planes.place import TLS
from kvstore_client.prompt import PageHashes
from kvstore_client.store.receipt import Receipt
from kvstore_client.store.writer import StoreWriter
from kvstore_client.tracing import traced

__all__ = [
    "TLS",
    "AsyncClient",
    "CacheKind",
    "ChunkEvent",
    "ChunkMatch",
    "ChunkState",
    "Client",
    "DataLoss",
    "DeadlineExceeded",
    "Durability",
    "EventKind",
    "Exactness",
    "Exhausted",
    "Extra",
    "FetchedKV",
    "Gate",
    "Internal",
    "InvalidRequest",
    "KVStoreError",
    "LayerKind",
    "LayerSpec",
    "LayerStream",
    "Location",
    "Match",
    "MissReason",
    "ModelSpec",
    "PageHashes",
    "Paged",
    "PermissionDenied",
    "PrefixAt",
    "Receipt",
    "Recompute",
    "RopeSpec",
    "SegmentMatch",
    "StoreWriter",
    "Tier",
    "Transfer",
    "Unauthenticated",
    "Unavailable",
    "Watch",
    "connect",
    "connect_async",
    "traced",
]
