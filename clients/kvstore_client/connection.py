"""The connection to the sidecar: one session at a time, reopened after a loss. Calls miss while the sidecar is gone."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Self

from kvstore.errors import DeadlineExceeded, KVStoreError, Unauthenticated, Unavailable
from kvstore.keys import fingerprint
from kvstore.seams import Clock
from kvstore.spec import ModelSpec
from kvstore_client.forks import in_children
from kvstore_client.planes.place import Place
from kvstore_client.planes.session import ClientSession

RECONNECT_INTERVAL_S = 0.5
NAMES_MAX = 64
_GONE = (Unavailable, Unauthenticated, DeadlineExceeded)
_log = logging.getLogger("kvstore.client")


class Miss:
    """The context manager of ``Connection.or_miss``. ``why``: the reason why the sidecar is gone, or empty.
    ``is_late``: True when it may be there, but did not answer in time."""

    why = ""
    is_late = False

    def __init__(self, lost: Callable[[KVStoreError], None]) -> None:
        self._lost = lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, _GONE):
            return False
        self.why, self.is_late = error.message, isinstance(error, DeadlineExceeded)
        self._lost(error)
        return True


class Connection:
    """The session to one place. Safe to share between threads; a forked child gets a session of its own. The thread
    that has a lock can take it again: a signal handler, as an engine's for SIGTERM, may close a client while its own
    thread connects."""

    def __init__(self, place: Place, clock: Clock, timeout_s: float) -> None:
        self.place = place
        self._clock = clock
        self._timeout_s = timeout_s
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._counting = threading.RLock()
        self._session: ClientSession | None = None
        self._retry_at_s = 0.0
        self._has_warned = False
        self._is_closed = False
        self._names: dict[int, tuple[ModelSpec, bytes]] = {}
        self.counters: Counter[str] = Counter()
        in_children(self._renew_counting)

    def _renew_counting(self) -> None:
        self._counting = threading.RLock()

    def _begin_in_child(self) -> None:
        """Begin anew in a forked child. Not at the fork: gRPC's objects of the parent's session must be kept before.
        Several threads may come here at once, and the lock that they find may be taken for ever."""
        if self._pid != os.getpid():
            with self._counting:
                if self._pid != os.getpid():
                    self._lock, self._session = threading.RLock(), None
                    self._pid = os.getpid()  # last: who sees it takes the lock

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter. From any thread."""
        with self._counting:
            self.counters[name] += amount

    def session(self) -> ClientSession:
        """Return the live session; connect if there is none. Raises Unavailable, at once while backing off."""
        self._begin_in_child()
        with self._lock:
            if self._is_closed:
                raise Unavailable("this client is closed")
            if self._session is not None and self._session.is_usable:
                return self._session
            now = self._clock.monotonic()
            if now < self._retry_at_s:
                raise Unavailable(f"the sidecar at {self.place} is gone; trying again soon")
            try:
                session = self.place.open(self._timeout_s)
            except BaseException:
                # Threads that waited for the lock fail at once: they do not try, and wait, again.
                self._retry_at_s = self._clock.monotonic() + RECONNECT_INTERVAL_S
                raise
            self._session = session
            if self._is_closed:  # by a signal handler, meanwhile
                session.close()
                raise Unavailable("this client is closed")
            self._retry_at_s = 0.0
            self.count("sessions")
            self._has_warned = False
            return session

    def _name_of(self, spec: ModelSpec) -> bytes:
        """Return the model's fingerprint. Those of some specs are found by the object alone, because comparing specs
        costs more than the rest of a lookup."""
        known = self._names.get(id(spec))
        if known is None or known[0] is not spec:
            if len(self._names) >= NAMES_MAX:
                self._names.clear()
            known = self._names[id(spec)] = spec, fingerprint(spec, spec.kind)
        return known[1]

    def at_hand(self, spec: ModelSpec) -> tuple[ClientSession, bytes] | None:
        """Return as ``ready`` does when that takes neither a call nor a connection; else None."""
        session, name = self._session, self._name_of(spec)
        if session is None or not session.is_usable or self._is_closed or name not in session.models:
            return None
        return session, name

    def ready(self, spec: ModelSpec) -> tuple[ClientSession, bytes]:
        """Return a session that has the model registered, and the model's fingerprint."""
        at_hand = self.at_hand(spec)
        if at_hand is not None:
            return at_hand
        session = self.session()
        name = self._name_of(spec)
        if name not in session.models:
            session.register(spec, name, self._timeout_s)
        return session, name

    def or_miss(self) -> Miss:
        """Turn a lost sidecar into a miss: ``with connection.or_miss() as miss:``. An error inside because the sidecar
        is gone ends there, with one warning and a counter. The code after the block returns a miss, and the engine goes
        on."""
        return Miss(self._lost)

    def _lost(self, error: KVStoreError) -> None:
        self.count("unavailable")
        session = self._session
        if isinstance(error, Unauthenticated) and session is not None:
            session.close()
        if not self._has_warned:
            self._has_warned = True
            _log.warning("kvstore: %s; going on without it", error.message)

    def close(self) -> None:
        """End the session, for good. Idempotent."""
        self._begin_in_child()
        with self._lock:
            self._is_closed = True
            if self._session is not None:
                self._session.close()
