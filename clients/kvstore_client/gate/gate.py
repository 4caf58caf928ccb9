"""The gate: a valid profile of these weights permits lossy reuse, whose answers are checked while it is in use.

    permit = gate.permit(receiver_spec, sender_spec, "sibling")
    permit.setting            # None: not allowed, permit.reason says why
    if gate.is_due(permit):   # this request is checked: prefill it in full as well, and hand that out
        reason = gate.checked(permit, full_logits, lossy_logits)

A client's gate has an ``exchange``: profiles of this host are registered with the service, and a pair of which this
host has none goes by the service's.

Every ``check_every``-th lossy request of a pair is checked, the first one too; while there is evidence of drift, every
request is, so that few wrong answers get out before reuse is switched off. Then it stays off, in every process that
reads the same directory, until there is another profile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable
from kvstore.planning import FLOOR, Pair, Permit, Profile, Recompute, Ruling
from kvstore.planning.permit import INVALID, PROVENANCE
from kvstore.planning.profile import AGAIN, Origin
from kvstore.spec import ModelSpec
from kvstore_client.gate.drift import DriftWatch, misled
from kvstore_client.gate.exchange import ProfileExchange
from kvstore_client.gate.profiles import Profiles

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("kvstore.client")
CHECK_EVERY = 32


PERMITS_KEPT = 64
"""The most permits of one pair that are remembered: callers name their own floors."""
PAIRS_KEPT = 256
"""The most pairs whose files are remembered as read, those that were asked for last: a process that is given new
weights again and again, as in training, meets new pairs for ever. The first request of a pair that was forgotten is
checked."""
OFF_KEPT = 4096
"""The most profiles that this process remembers to have switched off, beside the notes in the directory: the newest."""


@dataclass
class _Watched:
    """One setting in use. ``until_check``: lossy requests before the next check."""

    watch: DriftWatch
    until_check: int = 0


@dataclass
class _State:
    """The state of a pair while its files stay unchanged. ``reason``: why nothing is permitted, whatever the floor;
    else empty. ``watched``: the settings in use, which follow from floors. ``permits``: those given so far."""

    stamp: tuple[object, ...]
    profile: Profile | None = None
    digest: str = ""
    reason: str = ""
    watched: dict[Recompute, _Watched] = field(default_factory=dict)
    permits: dict[tuple[ModelSpec, ModelSpec | None, float], Permit] = field(default_factory=dict)

    def permit(self, pair: Pair, receiver: ModelSpec, sender: ModelSpec | None, floor: float) -> Permit:
        """Return the permit for these specs at a floor."""
        key = receiver, sender, floor
        if key in self.permits:
            return self.permits[key]
        if len(self.permits) >= PERMITS_KEPT:
            self.permits.clear()
        profile, ruling = self.profile, Ruling(pair, reason=self.reason)
        if not self.reason:
            ruling = Ruling.of(pair, profile, floor)
        if profile is not None and ruling.point is not None:
            watch = DriftWatch(ruling.point.misled, profile.calibration.answers)
            self.watched.setdefault(ruling.point.setting, _Watched(watch))
        self.permits[key] = ruling.permit(receiver, sender)
        return self.permits[key]


DRIFT_COUNTERS = ("drift_checks", "drift_misled", "lossy_switched_off")


class Gate:
    """Lossy reuse of one client. Safe to share between threads; a forked child goes on by itself.

    ``floor``: the least share of full prefill's quality. ``counters``: drift_checks, drift_misled, lossy_switched_off.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        floor: float = FLOOR,
        check_every: int = CHECK_EVERY,
        counters: Counter[str] | None = None,
    ) -> None:
        if not 0.0 <= floor <= 1.0:
            raise InvalidRequest(f"floor {floor!r:.40} must be in 0..1, a share of full prefill's quality")
        if not isinstance(check_every, int) or check_every < 1:
            raise InvalidRequest(f"check_every {check_every!r:.40} must be a whole number of at least 1")
        self.floor = floor
        self.check_every = check_every
        self.counters = Counter[str]() if counters is None else counters
        self.exchange: ProfileExchange | None = None
        """The service's profiles; None: those of this host's directory alone."""
        self.is_connected = False
        """True once a client has it."""
        self._profiles = Profiles(directory)
        self._states: OrderedDict[Pair, _State] = OrderedDict()
        self._off: OrderedDict[str, str] = OrderedDict()
        self._pid, self._lock = os.getpid(), threading.Lock()

    def permit(
        self, receiver: ModelSpec, sender: ModelSpec | None, reuse: str, provenance: Origin | None = None, *,
        floor: float | None = None,
    ) -> Permit:  # fmt: skip
        """Return a permit that says if and how ``receiver`` may reuse these caches. Reads the profile when its file has
        changed; else it costs three stat calls. Where this host has no profile the service's is taken, which is
        asked for once a minute at most; this host's own is told to the service. ``provenance``: by default the one that
        the reuse implies. ``floor``: this request's; None: the gate's."""
        pair = Pair.of(receiver, sender, reuse, provenance or PROVENANCE.get(reuse, Origin.IN_CONTEXT))
        exchange = self.exchange
        found = exchange.find(pair) if exchange is not None and not self._profiles.has(pair) else None
        with self._locked():
            state, stamp = self._states.get(pair), (*self._profiles.stamp(pair), found)
            if state is None or state.stamp != stamp:
                state = self._states[pair] = self._opened(pair, stamp, found)
            self._states.move_to_end(pair)
            if len(self._states) > PAIRS_KEPT:
                self._states.popitem(last=False)
            if exchange is not None and state.profile is not None and found is None and not state.reason:
                exchange.tell(receiver, state.profile, state.digest)
            return state.permit(pair, receiver, sender, self.floor if floor is None else floor)

    def is_due(self, permit: Permit) -> bool:
        """Return True when a request under this permit is to be checked. Ask once per request."""
        with self._locked():
            watched = self._watched(permit)
            if watched is None:
                return False
            if watched.until_check and not watched.watch.is_suspicious:
                watched.until_check -= 1
                return False
            watched.until_check = self.check_every - 1
            return True

    def checked(self, permit: Permit, full: torch.Tensor, lossy: torch.Tensor) -> str:
        """Record one check: logits of the same token by a full and by the lossy prefill, [vocab_size]. Returns the text
        to report. Switches the pair off when answers have drifted."""
        wrong = bool(misled(full.reshape(1, -1), lossy.reshape(1, -1)))
        with self._locked():
            self.counters["drift_checks"] += 1
            self.counters["drift_misled"] += wrong
            state, watched = self._states.get(permit.pair), self._watched(permit)
            if state is None or watched is None or state.digest != permit.profile:
                return "checked against a full prefill, which is the answer"
            watched.watch.add(wrong)
            if watched.watch.has_drifted:
                return self._switch_off(permit.pair, state, watched.watch)
        found = "misled" if wrong else "agreed"
        return f"checked against a full prefill, which is the answer: lossy reuse {found}"

    def _watched(self, permit: Permit) -> _Watched | None:
        """Return the watch over the permit's setting; None where nothing is reused by it any more."""
        state = self._states.get(permit.pair)
        return None if state is None or permit.setting is None else state.watched.get(permit.setting)

    def _opened(self, pair: Pair, stamp: tuple[object, ...], found: Profile | None) -> _State:
        """Read the files, and return the state that follows from them. ``found``: the service's profile, for a host
        that has none."""
        try:
            profile = self._profiles.read(pair) or found
            digest = "" if profile is None else profile.digest
            off = profile and (self._off.get(digest) or self._profiles.switched_off(pair, profile))
            Ruling.of(pair, profile, self.floor, off or "")  # raises for a profile of another reuse
        except KVStoreError as error:
            reason, before = INVALID.format(error.message), self._states.get(pair)
            if before is None or before.reason != reason:
                _log.warning("kvstore: no lossy reuse: %s", error.message)
            # A file that cannot be read now, for lack of a descriptor perhaps, is read again for the next permit.
            return _State(() if isinstance(error, Unavailable) else stamp, reason=reason)
        return _State(stamp, profile, digest, off or "")

    def _switch_off(self, pair: Pair, state: _State, watch: DriftWatch) -> str:
        assert state.profile is not None
        reason = self._off[state.digest] = (
            f"lossy reuse was switched off: {watch.misled} of {watch.checks} checked answers misled, "
            f"more than the profile has it; {AGAIN}"
        )
        if len(self._off) > OFF_KEPT:
            self._off.popitem(last=False)
        self.counters["lossy_switched_off"] += 1
        _log.error("kvstore: %s (%s)", reason, self._profiles.path(pair))
        try:
            self._profiles.switch_off(pair, state.profile, reason)
        except KVStoreError as error:
            _log.warning("kvstore: other processes are not told: %s", error.message)
        # The files are read again for the next permit: there may be another profile by now.
        state.reason = reason
        state.watched.clear()
        state.permits.clear()
        return reason

    def _locked(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()  # a thread of the parent may hold its lock
        return self._lock
