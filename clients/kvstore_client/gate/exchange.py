"""The exchange of profiles with the service: this host's are registered there, and those of other hosts found.

Only profiles of the client's own tenant are found. One that is found counts like a file that this host lacks: it is
compared with the specs, and its answers are checked while it is in use.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.planning import Pair, Profile
from kvstore.seams.scheduler import start_thread
from kvstore.spec import ModelSpec
from kvstore.v1alpha import prefill_pb2 as pb
from kvstore_client.context import Context
from kvstore_client.planes.session import ClientSession

ASKED_S_MIN = 60.0
"""The least seconds between two questions for the profile of one pair."""
WAIT_S = 1.0
"""The most seconds that a permit waits for the service's answer; a client that is not connected yet connects first."""
SILENT_S = 10.0
"""Seconds for which a service that left a question unanswered is asked none: a prompt with many senders asks for two
pairs of each."""
PAIRS_MAX = 64
PROFILES_TOLD_MAX = 1024
"""The most profiles that a session is remembered to have told; past that all are told again."""
_log = logging.getLogger("kvstore.client")


class _Answer(NamedTuple):
    asked_s: float
    profile: Profile | None


_NEVER = _Answer(-math.inf, None)


class ProfileExchange:
    """The service's side of one client's profiles. Safe to share between threads: two that come at once ask twice."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._answers: dict[Pair, _Answer] = {}
        self._unanswered_s = -math.inf

    def find(self, pair: Pair) -> Profile | None:
        """Return the pair's profile as the service has it, or had it when it last answered. Asks once a minute at most.
        Never raises."""
        known, now = self._answers.get(pair, _NEVER), self._context.clock.monotonic()
        if now - known.asked_s < ASKED_S_MIN or now - self._unanswered_s < SILENT_S:
            return known.profile
        if len(self._answers) >= PAIRS_MAX:
            self._answers.clear()
        self._answers[pair] = _Answer(now, known.profile)
        with suppress(KVStoreError), self._context.or_miss() as miss:
            session = self._context.connection.session()
            question = pb.FindProfileRequest(
                receiver=pair.receiver, sender=pair.sender or "", reuse=pair.reuse, provenance=pair.provenance
            )
            timeout_s = min(self._context.timeout_s, WAIT_S)
            found = session.call(session.prefills.FindProfile, question, timeout_s).profile
            if found != (b"" if known.profile is None else known.profile.to_json().encode()):
                self._answers[pair] = _Answer(now, _profile_of(found, pair))
        if miss.is_late:
            self._unanswered_s = self._context.clock.monotonic()
        return self._answers.get(pair, _NEVER).profile

    def tell(self, receiver: ModelSpec, profile: Profile, digest: str) -> None:
        """Have the service keep a profile of this host, once per session, on a thread of its own. Never raises, and
        waits for nothing."""
        at_hand = self._context.connection.at_hand(receiver)
        if at_hand is None or digest in at_hand[0].profiles:
            return
        session = at_hand[0]
        if len(session.profiles) >= PROFILES_TOLD_MAX:
            session.profiles.clear()
        session.profiles.add(digest)
        with suppress(KVStoreError):  # no thread can be had: the next session tells it
            start_thread(partial(_register, session, profile, self._context.timeout_s), "kvstore-profile")


def _profile_of(found: bytes, pair: Pair) -> Profile | None:
    """Return the profile in a reply; None where there is none. One of another pair, or that is none, is left out."""
    if not found:
        return None
    try:
        profile = Profile.from_json(found.decode())
        if Pair.of_profile(profile) != pair:
            raise InvalidRequest("it is of other weights, or of another reuse")
    except (InvalidRequest, UnicodeDecodeError) as error:
        _log.warning("kvstore: the service's profile is not used: %s", error)
        return None
    return profile


def _register(session: ClientSession, profile: Profile, timeout_s: float) -> None:
    try:
        request = pb.RegisterProfileRequest(profile=profile.to_json().encode())
        session.call(session.prefills.RegisterProfile, request, timeout_s)
    except KVStoreError as error:
        _log.info("kvstore: the service keeps no profile of %s: %s", profile.receiver.model_id, error.message)
