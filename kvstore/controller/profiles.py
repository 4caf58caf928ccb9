"""Profiles that the clients of one tenant registered, so that clients on other hosts, and of later days, have them.

A profile says which lossy settings a model's caches allow. Each client compares it with its own specs before use; here
it is checked for form, and kept by the weights that it is of. Only the tenant's own clients see it.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from kvstore.errors import InvalidRequest
from kvstore.planning import Pair, Profile, Side
from kvstore.planning.kept import KeptForm, text_of
from kvstore.planning.profile import PROFILE_SENT_BYTES_MAX, PROFILES_MAX
from kvstore.seams import Clock
from kvstore.spec import ModelSpec

PROFILES_BYTES_MAX = 512 << 10
"""The most bytes of all profiles of a tenant, as JSON."""
NAME_MAX = 512
AHEAD_S_MAX = 86_400
"""The most seconds by which a profile may say that it was measured after now: the newest one counts, and clocks
differ."""
FORM = KeptForm("kvstore-profiles", 1, "profiles", "registered profiles")


class _Registered(NamedTuple):
    """A profile as JSON, and ``packed`` as the file has it: to make that of every profile takes milliseconds, in which
    the service answers nobody."""

    text: str
    packed: str
    measured_at_s: int
    receiver: Side
    sender: Side | None


class RegisteredProfiles:
    """The profiles of one tenant, the newest of each pair, at most ``PROFILES_MAX`` and ``PROFILES_BYTES_MAX``: past
    these the one that was not asked for the longest goes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._kept: dict[Pair, _Registered] = {}
        self.is_changed = False
        """True when a profile came since ``pack`` was last called."""

    def register(self, data: bytes) -> bool:
        """Keep a profile, unless a newer one of its pair is kept: False. Raises InvalidRequest naming the field that is
        wrong."""
        try:
            profile = Profile.from_json(data.decode())
        except UnicodeDecodeError as error:
            raise InvalidRequest("the profile is not text") from error
        text = profile.to_json()
        if len(text) > PROFILE_SENT_BYTES_MAX:
            raise InvalidRequest(f"the profile has {len(text)} bytes: at most {PROFILE_SENT_BYTES_MAX} are kept")
        if profile.measured_at_s > self._clock.wall() + AHEAD_S_MAX:
            raise InvalidRequest(
                f"measured_at_s {profile.measured_at_s} lies in the future: a clock is wrong, there or here"
            )
        return self._keep(profile, text)

    def _keep(self, profile: Profile, text: str) -> bool:
        pair = Pair.of_profile(profile)
        known = self._kept.get(pair)
        if known is not None and known.measured_at_s > profile.measured_at_s:
            return False
        if known is None or known.text != text:
            self.is_changed = True
        self._kept.pop(pair, None)
        packed = text_of(json.loads(text))
        self._kept[pair] = _Registered(text, packed, profile.measured_at_s, profile.receiver, profile.sender)
        while (
            len(self._kept) > PROFILES_MAX or sum(len(each.text) for each in self._kept.values()) > PROFILES_BYTES_MAX
        ):
            del self._kept[next(iter(self._kept))]
        return True

    def find(self, pair: Pair) -> bytes:
        """Return the pair's profile as JSON; empty: none is kept."""
        known = self._kept.pop(pair, None)
        if known is None:
            return b""
        self._kept[pair] = known
        return known.text.encode()

    def of(self, spec: ModelSpec) -> list[str]:
        """Return in words for what the profiles of this very model are."""
        if not self._kept:
            return []
        receiver, found = Side.of(spec), []
        for pair, known in self._kept.items():
            if (known.receiver.weights_digest, known.receiver.regime) == (receiver.weights_digest, receiver.regime):
                of = "" if known.sender is None else f" of {known.sender.model_id[:NAME_MAX]}"
                found.append(f"{pair.reuse} ({pair.provenance}){of}")
        return sorted(found)

    def pack(self) -> bytes:
        """Return the profiles as ``unpack`` reads them."""
        self.is_changed = False
        return FORM.pack_texts({pair.file_name: known.packed for pair, known in self._kept.items()})

    def unpack(self, data: bytes) -> None:
        """Begin with the profiles that an earlier start packed; those that this release refuses are left out. Raises
        InvalidRequest saying what is wrong with ``data``."""
        for found in list(FORM.unpack(data).values())[-PROFILES_MAX:]:
            try:
                profile = Profile.from_json(json.dumps(found))
            except InvalidRequest:
                continue
            self._keep(profile, profile.to_json())
        self.is_changed = False
