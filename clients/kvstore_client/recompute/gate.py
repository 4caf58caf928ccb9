"""The gate: lossy reuse is let through by a valid profile of these weights, and watched while it is in use.

    permit = gate.permit(receiver_spec, sender_spec, "sibling")
    permit.setting            # None: not allowed, permit.reason says why
    if gate.is_due(permit):   # this request is checked: prefill it in full as well, and hand that out
        reason = gate.checked(permit, full_logits, lossy_logits)

Every ``check_every``-th lossy request of a pair is checked, the first one too; while there is evidence of drift, every
one, so that few wrong answers get out before it is switched off. Then it stays off, in every process that reads the
same directory, until there is another profile.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.spec import ModelSpec, Provenance
from kvstore_client.recompute.drift import DriftWatch, misled
from kvstore_client.recompute.profile import AGAIN, Point, Profile
from kvstore_client.recompute.profiles import Pair, Profiles
from kvstore_client.setting import Recompute

_log = logging.getLogger("kvstore.client")
FLOOR = 0.99
CHECK_EVERY = 32
UNPROFILED = (
    "no valid profile for these weights: only the exact prefix is reused; run kvstore profile, or give recompute="
)
PROVENANCE = {"position": Provenance.STANDALONE, "sibling": Provenance.IN_CONTEXT, "both": Provenance.STANDALONE}


@dataclass(frozen=True)
class Permit:
    """What the gate says to one pair: a setting, or None and the ``reason``."""

    pair: Pair
    setting: Recompute | None = None
    reason: str = ""
    profile: str = ""


@dataclass
class _State:
    """What is known of a pair while its files stay as they are. ``specs``: what the profile says to the specs that were
    asked for, empty: it is about them. ``until_check``: lossy requests before the next check."""

    stamp: tuple[object, ...]
    profile: Profile | None = None
    digest: str = ""
    point: Point | None = None
    reason: str = ""
    watch: DriftWatch | None = None
    until_check: int = 0
    specs: dict[tuple[ModelSpec, ModelSpec | None], str] = field(default_factory=dict)


class Gate:
    """Lossy reuse of one client. Safe to share between threads; a forked child goes on by itself.

    ``floor``: the least share of full prefill's quality. ``counters``: drift_checks, drift_misled,
    lossy_switched_off."""

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
        self._profiles = Profiles(directory)
        self._states: dict[Pair, _State] = {}
        self._off: dict[str, str] = {}
        self._pid, self._lock = os.getpid(), threading.Lock()

    def permit(
        self, receiver: ModelSpec, sender: ModelSpec | None, reuse: str, provenance: Provenance | None = None
    ) -> Permit:
        """Whether ``receiver`` may reuse these caches, and how. Reads the profile when its file has changed; else it
        costs two stat calls. ``provenance``: by default what the reuse implies."""
        pair = Pair.of(receiver, sender, reuse, provenance or PROVENANCE.get(reuse, Provenance.IN_CONTEXT))
        with self._locked():
            state, stamp = self._states.get(pair), self._profiles.stamp(pair)
            if state is None or state.stamp != stamp:
                state = self._states[pair] = self._opened(pair, stamp)
            reason = state.reason or self._refusal(state, receiver, sender)
            if reason or state.point is None:
                return Permit(pair, None, reason)
            return Permit(pair, state.point.setting, "", state.digest)

    def is_due(self, permit: Permit) -> bool:
        """Whether a request that goes by this permit is to be checked. Ask once per request."""
        with self._locked():
            state = self._states.get(permit.pair)
            if state is None or state.watch is None:
                return False
            if state.until_check and not state.watch.is_suspicious:
                state.until_check -= 1
                return False
            state.until_check = self.check_every - 1
            return True

    def checked(self, permit: Permit, full: torch.Tensor, lossy: torch.Tensor) -> str:
        """Take note of one check: logits of the same token by a full and by the lossy prefill, [vocab_size]. Returns
        what to tell. Switches the pair off when answers have drifted."""
        wrong = bool(misled(full.reshape(1, -1), lossy.reshape(1, -1)))
        with self._locked():
            self.counters["drift_checks"] += 1
            self.counters["drift_misled"] += wrong
            state = self._states.get(permit.pair)
            if state is None or state.watch is None or state.digest != permit.profile:
                return "checked against a full prefill, which is the answer"
            state.watch.add(wrong)
            if state.watch.has_drifted:
                return self._switch_off(permit.pair, state)
        found = "misled" if wrong else "agreed"
        return f"checked against a full prefill, which is the answer: lossy reuse {found}"

    def _opened(self, pair: Pair, stamp: tuple[object, ...]) -> _State:
        """What the files say; a reason when they do not allow it."""
        try:
            profile = self._profiles.read(pair)
            if profile is None:
                return _State(stamp, reason=UNPROFILED)
            if (profile.reuse, profile.provenance) != (pair.reuse, pair.provenance):
                raise InvalidRequest(f"the profile is of {profile.reuse!r} reuse, {profile.provenance.value}")
        except KVStoreError as error:
            _log.warning("kvstore: no lossy reuse: %s", error.message)
            return _State(stamp, reason=f"no valid profile for these weights: {error.message}")
        digest, point = profile.digest, profile.cheapest(self.floor)
        reason = self._off.get(digest) or self._profiles.switched_off(pair, profile)
        if point is None:
            reason = reason or f"no setting of the profile keeps {self.floor:g} of a full prefill's quality"
            return _State(stamp, profile, digest, reason=reason)
        watch = DriftWatch(point.misled, profile.calibration.answers)
        return _State(stamp, profile, digest, point, reason, None if reason else watch)

    def _refusal(self, state: _State, receiver: ModelSpec, sender: ModelSpec | None) -> str:
        """Why a profile that is there is not about these specs: the files are found by digests that may be wrong."""
        if state.profile is None:
            return state.reason
        if (receiver, sender) not in state.specs:
            try:
                state.profile.check(receiver, sender)
                state.specs[receiver, sender] = ""
            except InvalidRequest as error:
                state.specs[receiver, sender] = f"no valid profile for these weights: {error.message}"
        return state.specs[receiver, sender]

    def _switch_off(self, pair: Pair, state: _State) -> str:
        assert state.watch is not None
        assert state.profile is not None
        state.reason = self._off[state.digest] = (
            f"lossy reuse was switched off: {state.watch.misled} of {state.watch.checks} checked answers misled, "
            f"more than the profile has it; {AGAIN}"
        )
        self.counters["lossy_switched_off"] += 1
        _log.error("kvstore: %s (%s)", state.reason, self._profiles.path(pair))
        try:
            self._profiles.switch_off(pair, state.profile, state.reason)
        except KVStoreError as error:
            _log.warning("kvstore: other processes are not told: %s", error.message)
        state.watch = None  # the files are read again for the next permit: there may be another profile by now
        return state.reason

    def _locked(self) -> threading.Lock:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()  # the parent's may be held by a thread that is gone
        return self._lock
