"""The identity of a cache. A ``ModelSpec`` names the model, the weights and the geometry; with a ``CacheKind``
and the format version it becomes a *fingerprint* (``kvstore.keys``). Two caches that must never mix differ
here. A spec names meaning, never how bytes are encoded or where they lie."""

from kvstore.spec.dtypes import DTYPES, item_size
from kvstore.spec.model import (
    CacheKind,
    Exactness,
    LayerKind,
    LayerSpec,
    ModelSpec,
    Provenance,
    RopeSpec,
)
from kvstore.spec.states import (
    ENCODING_SETTINGS,
    ENVELOPES,
    LEVELS,
    ChunkState,
    Durability,
    Encoding,
    EventKind,
    MissReason,
    StoreState,
    Tier,
    encoding_of,
)

__all__ = [
    "DTYPES",
    "ENCODING_SETTINGS",
    "ENVELOPES",
    "LEVELS",
    "CacheKind",
    "ChunkState",
    "Durability",
    "Encoding",
    "EventKind",
    "Exactness",
    "LayerKind",
    "LayerSpec",
    "MissReason",
    "ModelSpec",
    "Provenance",
    "RopeSpec",
    "StoreState",
    "Tier",
    "encoding_of",
    "item_size",
]
