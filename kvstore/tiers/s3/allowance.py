"""What a bucket may cost: a rate, and how much in one day."""

from __future__ import annotations

from kvstore.config import S3Settings
from kvstore.errors import Exhausted
from kvstore.seams import Clock

DAY_S = 86_400.0
BURST_S = 1.0
WAIT_S_MAX = 10.0
"""A move that would have to wait longer for its turn is refused."""


class Allowance:
    """Bytes and requests of the last day, and the pace of bytes. Retries, a tenth of all requests at most, are not
    counted. A day begins with the first request after the one before it ended."""

    def __init__(self, settings: S3Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._day_began_s = float("-inf")
        self._bytes = self._requests = 0
        self._free_at_s = float("-inf")

    @property
    def reached(self) -> str:
        """The setting whose limit is reached for today; empty: none."""
        if self._clock.monotonic() - self._day_began_s >= DAY_S:
            self._day_began_s, self._bytes, self._requests = self._clock.monotonic(), 0, 0
        limits = {"day_bytes_max": self._bytes, "day_request_count_max": self._requests}
        return next((name for name, used in limits.items() if 0 < getattr(self._settings, name) <= used), "")

    def used(self, byte_count: int, request_count: int) -> None:
        """Count what moved. It may pass a limit, because what was begun is finished."""
        self._bytes += byte_count
        self._requests += request_count

    async def turn(self, byte_count: int) -> None:
        """Wait until so many bytes may move. Raises Exhausted where that takes too long."""
        rate = self._settings.bytes_per_s_max
        if not rate:
            return
        now_s = self._clock.monotonic()
        begins_s = max(self._free_at_s, now_s - BURST_S)
        if begins_s - now_s > WAIT_S_MAX:
            raise Exhausted(f"tiers.s3.bytes_per_s_max = {rate}: more waits already than moves in {WAIT_S_MAX:.0f} s")
        self._free_at_s = begins_s + byte_count / rate
        if begins_s > now_s:
            await self._clock.sleep(begins_s - now_s)
