"""What the sessions of both planes have in common: calls, and their failures as typed errors."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from typing import Any

import grpc

from kvstore.errors import KVStoreError, Unavailable, from_status
from kvstore.wire import METADATA_ERROR
from kvstore_client.presence import Presence

RELEASES_KEPT = 256


class Calls:
    """A session's stubs and what every call carries."""

    plane: str
    cache: Any
    admin: Any
    channel: Any
    metadata: tuple[tuple[str, Any], ...]
    session_id: int
    server_pid: int
    presence: Presence | None = None
    """Where lookups need no call."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.ended = threading.Event()
        self.models: set[bytes] = set()
        self.staging: Any = None
        self.releasing: deque[Any] = deque(maxlen=RELEASES_KEPT)

    @property
    def is_usable(self) -> bool:
        return not self.ended.is_set() and self.pid == os.getpid()

    def settle_releases(self, timeout_s: float) -> None:
        """Wait until the leases given back so far are."""
        for future in list(self.releasing):
            try:
                future.result(timeout_s)
            except (grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                continue

    def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """A unary call. Raises the typed error its status means."""
        try:
            return method(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.RpcError as error:
            raise self.translated(error) from error
        except ValueError as error:
            raise Unavailable("the sidecar is gone") from error  # the channel was closed under the call

    @staticmethod
    def translated(error: grpc.RpcError) -> KVStoreError:
        """What a failed call means. A stream is its own error: without the frames it passed, or they and all they hold
        would hold each other."""
        error.__traceback__ = None
        fields: dict[str, Any] = {}
        for key, value in error.trailing_metadata() or ():
            if key == METADATA_ERROR:
                fields = json.loads(value)
        return from_status(error.code().name, error.details() or "", **{str(k): v for k, v in fields.items()})
