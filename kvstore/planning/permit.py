"""Permits: a profile decides whether one model may reuse caches that are not exact, and with which setting."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from blake3 import blake3

from kvstore.errors import InvalidRequest
from kvstore.planning.profile import AGAIN, REUSES, Origin, Point, Profile
from kvstore.planning.setting import Recompute
from kvstore.spec import ModelSpec

FLOOR = 0.99
PROVENANCE = {"position": Origin.STANDALONE, "sibling": Origin.IN_CONTEXT, "both": Origin.STANDALONE}
ALONE = ("position", "both")
"""The kinds of reuse that take documents, which were computed alone or behind a preamble."""
UNPROFILED = (
    "no valid profile for these weights: only the exact prefix is reused; run kvstore profile, or give recompute="
)
INVALID = "no valid profile for these weights: {}"


@dataclass(frozen=True)
class Pair:
    """A receiver, the sender whose caches it reuses, and the kind of reuse. ``sender`` None: the receiver reuses its
    own caches at another position."""

    receiver: str
    sender: str | None
    reuse: str
    provenance: Origin

    @staticmethod
    def of(receiver: ModelSpec, sender: ModelSpec | None, reuse: str, provenance: Origin) -> Pair:
        if reuse not in REUSES:
            raise InvalidRequest(f"reuse {reuse!r:.40} must be one of {', '.join(REUSES)}")
        if (sender is None) != (reuse == "position"):
            raise InvalidRequest("sender: 'sibling' and 'both' take one, 'position' takes none")
        return Pair(receiver.weights_digest, sender.weights_digest if sender else None, reuse, provenance)

    @staticmethod
    def of_profile(profile: Profile) -> Pair:
        """Return the pair of a profile's weights."""
        sender = None if profile.sender is None else profile.sender.weights_digest
        return Pair(profile.receiver.weights_digest, sender, profile.reuse, profile.provenance)

    @property
    def file_name(self) -> str:
        """The name of the pair's profile file. The digests are hashed because unverified ones may hold any text."""
        both = blake3(json.dumps([self.receiver, self.sender]).encode()).hexdigest()
        return f"{self.reuse}-{self.provenance.value}-{both[:32]}.json"


@dataclass(frozen=True)
class Permit:
    """The verdict for one pair: a setting, or None and the ``reason``. ``profile``: the digest of the profile that
    decided. ``token_count_max`` and ``run_count_max``: the largest prompt that the profile covers; 0: no limit is
    given."""

    pair: Pair
    setting: Recompute | None = None
    reason: str = ""
    profile: str = ""
    token_count_max: int = 0
    run_count_max: int = 0

    def within(self, token_count: int, run_count: int) -> Permit:
        """Return the permit for a prompt of ``token_count`` tokens and ``run_count`` reused runs. It has no setting
        when the profile was measured on smaller prompts only."""
        for what, count, most in (
            ("tokens", token_count, self.token_count_max), ("reused runs", run_count, self.run_count_max)
        ):  # fmt: skip
            if self.setting is not None and most and count > most:
                reason = f"the prompt has {count} {what}, the profile's at most {most}; {AGAIN} on prompts like it"
                return replace(self, setting=None, reason=reason)
        return self


@dataclass(frozen=True)
class Ruling:
    """The verdict of a pair's profile at one floor: the ``point`` to reuse by, or None and the ``reason``."""

    pair: Pair
    point: Point | None = None
    reason: str = ""
    profile: Profile | None = None
    digest: str = ""

    @staticmethod
    def of(pair: Pair, profile: Profile | None, floor: float, switched_off: str = "") -> Ruling:
        """Judge a profile. ``switched_off``: why this profile was switched off; empty when it is in use. Raises:
        InvalidRequest for a profile of another kind of reuse, and for a floor outside 0..1."""
        if profile is None:
            return Ruling(pair, reason=UNPROFILED)
        if (profile.reuse, profile.provenance) != (pair.reuse, pair.provenance):
            raise InvalidRequest(f"the profile is of {profile.reuse!r} reuse, {profile.provenance.value}")
        point, reason = profile.cheapest(floor), switched_off
        if point is None:
            reason = reason or f"no setting of the profile keeps {floor:g} of a full prefill's quality"
        return Ruling(pair, None if reason else point, reason, profile, profile.digest)

    def permit(self, receiver: ModelSpec, sender: ModelSpec | None) -> Permit:
        """Return the permit for these specs. The profile was found by digests that may be unverified, so it is compared
        with the specs themselves."""
        if self.point is None or self.profile is None:
            return Permit(self.pair, None, self.reason)
        try:
            self.profile.check(receiver, sender)
        except InvalidRequest as error:
            return Permit(self.pair, None, INVALID.format(error.message))
        made = self.profile.calibration
        return Permit(
            self.pair, self.point.setting, "", self.digest, made.token_count_max, made.run_count_max
        )  # fmt: skip
