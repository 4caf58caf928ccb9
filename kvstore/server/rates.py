"""The file in which a tenant's rates outlive the service: a hint, whose loss costs a few measurements."""

from __future__ import annotations

import logging
from pathlib import Path

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.movement import TierMeters
from kvstore.planning.loading.kept import pack_rates, unpack_rates
from kvstore.seams import Clock, Disk, Workers
from kvstore.seams.disk import read_whole, replace_whole
from kvstore.seams.jobs import done

SAVE_INTERVAL_S = 60.0
BYTES_MAX = 1 << 20
_log = logging.getLogger("kvstore.server")


class RatesFile:
    """Reads it once at the start, and writes it when something was learned."""

    def __init__(self, path: Path, disk: Disk, meters: TierMeters) -> None:
        self.path = path
        self._disk = disk
        self._meters = meters

    def load(self) -> None:
        """Begin with the rates of the last start. A file that cannot be read is left alone, and a word said."""
        try:
            self._meters.restore(unpack_rates(read_whole(self._disk, self.path, BYTES_MAX)))
        except FileNotFoundError:
            return
        except (OSError, InvalidRequest) as error:
            reason = error.message if isinstance(error, InvalidRequest) else str(error)
            _log.warning("rates of tiers are measured anew", extra={"path": str(self.path), "reason": reason})

    async def follow(self, clock: Clock, workers: Workers) -> None:
        """Write it now and then, for ever."""
        while True:
            await clock.sleep(SAVE_INTERVAL_S)
            if self._meters.is_changed:
                try:
                    await done(workers, self._write, pack_rates(self._meters.kept()))
                except Unavailable as error:
                    _log.warning("rates of tiers are not kept", extra={"reason": error.message})

    def save(self) -> None:
        """Write it if there is news. Blocks."""
        if self._meters.is_changed:
            self._write(pack_rates(self._meters.kept()))

    def _write(self, data: bytes) -> None:
        try:
            self._disk.make_directory(self.path.parent)
            replace_whole(self._disk, self.path, data)
        except (OSError, Unavailable) as error:
            _log.warning("rates of tiers are not kept", extra={"path": str(self.path), "reason": str(error)})
