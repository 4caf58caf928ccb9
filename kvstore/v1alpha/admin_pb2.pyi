from kvstore.v1 import cache_pb2 as _cache_pb2
from kvstore.v1alpha import prefill_pb2 as _prefill_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnginePrefills(_message.Message):
    __slots__ = ("fingerprint", "step_tokens", "prefills")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    step_tokens: int
    prefills: _containers.RepeatedCompositeFieldContainer[_prefill_pb2.MeasuredPrefill]
    def __init__(self, fingerprint: _Optional[bytes] = ..., step_tokens: _Optional[int] = ..., prefills: _Optional[_Iterable[_Union[_prefill_pb2.MeasuredPrefill, _Mapping]]] = ...) -> None: ...

class PlannedPrompt(_message.Message):
    __slots__ = ("fingerprint", "step_tokens", "mode", "plan", "stored_token_count", "end", "age_seconds")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    step_tokens: int
    mode: _prefill_pb2.PlanningMode
    plan: _prefill_pb2.LoadPlan
    stored_token_count: int
    end: _prefill_pb2.EndPrefill
    age_seconds: float
    def __init__(self, fingerprint: _Optional[bytes] = ..., step_tokens: _Optional[int] = ..., mode: _Optional[_Union[_prefill_pb2.PlanningMode, str]] = ..., plan: _Optional[_Union[_prefill_pb2.LoadPlan, _Mapping]] = ..., stored_token_count: _Optional[int] = ..., end: _Optional[_Union[_prefill_pb2.EndPrefill, _Mapping]] = ..., age_seconds: _Optional[float] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ("computed", "planned")
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    computed: _containers.RepeatedCompositeFieldContainer[EnginePrefills]
    planned: _containers.RepeatedCompositeFieldContainer[PlannedPrompt]
    def __init__(self, computed: _Optional[_Iterable[_Union[EnginePrefills, _Mapping]]] = ..., planned: _Optional[_Iterable[_Union[PlannedPrompt, _Mapping]]] = ...) -> None: ...

class ArenaStats(_message.Message):
    __slots__ = ("capacity_bytes", "prefaulted_bytes", "used_bytes", "leased_bytes", "pinned_bytes", "region_count", "chunk_count", "reserved_bytes")
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REGION_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    prefaulted_bytes: int
    used_bytes: int
    leased_bytes: int
    pinned_bytes: int
    region_count: int
    chunk_count: int
    reserved_bytes: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., region_count: _Optional[int] = ..., chunk_count: _Optional[int] = ..., reserved_bytes: _Optional[int] = ...) -> None: ...

class SessionStats(_message.Message):
    __slots__ = ("session_count", "reservation_count", "lease_count", "staging_bytes", "stream_count", "ticket_count", "ticket_bytes", "watcher_count")
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKET_COUNT_FIELD_NUMBER: _ClassVar[int]
    TICKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    WATCHER_COUNT_FIELD_NUMBER: _ClassVar[int]
    session_count: int
    reservation_count: int
    lease_count: int
    staging_bytes: int
    stream_count: int
    ticket_count: int
    ticket_bytes: int
    watcher_count: int
    def __init__(self, session_count: _Optional[int] = ..., reservation_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., stream_count: _Optional[int] = ..., ticket_count: _Optional[int] = ..., ticket_bytes: _Optional[int] = ..., watcher_count: _Optional[int] = ...) -> None: ...

class ModelStats(_message.Message):
    __slots__ = ("model_id", "fingerprint", "chunk_count", "byte_count", "spec", "served", "served_hours")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    SERVED_HOURS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    fingerprint: bytes
    chunk_count: int
    byte_count: int
    spec: _cache_pb2.ModelSpec
    served: Saving
    served_hours: _containers.RepeatedCompositeFieldContainer[ServedHour]
    def __init__(self, model_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., chunk_count: _Optional[int] = ..., byte_count: _Optional[int] = ..., spec: _Optional[_Union[_cache_pb2.ModelSpec, _Mapping]] = ..., served: _Optional[_Union[Saving, _Mapping]] = ..., served_hours: _Optional[_Iterable[_Union[ServedHour, _Mapping]]] = ...) -> None: ...

