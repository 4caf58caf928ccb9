from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYER_KIND_UNSPECIFIED: _ClassVar[LayerKind]
    LAYER_KIND_FULL: _ClassVar[LayerKind]
    LAYER_KIND_SLIDING_WINDOW: _ClassVar[LayerKind]
    LAYER_KIND_RECURRENT: _ClassVar[LayerKind]
    LAYER_KIND_CROSS: _ClassVar[LayerKind]
    LAYER_KIND_NONE: _ClassVar[LayerKind]

class ChunkState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CHUNK_STATE_UNSPECIFIED: _ClassVar[ChunkState]
    CHUNK_STATE_HIT: _ClassVar[ChunkState]
    CHUNK_STATE_PENDING: _ClassVar[ChunkState]
    CHUNK_STATE_MISS: _ClassVar[ChunkState]

class MissReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_REASON_UNSPECIFIED: _ClassVar[MissReason]
    MISS_REASON_COLD: _ClassVar[MissReason]
    MISS_REASON_EVICTED: _ClassVar[MissReason]
    MISS_REASON_STALE: _ClassVar[MissReason]
    MISS_REASON_CORRUPT: _ClassVar[MissReason]
    MISS_REASON_OVERLOADED: _ClassVar[MissReason]
    MISS_REASON_UNAVAILABLE: _ClassVar[MissReason]

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_HBM: _ClassVar[Tier]
    TIER_DRAM: _ClassVar[Tier]
    TIER_NVME: _ClassVar[Tier]
    TIER_S3: _ClassVar[Tier]
    TIER_REDIS: _ClassVar[Tier]

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_RAW: _ClassVar[Encoding]
    ENCODING_LZ4: _ClassVar[Encoding]

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACTNESS_EXACT: _ClassVar[Exactness]
    EXACTNESS_DERIVED: _ClassVar[Exactness]

