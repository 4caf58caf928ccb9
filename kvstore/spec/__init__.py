"""Specs: the identity of the model that a cache belongs to. A ``ModelSpec`` names the model, the weights and the
geometry; with a ``CacheKind`` and the format version it becomes a *fingerprint* (``kvstore.keys``). Two caches that
must never mix have different specs. A spec says nothing of the encoding of bytes, or of their place."""

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
    SHARED_ENCODING_SETTINGS,
    SPEED,
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
    "SHARED_ENCODING_SETTINGS",
    "SPEED",
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