class Saving(_message.Message):
    __slots__ = ("fetch_count", "token_count", "saved_seconds")
    FETCH_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    fetch_count: int
    token_count: int
    saved_seconds: float
    def __init__(self, fetch_count: _Optional[int] = ..., token_count: _Optional[int] = ..., saved_seconds: _Optional[float] = ...) -> None: ...

class ServedHour(_message.Message):
    __slots__ = ("start_seconds", "saving")
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SAVING_FIELD_NUMBER: _ClassVar[int]
    start_seconds: int
    saving: Saving
    def __init__(self, start_seconds: _Optional[int] = ..., saving: _Optional[_Union[Saving, _Mapping]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "state", "capacity_bytes", "file_bytes", "allocated_bytes", "free_bytes", "quarantined_bytes", "overhead_bytes", "chunk_count", "read_bytes", "written_bytes", "verified_bytes", "is_shared", "envelope", "state_seconds", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    STATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    capacity_bytes: int
    file_bytes: int
    allocated_bytes: int
    free_bytes: int
    quarantined_bytes: int
    overhead_bytes: int
    chunk_count: int
    read_bytes: int
    written_bytes: int
    verified_bytes: int
    is_shared: bool
    envelope: str
    state_seconds: float
    reason: str
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., overhead_bytes: _Optional[int] = ..., chunk_count: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., verified_bytes: _Optional[int] = ..., is_shared: _Optional[bool] = ..., envelope: _Optional[str] = ..., state_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class TierRate(_message.Message):
    __slots__ = ("tier", "kind", "bytes_per_second", "latency_seconds", "caution", "confidence", "sample_count", "queued_bytes", "least_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAUTION_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    kind: _cache_pb2.Tier
    bytes_per_second: float
    latency_seconds: float
    caution: float
    confidence: float
    sample_count: int
    queued_bytes: int
    least_bytes: int
    def __init__(self, tier: _Optional[str] = ..., kind: _Optional[_Union[_cache_pb2.Tier, str]] = ..., bytes_per_second: _Optional[float] = ..., latency_seconds: _Optional[float] = ..., caution: _Optional[float] = ..., confidence: _Optional[float] = ..., sample_count: _Optional[int] = ..., queued_bytes: _Optional[int] = ..., least_bytes: _Optional[int] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "uptime_seconds", "server_pid", "tenant", "arena", "sessions", "models", "counters", "tiers", "tier_problem", "backlog_chunk_count", "loading_bytes", "descriptor_count", "rates", "engines", "served_of_forgotten")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SERVER_PID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    TIER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOADING_BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    SERVED_OF_FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_seconds: float
    server_pid: int
    tenant: str
    arena: ArenaStats
    sessions: SessionStats
    models: _containers.RepeatedCompositeFieldContainer[ModelStats]
    counters: _containers.ScalarMap[str, int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierStats]
    tier_problem: str
    backlog_chunk_count: int
    loading_bytes: int
    descriptor_count: int
    rates: _containers.RepeatedCompositeFieldContainer[TierRate]
    engines: _containers.RepeatedCompositeFieldContainer[EngineRate]
    served_of_forgotten: Saving
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., server_pid: _Optional[int] = ..., tenant: _Optional[str] = ..., arena: _Optional[_Union[ArenaStats, _Mapping]] = ..., sessions: _Optional[_Union[SessionStats, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., tier_problem: _Optional[str] = ..., backlog_chunk_count: _Optional[int] = ..., loading_bytes: _Optional[int] = ..., descriptor_count: _Optional[int] = ..., rates: _Optional[_Iterable[_Union[TierRate, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[EngineRate, _Mapping]]] = ..., served_of_forgotten: _Optional[_Union[Saving, _Mapping]] = ...) -> None: ...

class EngineRate(_message.Message):
    __slots__ = ("fingerprint", "model_id", "step_tokens", "rate", "confidence")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RATE_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    model_id: str
    step_tokens: int
    rate: _prefill_pb2.ComputeRate
    confidence: float
    def __init__(self, fingerprint: _Optional[bytes] = ..., model_id: _Optional[str] = ..., step_tokens: _Optional[int] = ..., rate: _Optional[_Union[_prefill_pb2.ComputeRate, _Mapping]] = ..., confidence: _Optional[float] = ...) -> None: ...

class TiersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WaitingMoves(_message.Message):
    __slots__ = ("interactive", "standard", "batch", "moving")
    INTERACTIVE_FIELD_NUMBER: _ClassVar[int]
    STANDARD_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    interactive: int
    standard: int
    batch: int
    moving: int
    def __init__(self, interactive: _Optional[int] = ..., standard: _Optional[int] = ..., batch: _Optional[int] = ..., moving: _Optional[int] = ...) -> None: ...

class EncodingReport(_message.Message):
    __slots__ = ("fingerprint", "encoding", "sample_count", "ratio", "encode_bytes_per_second", "decode_bytes_per_second", "line_bytes_per_second")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    ENCODE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LINE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    encoding: str
    sample_count: int
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float
    line_bytes_per_second: float
    def __init__(self, fingerprint: _Optional[bytes] = ..., encoding: _Optional[str] = ..., sample_count: _Optional[int] = ..., ratio: _Optional[float] = ..., encode_bytes_per_second: _Optional[float] = ..., decode_bytes_per_second: _Optional[float] = ..., line_bytes_per_second: _Optional[float] = ...) -> None: ...

class TierReport(_message.Message):
    __slots__ = ("stats", "kind", "durability", "backlog_chunk_count", "problem", "stalled_seconds", "write_policy", "is_draining", "waiting", "encodings")
    STATS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    STALLED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WRITE_POLICY_FIELD_NUMBER: _ClassVar[int]
    IS_DRAINING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    ENCODINGS_FIELD_NUMBER: _ClassVar[int]
    stats: TierStats
    kind: _cache_pb2.Tier
    durability: _cache_pb2.Durability
    backlog_chunk_count: int
    problem: str
    stalled_seconds: float
    write_policy: str
    is_draining: bool
    waiting: WaitingMoves
    encodings: _containers.RepeatedCompositeFieldContainer[EncodingReport]
    def __init__(self, stats: _Optional[_Union[TierStats, _Mapping]] = ..., kind: _Optional[_Union[_cache_pb2.Tier, str]] = ..., durability: _Optional[_Union[_cache_pb2.Durability, str]] = ..., backlog_chunk_count: _Optional[int] = ..., problem: _Optional[str] = ..., stalled_seconds: _Optional[float] = ..., write_policy: _Optional[str] = ..., is_draining: _Optional[bool] = ..., waiting: _Optional[_Union[WaitingMoves, _Mapping]] = ..., encodings: _Optional[_Iterable[_Union[EncodingReport, _Mapping]]] = ...) -> None: ...

class TiersResponse(_message.Message):
    __slots__ = ("tiers", "absent", "tenant")
    TIERS_FIELD_NUMBER: _ClassVar[int]
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.RepeatedCompositeFieldContainer[TierReport]
    absent: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    def __init__(self, tiers: _Optional[_Iterable[_Union[TierReport, _Mapping]]] = ..., absent: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("model", "digest", "tier", "older_than_seconds", "byte_count_min", "byte_count_max", "use_count_max", "chain")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_MIN_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_MAX_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    model: str
    digest: str
    tier: str
    older_than_seconds: int
    byte_count_min: int
    byte_count_max: int
    use_count_max: int
    chain: bytes
    def __init__(self, model: _Optional[str] = ..., digest: _Optional[str] = ..., tier: _Optional[str] = ..., older_than_seconds: _Optional[int] = ..., byte_count_min: _Optional[int] = ..., byte_count_max: _Optional[int] = ..., use_count_max: _Optional[int] = ..., chain: _Optional[bytes] = ...) -> None: ...

class ListChunksRequest(_message.Message):
    __slots__ = ("selection", "limit")
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    selection: Selection
    limit: int
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping]] = ..., limit: _Optional[int] = ...) -> None: ...

class ListChunksResponse(_message.Message):
    __slots__ = ("chunks", "totals", "is_last")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[ChunkEntry]
    totals: _containers.RepeatedCompositeFieldContainer[ModelTotal]
    is_last: bool
    def __init__(self, chunks: _Optional[_Iterable[_Union[ChunkEntry, _Mapping]]] = ..., totals: _Optional[_Iterable[_Union[ModelTotal, _Mapping]]] = ..., is_last: _Optional[bool] = ...) -> None: ...

class ChunkCopy(_message.Message):
    __slots__ = ("tier", "kind", "encoding", "is_proven", "is_shared")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    IS_PROVEN_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    tier: str
    kind: _cache_pb2.Tier
    encoding: _cache_pb2.Encoding
    is_proven: bool
    is_shared: bool
    def __init__(self, tier: _Optional[str] = ..., kind: _Optional[_Union[_cache_pb2.Tier, str]] = ..., encoding: _Optional[_Union[_cache_pb2.Encoding, str]] = ..., is_proven: _Optional[bool] = ..., is_shared: _Optional[bool] = ...) -> None: ...

class ChunkEntry(_message.Message):
    __slots__ = ("digest", "parent", "fingerprint", "model_id", "e_layer", "provenance", "exactness", "token_count", "byte_count", "copies", "use_count", "child_count", "is_held", "stored_seconds", "is_pinned")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    E_LAYER_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    USE_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHILD_COUNT_FIELD_NUMBER: _ClassVar[int]
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    STORED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_PINNED_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    parent: bytes
    fingerprint: bytes
    model_id: str
    e_layer: int
    provenance: _cache_pb2.Provenance
    exactness: _cache_pb2.Exactness
    token_count: int
    byte_count: int
    copies: _containers.RepeatedCompositeFieldContainer[ChunkCopy]
    use_count: int
    child_count: int
    is_held: bool
    stored_seconds: int
    is_pinned: bool
    def __init__(self, digest: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., model_id: _Optional[str] = ..., e_layer: _Optional[int] = ..., provenance: _Optional[_Union[_cache_pb2.Provenance, str]] = ..., exactness: _Optional[_Union[_cache_pb2.Exactness, str]] = ..., token_count: _Optional[int] = ..., byte_count: _Optional[int] = ..., copies: _Optional[_Iterable[_Union[ChunkCopy, _Mapping]]] = ..., use_count: _Optional[int] = ..., child_count: _Optional[int] = ..., is_held: _Optional[bool] = ..., stored_seconds: _Optional[int] = ..., is_pinned: _Optional[bool] = ...) -> None: ...

class TierTotal(_message.Message):
    __slots__ = ("tier", "chunk_count", "byte_count")
    TIER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    tier: str
    chunk_count: int
    byte_count: int
    def __init__(self, tier: _Optional[str] = ..., chunk_count: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class ModelTotal(_message.Message):
    __slots__ = ("fingerprint", "model_id", "chunk_count", "byte_count", "tiers", "profiles")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    PROFILES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: bytes
    model_id: str
    chunk_count: int
    byte_count: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierTotal]
    profiles: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, fingerprint: _Optional[bytes] = ..., model_id: _Optional[str] = ..., chunk_count: _Optional[int] = ..., byte_count: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierTotal, _Mapping]]] = ..., profiles: _Optional[_Iterable[str]] = ...) -> None: ...

class ShowChunkRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class HeaderFacts(_message.Message):
    __slots__ = ("kind", "write_id", "storage_key", "first_position", "token_digest", "rope_digest", "strip_count", "tier")
    KIND_FIELD_NUMBER: _ClassVar[int]
    WRITE_ID_FIELD_NUMBER: _ClassVar[int]
    STORAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROPE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STRIP_COUNT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    kind: str
    write_id: bytes
    storage_key: bytes
    first_position: int
    token_digest: bytes
    rope_digest: bytes
    strip_count: int
    tier: str
    def __init__(self, kind: _Optional[str] = ..., write_id: _Optional[bytes] = ..., storage_key: _Optional[bytes] = ..., first_position: _Optional[int] = ..., token_digest: _Optional[bytes] = ..., rope_digest: _Optional[bytes] = ..., strip_count: _Optional[int] = ..., tier: _Optional[str] = ...) -> None: ...

class ChunkDetail(_message.Message):
    __slots__ = ("chunk", "header", "header_problem", "ancestors", "ancestor_count", "children", "lease_count", "hold_count", "levels")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    HEADER_PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ANCESTORS_FIELD_NUMBER: _ClassVar[int]
    ANCESTOR_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    HOLD_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    chunk: ChunkEntry
    header: HeaderFacts
    header_problem: str
    ancestors: bytes
    ancestor_count: int
    children: bytes
    lease_count: int
    hold_count: int
    levels: _containers.RepeatedScalarFieldContainer[_cache_pb2.Durability]
    def __init__(self, chunk: _Optional[_Union[ChunkEntry, _Mapping]] = ..., header: _Optional[_Union[HeaderFacts, _Mapping]] = ..., header_problem: _Optional[str] = ..., ancestors: _Optional[bytes] = ..., ancestor_count: _Optional[int] = ..., children: _Optional[bytes] = ..., lease_count: _Optional[int] = ..., hold_count: _Optional[int] = ..., levels: _Optional[_Iterable[_Union[_cache_pb2.Durability, str]]] = ...) -> None: ...

