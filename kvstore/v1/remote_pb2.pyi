from kvstore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("secret", "session_id", "server_pid", "message_bytes")
    SECRET_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_PID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    secret: bytes
    session_id: int
    server_pid: int
    message_bytes: int
    def __init__(self, secret: _Optional[bytes] = ..., session_id: _Optional[int] = ..., server_pid: _Optional[int] = ..., message_bytes: _Optional[int] = ...) -> None: ...

class StripRun(_message.Message):
    __slots__ = ("chunk", "strip_first", "strip_count", "byte_count")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STRIP_FIRST_FIELD_NUMBER: _ClassVar[int]
    STRIP_COUNT_FIELD_NUMBER: _ClassVar[int]
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    strip_first: int
    strip_count: int
    byte_count: int
    def __init__(self, chunk: _Optional[int] = ..., strip_first: _Optional[int] = ..., strip_count: _Optional[int] = ..., byte_count: _Optional[int] = ...) -> None: ...

class FetchBytesRequest(_message.Message):
    __slots__ = ("fetch", "head_first", "head_count")
    FETCH_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIRST_FIELD_NUMBER: _ClassVar[int]
    HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    fetch: _cache_pb2.FetchRequest
    head_first: int
    head_count: int
    def __init__(self, fetch: _Optional[_Union[_cache_pb2.FetchRequest, _Mapping]] = ..., head_first: _Optional[int] = ..., head_count: _Optional[int] = ...) -> None: ...

class FetchBytesResponse(_message.Message):
    __slots__ = ("head", "lost", "runs", "padding", "data")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    head: _cache_pb2.FetchResponse
    lost: _containers.RepeatedCompositeFieldContainer[_cache_pb2.Arrival]
    runs: _containers.RepeatedCompositeFieldContainer[StripRun]
    padding: bytes
    data: bytes
    def __init__(self, head: _Optional[_Union[_cache_pb2.FetchResponse, _Mapping]] = ..., lost: _Optional[_Iterable[_Union[_cache_pb2.Arrival, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[StripRun, _Mapping]]] = ..., padding: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreBytesRequest(_message.Message):
    __slots__ = ("reservation_id", "runs", "checksum", "padding", "data")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    runs: _containers.RepeatedCompositeFieldContainer[StripRun]
    checksum: bytes
    padding: bytes
    data: bytes
    def __init__(self, reservation_id: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[StripRun, _Mapping]]] = ..., checksum: _Optional[bytes] = ..., padding: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreBytesResponse(_message.Message):
    __slots__ = ("byte_count",)
    BYTE_COUNT_FIELD_NUMBER: _ClassVar[int]
    byte_count: int
    def __init__(self, byte_count: _Optional[int] = ...) -> None: ...