class Provenance(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROVENANCE_UNSPECIFIED: _ClassVar[Provenance]
    PROVENANCE_IN_CONTEXT: _ClassVar[Provenance]
    PROVENANCE_STANDALONE: _ClassVar[Provenance]

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_STORED: _ClassVar[EventKind]
    EVENT_KIND_REMOVED: _ClassVar[EventKind]
    EVENT_KIND_MOVED: _ClassVar[EventKind]
    EVENT_KIND_GAP: _ClassVar[EventKind]

class StoreState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STORE_STATE_UNSPECIFIED: _ClassVar[StoreState]
    STORE_STATE_WANTED: _ClassVar[StoreState]
    STORE_STATE_PRESENT: _ClassVar[StoreState]
    STORE_STATE_PENDING: _ClassVar[StoreState]
    STORE_STATE_REFUSED: _ClassVar[StoreState]
    STORE_STATE_COMMITTED: _ClassVar[StoreState]
    STORE_STATE_ABORTED: _ClassVar[StoreState]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_LOCAL: _ClassVar[Durability]
    DURABILITY_SHARED: _ClassVar[Durability]
    DURABILITY_OBJECT: _ClassVar[Durability]
LAYER_KIND_UNSPECIFIED: LayerKind
LAYER_KIND_FULL: LayerKind
LAYER_KIND_SLIDING_WINDOW: LayerKind
LAYER_KIND_RECURRENT: LayerKind
LAYER_KIND_CROSS: LayerKind
LAYER_KIND_NONE: LayerKind
CHUNK_STATE_UNSPECIFIED: ChunkState
CHUNK_STATE_HIT: ChunkState
CHUNK_STATE_PENDING: ChunkState
CHUNK_STATE_MISS: ChunkState
MISS_REASON_UNSPECIFIED: MissReason
MISS_REASON_COLD: MissReason
MISS_REASON_EVICTED: MissReason
MISS_REASON_STALE: MissReason
MISS_REASON_CORRUPT: MissReason
MISS_REASON_OVERLOADED: MissReason
MISS_REASON_UNAVAILABLE: MissReason
TIER_UNSPECIFIED: Tier
TIER_HBM: Tier
TIER_DRAM: Tier
TIER_NVME: Tier
TIER_S3: Tier
TIER_REDIS: Tier
ENCODING_UNSPECIFIED: Encoding
ENCODING_RAW: Encoding
ENCODING_LZ4: Encoding
EXACTNESS_UNSPECIFIED: Exactness
EXACTNESS_EXACT: Exactness
EXACTNESS_DERIVED: Exactness
PROVENANCE_UNSPECIFIED: Provenance
PROVENANCE_IN_CONTEXT: Provenance
PROVENANCE_STANDALONE: Provenance
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_STORED: EventKind
EVENT_KIND_REMOVED: EventKind
EVENT_KIND_MOVED: EventKind
EVENT_KIND_GAP: EventKind
STORE_STATE_UNSPECIFIED: StoreState
STORE_STATE_WANTED: StoreState
STORE_STATE_PRESENT: StoreState
STORE_STATE_PENDING: StoreState
STORE_STATE_REFUSED: StoreState
STORE_STATE_COMMITTED: StoreState
STORE_STATE_ABORTED: StoreState
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_LOCAL: Durability
DURABILITY_SHARED: Durability
DURABILITY_OBJECT: Durability

class LayerSpec(_message.Message):
    __slots__ = ("kind", "kv_heads", "k_dim", "v_dim", "window", "group")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    K_DIM_FIELD_NUMBER: _ClassVar[int]
    V_DIM_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    kind: LayerKind
    kv_heads: int
    k_dim: int
    v_dim: int
    window: int
    group: int
    def __init__(self, kind: _Optional[_Union[LayerKind, str]] = ..., kv_heads: _Optional[int] = ..., k_dim: _Optional[int] = ..., v_dim: _Optional[int] = ..., window: _Optional[int] = ..., group: _Optional[int] = ...) -> None: ...

class RopeFactor(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class RopeSpec(_message.Message):
    __slots__ = ("theta", "kind", "rotary_dim", "factors", "mrope")
    THETA_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROTARY_DIM_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    MROPE_FIELD_NUMBER: _ClassVar[int]
    theta: float
    kind: str
    rotary_dim: int
    factors: _containers.RepeatedCompositeFieldContainer[RopeFactor]
    mrope: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, theta: _Optional[float] = ..., kind: _Optional[str] = ..., rotary_dim: _Optional[int] = ..., factors: _Optional[_Iterable[_Union[RopeFactor, _Mapping]]] = ..., mrope: _Optional[_Iterable[int]] = ...) -> None: ...

class LayerScales(_message.Message):
    __slots__ = ("k", "v")
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    k: float
    v: float
    def __init__(self, k: _Optional[float] = ..., v: _Optional[float] = ...) -> None: ...

class ModelSpec(_message.Message):
    __slots__ = ("model_id", "weights_digest", "adapter_id", "layers", "hidden_size", "vocab_size", "cache_dtype", "hidden_dtype", "rope", "chunk_tokens", "mla", "scales", "keeps_e", "tokenizer_digest")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MLA_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_E_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    weights_digest: str
    adapter_id: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerSpec]
    hidden_size: int
    vocab_size: int
    cache_dtype: str
    hidden_dtype: str
    rope: RopeSpec
    chunk_tokens: int
    mla: bool
    scales: _containers.RepeatedCompositeFieldContainer[LayerScales]
    keeps_e: bool
    tokenizer_digest: str
    def __init__(self, model_id: _Optional[str] = ..., weights_digest: _Optional[str] = ..., adapter_id: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerSpec, _Mapping]]] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., cache_dtype: _Optional[str] = ..., hidden_dtype: _Optional[str] = ..., rope: _Optional[_Union[RopeSpec, _Mapping]] = ..., chunk_tokens: _Optional[int] = ..., mla: _Optional[bool] = ..., scales: _Optional[_Iterable[_Union[LayerScales, _Mapping]]] = ..., keeps_e: _Optional[bool] = ..., tokenizer_digest: _Optional[str] = ...) -> None: ...

class RegisterModelRequest(_message.Message):
    __slots__ = ("spec",)
    SPEC_FIELD_NUMBER: _ClassVar[int]
    spec: ModelSpec
    def __init__(self, spec: _Optional[_Union[ModelSpec, _Mapping]] = ...) -> None: ...

