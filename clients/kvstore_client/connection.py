"""The way to the sidecar: one session at a time, opened again after it was lost, and a miss while it is gone."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from kvstore.errors import DeadlineExceeded, InvalidRequest, Unauthenticated, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams import Clock
from kvstore.spec import ModelSpec
from kvstore.v1 import cache_pb2 as pb
from kvstore.wire import spec_to_message
from kvstore_client.prefix import AnySession
from kvstore_client.remote.place import Place

RECONNECT_INTERVAL_S = 0.5
_GONE = (Unavailable, Unauthenticated, DeadlineExceeded)
_log = logging.getLogger("kvstore.client")
Result = TypeVar("Result")


class Connection:
    """The session to one place. Safe to share between threads; a forked child gets a session of its own."""

    def __init__(self, place: Place, clock: Clock, timeout_s: float) -> None:
        self.place = place
        self._clock = clock
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._session: AnySession | None = None
        self._retry_at_s = 0.0
        self._has_warned = False
        self._is_closed = False
        self.counters: Counter[str] = Counter()

    def session(self) -> AnySession:
        """The live session, connecting if there is none. Raises Unavailable, at once while backing off."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._session = os.getpid(), threading.Lock(), None
        with self._lock:
            if self._is_closed:
                raise Unavailable("this client is closed")
            if self._session is not None and self._session.is_usable:
                return self._session
            now = self._clock.monotonic()
            if now < self._retry_at_s:
                raise Unavailable(f"the sidecar at {self.place} is gone; trying again soon")
            try:
                self._session = session = self.place.open(self._timeout_s)
            except BaseException:
                # Who waited meanwhile does not wait as long again.
                self._retry_at_s = self._clock.monotonic() + RECONNECT_INTERVAL_S
                raise
            self._retry_at_s = 0.0
            self.counters["sessions"] += 1
            self._has_warned = False
            return session

    def at_hand(self, spec: ModelSpec) -> tuple[AnySession, bytes] | None:
        """As ``ready``, where that takes neither a call nor a connection; else None."""
        session, name = self._session, fingerprint(spec, spec.kind)
        if session is None or not session.is_usable or self._is_closed or name not in session.models:
            return None
        return session, name

    def ready(self, spec: ModelSpec) -> tuple[AnySession, bytes]:
        """A session that knows the model, and the model's name there."""
        session = self.session()
        name = fingerprint(spec, spec.kind)
        if name not in session.models:
            request = pb.RegisterModelRequest(spec=spec_to_message(spec))
            reply = session.call(session.cache.RegisterModel, request, self._timeout_s)
            if reply.fingerprint != name:
                raise InvalidRequest("client and sidecar name this model differently: use the same release of both")
            session.models.add(name)
        return session, name

    def or_gone(self, call: Callable[[], Result], otherwise: Callable[[str], Result]) -> Result:
        """``call``, or ``otherwise`` when the sidecar is gone: one warning, a counter, and the engine goes on."""
        try:
            return call()
        except _GONE as error:
            self.counters["unavailable"] += 1
            session = self._session
            if isinstance(error, Unauthenticated) and session is not None:
                session.close()
            if not self._has_warned:
                self._has_warned = True
                _log.warning("kvstore: %s; going on without it", error.message)
            return otherwise(error.message)

    def close(self) -> None:
        """End the session, for good. Idempotent."""
        if self._pid != os.getpid():
            self._pid, self._lock, self._session = os.getpid(), threading.Lock(), None
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()
