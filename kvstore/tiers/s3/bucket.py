"""Remembers whether the bucket is there. A HEAD's 404 says too little: a missing object and a missing bucket look the
same, so a node that only reads would take a wrong name for an empty bucket. A GET's refusal has a body that tells."""

from __future__ import annotations

from kvstore.errors import KVStoreError
from kvstore.seams import Clock
from kvstore.tiers.s3.refusals import NO_BUCKET

SEEN_S = 300.0
"""Seconds for which a bucket that was there is not asked for again."""
AGAIN_S = 10.0
"""Seconds after which a bucket that was missing is asked for again."""
SOON_S = 1.0
"""Seconds after which a question that told nothing, or had no answer, is asked again; twice as many after each further
one, because a bucket that answers slowly must not be asked twice with every miss."""


class BucketPresence:
    """The bucket as the last answers show it. Cost: one request more with a miss, once in ``SEEN_S``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._due_s = float("-inf")
        self._pause_s = SOON_S
        self.problem = ""
        """Why the bucket cannot be used; empty while it is there, or may be."""

    @property
    def is_due(self) -> bool:
        """True when the next miss should ask for the bucket, too."""
        return self._clock.monotonic() >= self._due_s

    def asked(self) -> None:
        """Record that a question is on its way, so that no other one goes with it."""
        self._due_s = self._clock.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, AGAIN_S if self.problem else SEEN_S)

    def seen(self) -> None:
        """Record an answer that only a bucket gives."""
        self.problem = ""
        self._told(SEEN_S)

    def refused(self, error: KVStoreError) -> None:
        """Record an error of the endpoint, which may say that there is no such bucket."""
        if error.fields.get("code") == NO_BUCKET:
            self.problem = error.message
            self._told(AGAIN_S)

    def _told(self, again_s: float) -> None:
        self._due_s = self._clock.monotonic() + again_s
        self._pause_s = SOON_S