class RegisterModelResponse(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    def __init__(self, fingerprint: _Optional[bytes] = ...) -> None: ...

class ChainQuery(_message.Message):
    __slots__ = ("fingerprint", "digests", "hidden_layers", "exactness", "hidden_only", "provenance")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_ONLY_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    digests: bytes
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    exactness: Exactness
    hidden_only: bool
    provenance: Provenance
    def __init__(self, fingerprint: _Optional[bytes] = ..., digests: _Optional[bytes] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., hidden_only: _Optional[bool] = ..., provenance: _Optional[_Union[Provenance, str]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("query", "hold", "readers", "segments", "tail_digests", "with_places")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TAIL_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WITH_PLACES_FIELD_NUMBER: _ClassVar[int]
    query: ChainQuery
    hold: bool
    readers: int
    segments: _containers.RepeatedCompositeFieldContainer[ChainQuery]
    tail_digests: bytes
    with_places: bool
    def __init__(self, query: _Optional[_Union[ChainQuery, _Mapping]] = ..., hold: _Optional[bool] = ..., readers: _Optional[int] = ..., segments: _Optional[_Iterable[_Union[ChainQuery, _Mapping]]] = ..., tail_digests: _Optional[bytes] = ..., with_places: _Optional[bool] = ...) -> None: ...

class ChunkRun(_message.Message):
    __slots__ = ("count", "state", "tier", "encoding", "reason")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    count: int
    state: ChunkState
    tier: Tier
    encoding: Encoding
    reason: MissReason
    def __init__(self, count: _Optional[int] = ..., state: _Optional[_Union[ChunkState, str]] = ..., tier: _Optional[_Union[Tier, str]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., reason: _Optional[_Union[MissReason, str]] = ...) -> None: ...

class PartialTail(_message.Message):
    __slots__ = ("token_count", "digest")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    digest: bytes
    def __init__(self, token_count: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class HeldPrefix(_message.Message):
    __slots__ = ("ticket", "spec", "digests", "exactness", "token_count", "places")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    spec: ModelSpec
    digests: bytes
    exactness: Exactness
    token_count: int
    places: _containers.RepeatedCompositeFieldContainer[ResidentChunk]
    def __init__(self, ticket: _Optional[bytes] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., digests: _Optional[bytes] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., token_count: _Optional[int] = ..., places: _Optional[_Iterable[_Union[ResidentChunk, _Mapping]]] = ...) -> None: ...

class SharedStore(_message.Message):
    __slots__ = ("ticket", "spec", "digests", "exactness", "token_count", "hidden_layers", "shards")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    spec: ModelSpec
    digests: bytes
    exactness: Exactness
    token_count: int
    hidden_layers: _containers.RepeatedScalarFieldContainer[int]
    shards: int
    def __init__(self, ticket: _Optional[bytes] = ..., spec: _Optional[_Union[ModelSpec, _Mapping]] = ..., digests: _Optional[bytes] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., token_count: _Optional[int] = ..., hidden_layers: _Optional[_Iterable[int]] = ..., shards: _Optional[int] = ...) -> None: ...

class SegmentFound(_message.Message):
    __slots__ = ("hit_count", "runs")
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    hit_count: int
    runs: _containers.RepeatedCompositeFieldContainer[ChunkRun]
    def __init__(self, hit_count: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[ChunkRun, _Mapping]]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hit_count", "runs", "tails", "ticket", "ticket_seconds", "segments", "tail_lengths", "tail_found", "places")
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TICKET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TAIL_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FOUND_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    hit_count: int
    runs: _containers.RepeatedCompositeFieldContainer[ChunkRun]
    tails: _containers.RepeatedCompositeFieldContainer[PartialTail]
    ticket: bytes
    ticket_seconds: float
    segments: _containers.RepeatedCompositeFieldContainer[SegmentFound]
    tail_lengths: bytes
    tail_found: int
    places: _containers.RepeatedCompositeFieldContainer[ResidentChunk]
    def __init__(self, hit_count: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[ChunkRun, _Mapping]]] = ..., tails: _Optional[_Iterable[_Union[PartialTail, _Mapping]]] = ..., ticket: _Optional[bytes] = ..., ticket_seconds: _Optional[float] = ..., segments: _Optional[_Iterable[_Union[SegmentFound, _Mapping]]] = ..., tail_lengths: _Optional[bytes] = ..., tail_found: _Optional[int] = ..., places: _Optional[_Iterable[_Union[ResidentChunk, _Mapping]]] = ...) -> None: ...

class LocateRequest(_message.Message):
    __slots__ = ("queries",)
    QUERIES_FIELD_NUMBER: _ClassVar[int]
    queries: _containers.RepeatedCompositeFieldContainer[ChainQuery]
    def __init__(self, queries: _Optional[_Iterable[_Union[ChainQuery, _Mapping]]] = ...) -> None: ...

class NodePrefix(_message.Message):
    __slots__ = ("node", "tier", "chunk_count")
    NODE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    node: str
    tier: Tier
    chunk_count: int
    def __init__(self, node: _Optional[str] = ..., tier: _Optional[_Union[Tier, str]] = ..., chunk_count: _Optional[int] = ...) -> None: ...

class LocatedChain(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[NodePrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[NodePrefix, _Mapping]]] = ...) -> None: ...

class LocateResponse(_message.Message):
    __slots__ = ("chains", "node", "reason", "unknown_tiers")
    CHAINS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_TIERS_FIELD_NUMBER: _ClassVar[int]
    chains: _containers.RepeatedCompositeFieldContainer[LocatedChain]
    node: str
    reason: str
    unknown_tiers: _containers.RepeatedScalarFieldContainer[Tier]
    def __init__(self, chains: _Optional[_Iterable[_Union[LocatedChain, _Mapping]]] = ..., node: _Optional[str] = ..., reason: _Optional[str] = ..., unknown_tiers: _Optional[_Iterable[_Union[Tier, str]]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("query", "layers", "ticket", "on_device")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ON_DEVICE_FIELD_NUMBER: _ClassVar[int]
    query: ChainQuery
    layers: _containers.RepeatedScalarFieldContainer[int]
    ticket: bytes
    on_device: bool
    def __init__(self, query: _Optional[_Union[ChainQuery, _Mapping]] = ..., layers: _Optional[_Iterable[int]] = ..., ticket: _Optional[bytes] = ..., on_device: _Optional[bool] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("region", "offset", "byte_count")
    REGION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    region: int
    offset: int
    byte_count: int
    def __init__(self, region: _Optional[int] = ..., offset: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class ResidentChunk(_message.Message):
    __slots__ = ("index", "part", "token_count", "extents", "generation_slot", "generation", "is_arriving", "device")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    IS_ARRIVING_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    index: int
    part: int
    token_count: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    generation_slot: int
    generation: int
    is_arriving: bool
    device: DevicePlace
    def __init__(self, index: _Optional[int] = ..., part: _Optional[int] = ..., token_count: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., generation_slot: _Optional[int] = ..., generation: _Optional[int] = ..., is_arriving: _Optional[bool] = ..., device: _Optional[_Union[DevicePlace, _Mapping]] = ...) -> None: ...

class DevicePlace(_message.Message):
    __slots__ = ("offset", "byte_count", "generation_slot", "generation")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    offset: int
    byte_count: int
    generation_slot: int
    generation: int
    def __init__(self, offset: _Optional[int] = ..., byte_count: _Optional[int] = ..., generation_slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class Arrival(_message.Message):
    __slots__ = ("chunk", "slabs", "lost", "is_provisional")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SLABS_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    IS_PROVISIONAL_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    slabs: bytes
    lost: MissReason
    is_provisional: bool
    def __init__(self, chunk: _Optional[int] = ..., slabs: _Optional[bytes] = ..., lost: _Optional[_Union[MissReason, str]] = ..., is_provisional: _Optional[bool] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("lease_id", "hit_count", "tier", "reason", "chunks", "tails", "arrivals", "tail_lengths")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HIT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    ARRIVALS_FIELD_NUMBER: _ClassVar[int]
    TAIL_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    hit_count: int
    tier: Tier
    reason: MissReason
    chunks: _containers.RepeatedCompositeFieldContainer[ResidentChunk]
    tails: _containers.RepeatedCompositeFieldContainer[PartialTail]
    arrivals: _containers.RepeatedCompositeFieldContainer[Arrival]
    tail_lengths: bytes
    def __init__(self, lease_id: _Optional[int] = ..., hit_count: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., reason: _Optional[_Union[MissReason, str]] = ..., chunks: _Optional[_Iterable[_Union[ResidentChunk, _Mapping]]] = ..., tails: _Optional[_Iterable[_Union[PartialTail, _Mapping]]] = ..., arrivals: _Optional[_Iterable[_Union[Arrival, _Mapping]]] = ..., tail_lengths: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids", "tickets")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    tickets: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ..., tickets: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ChunkEvent(_message.Message):
    __slots__ = ("sequence", "kind", "fingerprint", "model_id", "digest", "parent", "token_count", "tier", "reason", "lost_count")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_COUNT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    kind: EventKind
    fingerprint: bytes
    model_id: str
    digest: bytes
    parent: bytes
    token_count: int
    tier: Tier
    reason: MissReason
    lost_count: int
    def __init__(self, sequence: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., fingerprint: _Optional[bytes] = ..., model_id: _Optional[str] = ..., digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., token_count: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., reason: _Optional[_Union[MissReason, str]] = ..., lost_count: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("sequence", "epoch", "events")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: bytes
    events: _containers.RepeatedCompositeFieldContainer[ChunkEvent]
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[bytes] = ..., events: _Optional[_Iterable[_Union[ChunkEvent, _Mapping]]] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("query", "token_digests", "tail_token_count", "first_position", "shards", "replaces", "durability")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    REPLACES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    query: ChainQuery
    token_digests: bytes
    tail_token_count: int
    first_position: int
    shards: int
    replaces: bytes
    durability: Durability
    def __init__(self, query: _Optional[_Union[ChainQuery, _Mapping]] = ..., token_digests: _Optional[bytes] = ..., tail_token_count: _Optional[int] = ..., first_position: _Optional[int] = ..., shards: _Optional[int] = ..., replaces: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class Join(_message.Message):
    __slots__ = ("ticket", "fingerprint", "durability")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    fingerprint: bytes
    durability: Durability
    def __init__(self, ticket: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class Fill(_message.Message):
    __slots__ = ("chunk", "strip_first", "strip_count", "staging_id", "staging_offset")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STRIP_FIRST_FIELD_NUMBER: _ClassVar[int]
    STRIP_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGING_ID_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    strip_first: int
    strip_count: int
    staging_id: int
    staging_offset: int
    def __init__(self, chunk: _Optional[int] = ..., strip_first: _Optional[int] = ..., strip_count: _Optional[int] = ..., staging_id: _Optional[int] = ..., staging_offset: _Optional[int] = ...) -> None: ...

class FillStrips(_message.Message):
    __slots__ = ("reservation_id", "fills", "at_once")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    fills: _containers.RepeatedCompositeFieldContainer[Fill]
    at_once: bool
    def __init__(self, reservation_id: _Optional[int] = ..., fills: _Optional[_Iterable[_Union[Fill, _Mapping]]] = ..., at_once: _Optional[bool] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("reservation_id", "fills", "shard", "supersedes")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    FILLS_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDES_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    fills: _containers.RepeatedCompositeFieldContainer[Fill]
    shard: int
    supersedes: bytes
    def __init__(self, reservation_id: _Optional[int] = ..., fills: _Optional[_Iterable[_Union[Fill, _Mapping]]] = ..., shard: _Optional[int] = ..., supersedes: _Optional[bytes] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("query", "timeout_seconds", "durability")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    query: ChainQuery
    timeout_seconds: float
    durability: Durability
    def __init__(self, query: _Optional[_Union[ChainQuery, _Mapping]] = ..., timeout_seconds: _Optional[float] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("reserve", "fill", "commit", "abort", "settle", "join")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    reserve: Reserve
    fill: FillStrips
    commit: Commit
    abort: Abort
    settle: Settle
    join: Join
    def __init__(self, reserve: _Optional[_Union[Reserve, _Mapping]] = ..., fill: _Optional[_Union[FillStrips, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., join: _Optional[_Union[Join, _Mapping]] = ...) -> None: ...

class TailsBeside(_message.Message):
    __slots__ = ("chunk", "lengths")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    lengths: bytes
    def __init__(self, chunk: _Optional[int] = ..., lengths: _Optional[bytes] = ...) -> None: ...

class LevelState(_message.Message):
    __slots__ = ("durability", "is_reached", "reason")
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    IS_REACHED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    durability: Durability
    is_reached: bool
    reason: str
    def __init__(self, durability: _Optional[_Union[Durability, str]] = ..., is_reached: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("reservation_id", "states", "durability", "committed_count", "refusal", "is_settled", "ticket", "tails", "levels")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    IS_SETTLED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    states: _containers.RepeatedScalarFieldContainer[StoreState]
    durability: Durability
    committed_count: int
    refusal: str
    is_settled: bool
    ticket: bytes
    tails: _containers.RepeatedCompositeFieldContainer[TailsBeside]
    levels: _containers.RepeatedCompositeFieldContainer[LevelState]
    def __init__(self, reservation_id: _Optional[int] = ..., states: _Optional[_Iterable[_Union[StoreState, str]]] = ..., durability: _Optional[_Union[Durability, str]] = ..., committed_count: _Optional[int] = ..., refusal: _Optional[str] = ..., is_settled: _Optional[bool] = ..., ticket: _Optional[bytes] = ..., tails: _Optional[_Iterable[_Union[TailsBeside, _Mapping]]] = ..., levels: _Optional[_Iterable[_Union[LevelState, _Mapping]]] = ...) -> None: ...
