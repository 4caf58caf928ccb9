from kvstore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PlanningMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLANNING_MODE_UNSPECIFIED: _ClassVar[PlanningMode]
    PLANNING_MODE_OFF: _ClassVar[PlanningMode]
    PLANNING_MODE_OBSERVE: _ClassVar[PlanningMode]
    PLANNING_MODE_ON: _ClassVar[PlanningMode]

class RequestClass(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REQUEST_CLASS_UNSPECIFIED: _ClassVar[RequestClass]
    REQUEST_CLASS_INTERACTIVE: _ClassVar[RequestClass]
    REQUEST_CLASS_BATCH: _ClassVar[RequestClass]

class Way(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAY_UNSPECIFIED: _ClassVar[Way]
    WAY_PREFILL: _ClassVar[Way]
    WAY_LOAD: _ClassVar[Way]
    WAY_FIRST: _ClassVar[Way]
    WAY_MEET: _ClassVar[Way]
    WAY_BLEND: _ClassVar[Way]
PLANNING_MODE_UNSPECIFIED: PlanningMode
PLANNING_MODE_OFF: PlanningMode
PLANNING_MODE_OBSERVE: PlanningMode
PLANNING_MODE_ON: PlanningMode
REQUEST_CLASS_UNSPECIFIED: RequestClass
REQUEST_CLASS_INTERACTIVE: RequestClass
REQUEST_CLASS_BATCH: RequestClass
WAY_UNSPECIFIED: Way
WAY_PREFILL: Way
WAY_LOAD: Way
WAY_FIRST: Way
WAY_MEET: Way
WAY_BLEND: Way

class RegisterProfileRequest(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: bytes
    def __init__(self, profile: _Optional[bytes] = ...) -> None: ...

class RegisterProfileResponse(_message.Message):
    __slots__ = ("is_kept",)
    IS_KEPT_FIELD_NUMBER: _ClassVar[int]
    is_kept: bool
    def __init__(self, is_kept: _Optional[bool] = ...) -> None: ...

class FindProfileRequest(_message.Message):
    __slots__ = ("receiver", "sender", "reuse", "provenance")
    RECEIVER_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    receiver: str
    sender: str
    reuse: str
    provenance: str
    def __init__(self, receiver: _Optional[str] = ..., sender: _Optional[str] = ..., reuse: _Optional[str] = ..., provenance: _Optional[str] = ...) -> None: ...

class FindProfileResponse(_message.Message):
    __slots__ = ("profile",)
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    profile: bytes
    def __init__(self, profile: _Optional[bytes] = ...) -> None: ...

class ComputeRate(_message.Message):
    __slots__ = ("pass_seconds", "token_seconds", "pair_seconds", "load", "caution", "sample_count", "most_tokens")
    PASS_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CAUTION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    MOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pass_seconds: float
    token_seconds: float
    pair_seconds: float
    load: float
    caution: float
    sample_count: int
    most_tokens: int
    def __init__(self, pass_seconds: _Optional[float] = ..., token_seconds: _Optional[float] = ..., pair_seconds: _Optional[float] = ..., load: _Optional[float] = ..., caution: _Optional[float] = ..., sample_count: _Optional[int] = ..., most_tokens: _Optional[int] = ...) -> None: ...

class LinkRate(_message.Message):
    __slots__ = ("latency_seconds", "byte_seconds", "caution", "sample_count", "least_bytes")
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CAUTION_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEAST_BYTES_FIELD_NUMBER: _ClassVar[int]
    latency_seconds: float
    byte_seconds: float
    caution: float
    sample_count: int
    least_bytes: int
    def __init__(self, latency_seconds: _Optional[float] = ..., byte_seconds: _Optional[float] = ..., caution: _Optional[float] = ..., sample_count: _Optional[int] = ..., least_bytes: _Optional[int] = ...) -> None: ...

class BeginPrefill(_message.Message):
    __slots__ = ("query", "token_count", "reusable_token_count", "step_tokens", "ways", "mode", "compute", "link", "readers", "deadline_seconds", "request_class", "with_places")
    QUERY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    REUSABLE_TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    WITH_PLACES_FIELD_NUMBER: _ClassVar[int]
    query: _cache_pb2.ChainQuery
    token_count: int
    reusable_token_count: int
    step_tokens: int
    ways: _containers.RepeatedScalarFieldContainer[Way]
    mode: PlanningMode
    compute: ComputeRate
    link: LinkRate
    readers: int
    deadline_seconds: float
    request_class: RequestClass
    with_places: bool
    def __init__(self, query: _Optional[_Union[_cache_pb2.ChainQuery, _Mapping]] = ..., token_count: _Optional[int] = ..., reusable_token_count: _Optional[int] = ..., step_tokens: _Optional[int] = ..., ways: _Optional[_Iterable[_Union[Way, str]]] = ..., mode: _Optional[_Union[PlanningMode, str]] = ..., compute: _Optional[_Union[ComputeRate, _Mapping]] = ..., link: _Optional[_Union[LinkRate, _Mapping]] = ..., readers: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., request_class: _Optional[_Union[RequestClass, str]] = ..., with_places: _Optional[bool] = ...) -> None: ...

class MeasuredPrefill(_message.Message):
    __slots__ = ("new_tokens", "context_tokens", "seconds", "passes")
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASSES_FIELD_NUMBER: _ClassVar[int]
    new_tokens: int
    context_tokens: int
    seconds: float
    passes: int
    def __init__(self, new_tokens: _Optional[int] = ..., context_tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., passes: _Optional[int] = ...) -> None: ...

class EndPrefill(_message.Message):
    __slots__ = ("ttft_seconds", "wait_seconds", "is_given_up", "computed")
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    ttft_seconds: float
    wait_seconds: float
    is_given_up: bool
    computed: MeasuredPrefill
    def __init__(self, ttft_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., is_given_up: _Optional[bool] = ..., computed: _Optional[_Union[MeasuredPrefill, _Mapping]] = ...) -> None: ...

class PartialPrefillRequest(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: BeginPrefill
    end: EndPrefill
    def __init__(self, begin: _Optional[_Union[BeginPrefill, _Mapping]] = ..., end: _Optional[_Union[EndPrefill, _Mapping]] = ...) -> None: ...

class RecomputeSetting(_message.Message):
    __slots__ = ("first_layer", "last_layer", "ratio", "selector", "metric", "gradual")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    METRIC_FIELD_NUMBER: _ClassVar[int]
    GRADUAL_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    ratio: float
    selector: str
    metric: str
    gradual: float
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., ratio: _Optional[float] = ..., selector: _Optional[str] = ..., metric: _Optional[str] = ..., gradual: _Optional[float] = ...) -> None: ...

class Candidate(_message.Message):
    __slots__ = ("way", "form", "load_start", "load_stop", "ttft_seconds", "ttft_high_seconds", "front_seconds", "load_seconds", "compute_seconds", "tier_seconds", "cost", "refused", "setting")
    WAY_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    LOAD_START_FIELD_NUMBER: _ClassVar[int]
    LOAD_STOP_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_HIGH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRONT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TIER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SETTING_FIELD_NUMBER: _ClassVar[int]
    way: Way
    form: str
    load_start: int
    load_stop: int
    ttft_seconds: float
    ttft_high_seconds: float
    front_seconds: float
    load_seconds: float
    compute_seconds: float
    tier_seconds: float
    cost: float
    refused: str
    setting: RecomputeSetting
    def __init__(self, way: _Optional[_Union[Way, str]] = ..., form: _Optional[str] = ..., load_start: _Optional[int] = ..., load_stop: _Optional[int] = ..., ttft_seconds: _Optional[float] = ..., ttft_high_seconds: _Optional[float] = ..., front_seconds: _Optional[float] = ..., load_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., tier_seconds: _Optional[float] = ..., cost: _Optional[float] = ..., refused: _Optional[str] = ..., setting: _Optional[_Union[RecomputeSetting, _Mapping]] = ...) -> None: ...

class LoadPlan(_message.Message):
    __slots__ = ("token_count", "candidates", "chosen", "why", "is_measured", "deadline_seconds")
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    IS_MEASURED_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    token_count: int
    candidates: _containers.RepeatedCompositeFieldContainer[Candidate]
    chosen: int
    why: str
    is_measured: bool
    deadline_seconds: float
    def __init__(self, token_count: _Optional[int] = ..., candidates: _Optional[_Iterable[_Union[Candidate, _Mapping]]] = ..., chosen: _Optional[int] = ..., why: _Optional[str] = ..., is_measured: _Optional[bool] = ..., deadline_seconds: _Optional[float] = ...) -> None: ...

class PartialPrefillResponse(_message.Message):
    __slots__ = ("found", "plan", "chunk_first", "chunk_count")
    FOUND_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIRST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_COUNT_FIELD_NUMBER: _ClassVar[int]
    found: _cache_pb2.LookupResponse
    plan: LoadPlan
    chunk_first: int
    chunk_count: int
    def __init__(self, found: _Optional[_Union[_cache_pb2.LookupResponse, _Mapping]] = ..., plan: _Optional[_Union[LoadPlan, _Mapping]] = ..., chunk_first: _Optional[int] = ..., chunk_count: _Optional[int] = ...) -> None: ...