class ShowChunkResponse(_message.Message):
    __slots__ = ("parts", "reason")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[ChunkDetail]
    reason: _cache_pb2.MissReason
    def __init__(self, parts: _Optional[_Iterable[_Union[ChunkDetail, _Mapping]]] = ..., reason: _Optional[_Union[_cache_pb2.MissReason, str]] = ...) -> None: ...

class ReloadRequest(_message.Message):
    __slots__ = ("dry_run",)
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    def __init__(self, dry_run: _Optional[bool] = ...) -> None: ...

class SettingChange(_message.Message):
    __slots__ = ("name", "before", "after", "is_live")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    IS_LIVE_FIELD_NUMBER: _ClassVar[int]
    name: str
    before: str
    after: str
    is_live: bool
    def __init__(self, name: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., is_live: _Optional[bool] = ...) -> None: ...

class ReloadResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SettingChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[SettingChange, _Mapping]]] = ...) -> None: ...

class HottestRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class HotPrefix(_message.Message):
    __slots__ = ("above", "digest", "model_id", "fingerprint", "token_count", "heat", "own_heat", "tier")
    ABOVE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAT_FIELD_NUMBER: _ClassVar[int]
    OWN_HEAT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    above: int
    digest: bytes
    model_id: str
    fingerprint: bytes
    token_count: int
    heat: float
    own_heat: float
    tier: str
    def __init__(self, above: _Optional[int] = ..., digest: _Optional[bytes] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., token_count: _Optional[int] = ..., heat: _Optional[float] = ..., own_heat: _Optional[float] = ..., tier: _Optional[str] = ...) -> None: ...

