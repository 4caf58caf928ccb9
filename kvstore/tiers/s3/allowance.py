"""Limits the use of a bucket: a rate, and bytes and requests of one day."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from kvstore.config import S3Settings
from kvstore.errors import Exhausted
from kvstore.seams import Clock

_log = logging.getLogger("kvstore.s3")
DAY_S = 86_400.0
SHARE = 0.001
"""A process that is killed may forget this share of a day's limit."""
BURST_S = 1.0
WAIT_S_MAX = 10.0
"""A move that would have to wait more seconds for its turn is refused."""


class Allowance:
    """Bytes and requests of the last day, and the pace of bytes. Retries, a tenth of all requests at most, are not
    counted. A day begins with the first request after the last day ended, by the machine's clock. The file ``account``
    keeps the counts over restarts. Where that is None, or no day has a limit, nothing is kept."""

    def __init__(self, settings: S3Settings, clock: Clock, account: Path | None = None) -> None:
        self._settings = settings
        self._clock = clock
        limits = settings.day_bytes_max, settings.day_request_count_max
        self._steps = tuple(int(limit * SHARE) for limit in limits)
        self._account = account if any(limits) else None
        self._day_began_s, self._bytes, self._requests = self._read()
        self._kept: Sequence[int] = (self._bytes, self._requests)
        self._free_at_s = float("-inf")

    @property
    def reached(self) -> str:
        """The setting whose limit is reached for today; empty: none."""
        if not 0 <= self._clock.wall() - self._day_began_s < DAY_S:  # or in the future: the clock was set
            self._day_began_s, self._bytes, self._requests = self._clock.wall(), 0, 0
            self.keep()
        limits = {"day_bytes_max": self._bytes, "day_request_count_max": self._requests}
        return next((name for name, used in limits.items() if 0 < getattr(self._settings, name) <= used), "")

    def used(self, byte_count: int, request_count: int) -> None:
        """Count bytes and requests. The counts may pass a limit, because moves that have begun are finished."""
        self._bytes += byte_count
        self._requests += request_count
        now = (self._bytes, self._requests)
        limits = (self._settings.day_bytes_max, self._settings.day_request_count_max)
        rows = zip(now, self._kept, self._steps, limits, strict=True)
        if any(limit and count - kept > step for count, kept, step, limit in rows):
            self.keep()

    def give_back(self, byte_count: int) -> None:
        """Undo the count and the turn of bytes that no object had."""
        self._bytes -= byte_count
        if self._settings.bytes_per_s_max:
            self._free_at_s -= byte_count / self._settings.bytes_per_s_max

    def keep(self) -> None:
        """Write the account to its file. Where that fails the log says so, and the limits hold for this process
        alone."""
        self._kept = (self._bytes, self._requests)
        if self._account is None:
            return
        try:
            self._account.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh = self._account.with_name(f"{self._account.name}.new")
            fresh.write_text(json.dumps([self._day_began_s, *self._kept]))
            fresh.replace(self._account)
        except OSError as error:
            reason = f"{self._account}: {error.strerror}"
            _log.warning("what a day's limits count is not kept", extra={"tier": "s3", "reason": reason})

    def _read(self) -> tuple[float, int, int]:
        """Return when the day began, and its bytes and requests, as an earlier process left them; zeros where the file
        cannot be read."""
        try:
            began_s, byte_count, request_count = json.loads(self._account.read_text()) if self._account else (0, 0, 0)
            return float(began_s), int(byte_count), int(request_count)
        except (OSError, ValueError, TypeError):
            return 0.0, 0, 0

    async def turn(self, byte_count: int) -> None:
        """Wait until ``byte_count`` bytes may move. Raises Exhausted where that takes too long."""
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
