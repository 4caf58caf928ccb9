from kvstore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

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
    __slots__ = ("model_id", "fingerprint", "chunk_count", "byte_count", "spec")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    fingerprint: bytes
    chunk_count: int
    byte_count: int
    spec: _cache_pb2.ModelSpec
    def __init__(self, model_id: _Optional[str] = ..., fingerprint: _Optional[bytes] = ..., chunk_count: _Optional[int] = ..., byte_count: _Optional[int] = ..., spec: _Optional[_Union[_cache_pb2.ModelSpec, _Mapping]] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("name", "state", "capacity_bytes", "file_bytes", "allocated_bytes", "free_bytes", "quarantined_bytes", "overhead_bytes", "chunk_count", "read_bytes", "written_bytes", "verified_bytes", "is_shared", "envelope")
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
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., capacity_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ..., allocated_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., quarantined_bytes: _Optional[int] = ..., overhead_bytes: _Optional[int] = ..., chunk_count: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ..., verified_bytes: _Optional[int] = ..., is_shared: _Optional[bool] = ..., envelope: _Optional[str] = ...) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("version", "uptime_seconds", "server_pid", "tenant", "arena", "sessions", "models", "counters", "tiers", "tier_problem", "backlog_chunk_count", "loading_bytes", "descriptor_count")
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
    def __init__(self, version: _Optional[str] = ..., uptime_seconds: _Optional[float] = ..., server_pid: _Optional[int] = ..., tenant: _Optional[str] = ..., arena: _Optional[_Union[ArenaStats, _Mapping]] = ..., sessions: _Optional[_Union[SessionStats, _Mapping]] = ..., models: _Optional[_Iterable[_Union[ModelStats, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., tiers: _Optional[_Iterable[_Union[TierStats, _Mapping]]] = ..., tier_problem: _Optional[str] = ..., backlog_chunk_count: _Optional[int] = ..., loading_bytes: _Optional[int] = ..., descriptor_count: _Optional[int] = ...) -> None: ...
