"""Files that are replaced while the plane runs: a certificate that is renewed, tokens that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from kvstore.seams import Clock

LOOK_INTERVAL_S = 5.0
"""Seconds between two looks at the files."""
Stamp = tuple[int, int, int]
_log = logging.getLogger("kvstore.remote")


class RenewedFiles:
    """Files that are read again together when one of them has changed. ``read`` takes what they have by now. Where it
    raises, as for a file that is half written, what was in use stays in use, the log says why, and they are read again
    at the next look."""

    def __init__(self, what: str, files: Iterable[Path], read: Callable[[], None]) -> None:
        self._what = what
        self._files = tuple(files)
        self._read = read
        self._stamps: list[Stamp | None] | None = self._look()
        self._reason = ""

    def _look(self) -> list[Stamp | None]:
        return [_stamp(each) for each in self._files]

    def renew(self) -> None:
        """Read the files again if one of them has changed since they were read."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps  # before they are read: what changes meanwhile is read once more
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 - the boundary: what a file does to a look ends no service
            self._stamps = None
            if str(error) != self._reason:
                self._reason = str(error)
                _log.error("changed files are not used", extra={"what": self._what, "reason": self._reason})
        else:
            self._reason = ""
            _log.info("changed files are in use", extra={"what": self._what})


def _stamp(file: Path) -> Stamp | None:
    """Return what tells a replaced or changed file from the one before; None for one that is not there."""
    try:
        found = file.expanduser().stat()
    except (OSError, ValueError, RuntimeError):  # also a name that is none: who reads it says so
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


async def keep_renewing(renewed: Sequence[RenewedFiles], clock: Clock) -> None:
    """Look at the files every few seconds, without end, on another thread: a file system may hang."""
    while True:
        await clock.sleep(LOOK_INTERVAL_S)
        for each in renewed:
            try:
                await asyncio.to_thread(each.renew)
            except RuntimeError as error:  # no thread is to be had now
                _log.error("changed files are not looked for", extra={"reason": str(error)})