class HottestResponse(_message.Message):
    __slots__ = ("prefixes",)
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    prefixes: _containers.RepeatedCompositeFieldContainer[HotPrefix]
    def __init__(self, prefixes: _Optional[_Iterable[_Union[HotPrefix, _Mapping]]] = ...) -> None: ...

class Evict(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pin(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: int
    def __init__(self, seconds: _Optional[int] = ...) -> None: ...

class Unpin(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Move(_message.Message):
    __slots__ = ("tier", "keep")
    TIER_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    tier: str
    keep: bool
    def __init__(self, tier: _Optional[str] = ..., keep: _Optional[bool] = ...) -> None: ...

class Prefetch(_message.Message):
    __slots__ = ("query",)
    QUERY_FIELD_NUMBER: _ClassVar[int]
    query: _cache_pb2.ChainQuery
    def __init__(self, query: _Optional[_Union[_cache_pb2.ChainQuery, _Mapping]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Drain(_message.Message):
    __slots__ = ("end", "service")
    END_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    end: bool
    service: bool
    def __init__(self, end: _Optional[bool] = ..., service: _Optional[bool] = ...) -> None: ...

class ChangeRequest(_message.Message):
    __slots__ = ("dry_run", "selection", "evict", "pin", "unpin", "move", "prefetch", "verify", "drain")
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    EVICT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    UNPIN_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    dry_run: bool
    selection: Selection
    evict: Evict
    pin: Pin
    unpin: Unpin
    move: Move
    prefetch: Prefetch
    verify: Verify
    drain: Drain
    def __init__(self, dry_run: _Optional[bool] = ..., selection: _Optional[_Union[Selection, _Mapping]] = ..., evict: _Optional[_Union[Evict, _Mapping]] = ..., pin: _Optional[_Union[Pin, _Mapping]] = ..., unpin: _Optional[_Union[Unpin, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., prefetch: _Optional[_Union[Prefetch, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("what", "chunk_count", "byte_count")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    what: str
    chunk_count: int
    byte_count: int
    def __init__(self, what: _Optional[str] = ..., chunk_count: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class ChangeResponse(_message.Message):
    __slots__ = ("done_count", "total_count", "outcomes", "problem", "is_last", "refuses_stores")
    DONE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    REFUSES_STORES_FIELD_NUMBER: _ClassVar[int]
    done_count: int
    total_count: int
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    problem: str
    is_last: bool
    refuses_stores: bool
    def __init__(self, done_count: _Optional[int] = ..., total_count: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., problem: _Optional[str] = ..., is_last: _Optional[bool] = ..., refuses_stores: _Optional[bool] = ...) -> None: ...

class PlansRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class PlanEntry(_message.Message):
    __slots__ = ("number", "began_seconds", "fingerprint", "model_id", "step_tokens", "mode", "plan", "stored_token_count", "state", "end")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    BEGAN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    STORED_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    number: int
    began_seconds: float
    fingerprint: bytes
    model_id: str
    step_tokens: int
    mode: _prefill_pb2.PlanningMode
    plan: _prefill_pb2.LoadPlan
    stored_token_count: int
    state: str
    end: _prefill_pb2.EndPrefill
    def __init__(self, number: _Optional[int] = ..., began_seconds: _Optional[float] = ..., fingerprint: _Optional[bytes] = ..., model_id: _Optional[str] = ..., step_tokens: _Optional[int] = ..., mode: _Optional[_Union[_prefill_pb2.PlanningMode, str]] = ..., plan: _Optional[_Union[_prefill_pb2.LoadPlan, _Mapping]] = ..., stored_token_count: _Optional[int] = ..., state: _Optional[str] = ..., end: _Optional[_Union[_prefill_pb2.EndPrefill, _Mapping]] = ...) -> None: ...

class PlansResponse(_message.Message):
    __slots__ = ("plans",)
    PLANS_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[PlanEntry]
    def __init__(self, plans: _Optional[_Iterable[_Union[PlanEntry, _Mapping]]] = ...) -> None: ...
