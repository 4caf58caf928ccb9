"""Files that keep what a tenant's service has learned over restarts. Each file is a hint: without it the service learns
anew."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

from kvstore.controller import Parts
from kvstore.controller.prefills import Engines
from kvstore.errors import InvalidRequest, Unavailable
from kvstore.movement import TierMeters
from kvstore.planning.loading.kept import pack_rates, unpack_rates
from kvstore.seams import Clock, Disk, Workers
from kvstore.seams.disk import read_whole, replace_whole
from kvstore.seams.jobs import done

SAVE_INTERVAL_S = 60.0
BYTES_MAX = 1 << 20
_log = logging.getLogger("kvstore.server")


class Learned(Protocol):
    """Knowledge that a file keeps."""

    @property
    def is_changed(self) -> bool:
        """True when the knowledge changed since ``pack`` was last called."""

    def pack(self) -> bytes:
        """Return the knowledge as bytes, which ``unpack`` reads."""

    def unpack(self, data: bytes) -> None:
        """Begin with the knowledge that an earlier start packed. Raises InvalidRequest saying what is wrong with it."""


class KeptRates:
    """The rates at which a tenant's tiers are read."""

    def __init__(self, meters: TierMeters) -> None:
        self._meters = meters

    @property
    def is_changed(self) -> bool:
        return self._meters.is_changed

    def pack(self) -> bytes:
        return pack_rates(self._meters.kept())

    def unpack(self, data: bytes) -> None:
        self._meters.restore(unpack_rates(data))


class KeptFile:
    """One file. It is read at the start, and written when there is news. ``said``: the name of its content in logs."""

    def __init__(self, path: Path, disk: Disk, learned: Learned, said: str) -> None:
        self.path = path
        self._disk = disk
        self._learned = learned
        self._said = said

    def load(self) -> None:
        """Begin with the knowledge of the last start. A file that cannot be read is left alone, with a warning."""
        try:
            self._learned.unpack(read_whole(self._disk, self.path, BYTES_MAX))
        except FileNotFoundError:
            return
        except (OSError, InvalidRequest) as error:
            reason = error.message if isinstance(error, InvalidRequest) else str(error)
            _log.warning(f"{self._said} are learned anew", extra={"path": str(self.path), "reason": reason})

    async def follow(self, clock: Clock, workers: Workers) -> None:
        """Write the file every ``SAVE_INTERVAL_S`` if there is news, for ever."""
        while True:
            await clock.sleep(SAVE_INTERVAL_S)
            if self._learned.is_changed:
                try:
                    await done(workers, self._write, self._learned.pack())
                except Unavailable as error:
                    _log.warning(f"{self._said} are not kept", extra={"reason": error.message})

    def save(self) -> None:
        """Write the file if there is news. Blocks."""
        if self._learned.is_changed:
            self._write(self._learned.pack())

    def _write(self, data: bytes) -> None:
        try:
            self._disk.make_directory(self.path.parent)
            replace_whole(self._disk, self.path, data)
        except (OSError, Unavailable) as error:
            _log.warning(f"{self._said} are not kept", extra={"path": str(self.path), "reason": str(error)})


def kept_files(directory: Path, disk: Disk, parts: Parts, engines: Engines) -> list[KeptFile]:
    """Return all files of one tenant. ``directory``: the state directory of the service."""
    name = f"{parts.keys.tenant}.json"
    return [
        KeptFile(directory / "rates" / name, disk, KeptRates(parts.meters), "rates of tiers"),
        KeptFile(directory / "served" / name, disk, parts.served, "hours of fetched tokens"),
        KeptFile(directory / "engines" / name, disk, engines, "speeds of engines"),
        KeptFile(directory / "profiles" / name, disk, parts.profiles, "registered profiles"),
    ]
