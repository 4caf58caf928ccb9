"""The client of a kvstore sidecar.

    from kvstore_client import connect, ModelSpec
    client = connect()
    receipt = client.store(spec, tokens, kv)
    kv = client.fetch(spec, tokens)

A miss is a value. When the sidecar is gone, lookups and fetches miss, stores report that nothing was kept, one
warning is logged, and the client connects again by itself. Needs no torch.
"""

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
from kvstore_client.client import Client, connect
from kvstore_client.fetching import FetchedKV, LayerStream
from kvstore_client.gate import Gate
from kvstore_client.match import ChunkMatch, Match
from kvstore_client.paged import Paged
from kvstore_client.prompt import PageHashes
from kvstore_client.receipt import Receipt
from kvstore_client.remote.place import TLS
from kvstore_client.segments import SegmentMatch
from kvstore_client.transfer import Transfer
from kvstore_client.watching import ChunkEvent, Watch
from kvstore_client.writer import StoreWriter

__all__ = [
    "TLS",
    "AsyncClient",
    "CacheKind",
    "ChunkEvent",
    "ChunkMatch",
    "ChunkState",
    "Client",
    "Durability",
    "EventKind",
    "Exactness",
    "Extra",
    "FetchedKV",
    "Gate",
    "LayerKind",
    "LayerSpec",
    "LayerStream",
    "Match",
    "MissReason",
    "ModelSpec",
    "PageHashes",
    "Paged",
    "Receipt",
    "Recompute",
    "RopeSpec",
    "SegmentMatch",
    "StoreWriter",
    "Tier",
    "Transfer",
    "Watch",
    "connect",
    "connect_async",
]
