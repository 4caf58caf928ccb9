"""Copies without an envelope where one is demanded: those that were there when it was turned on are believed, for they
were acknowledged; no others are.

The start that turns the envelope on may meet slots that it cannot read and files that it cannot open: they may hold
such copies, too. The list of believed copies must not lie on the device, where an attacker writes at will: the record
lies elsewhere, in the service's state. A missing record means that the envelope is turned on now. Each start writes
into the record the copies that are still there, and those recorded for files that are missing now.

The directory may be another than the one that the record describes: its device is not mounted, or it was used without
an envelope elsewhere. So both have an id, drawn when the envelope is turned on, which a directory keeps until it is
used without one.

    record   XXH3-128 of the rest, then the directory's id of 16 bytes, then 16 bytes per copy, sorted: its place
             (region << 32 | slot), and the first 8 bytes of its write id (0: any); slot 2^32 - 1 is all of a file
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.chunk import Trust
from kvstore.errors import Unavailable
from kvstore.seams import Disk, SystemRandom
from kvstore.seams.disk import read_whole, replace_whole
from kvstore.tiers.contract import IndexColumns
from kvstore.tiers.nvme.directory import ID_BYTES
from kvstore.tiers.nvme.regions import Regions
from kvstore.tiers.nvme.slots import PLACE_MASK, SEALED

RECORD_BYTES_MAX = 1 << 40
_DIGEST_BYTES = 16
_ANY = 0
_WHOLE_FILE = 0xFFFFFFFF
_random = SystemRandom()
_log = logging.getLogger("kvstore.nvme")


class PlainCopies:
    """Holds the keys and kind of envelope of a directory's copies (``trust``), and the list of copies without an
    envelope that are believed. ``record``: the file with that list; without it no such copy is believed where an
    envelope is demanded. ``load`` and ``keep`` block, and raise OSError."""

    def __init__(self, trust: Trust | None = None, disk: Disk | None = None, record: Path | None = None) -> None:
        self.trust = trust or Trust()
        self._disk = disk
        self._record = record
        self._known: NDArray[np.uint64] | None = np.empty((0, 2), np.uint64)
        """Rows of (place, mark), sorted; None: every copy is believed."""
        self._directory_id = b""
        self._refused_count = 0

    @property
    def is_demanding(self) -> bool:
        """True when new copies are sealed."""
        return self.trust.kind != "none"

    @property
    def regions(self) -> list[int]:
        """The numbers of the region files that the record names."""
        return [] if self._known is None else np.unique(self._known[:, 0] >> np.uint64(32)).tolist()

    def load(self, directory_id: bytes | None) -> bytes:
        """Read the record at a start. ``directory_id`` is the directory's present id (None: not known); returns the id
        that it is to have. Where no envelope is demanded the record is removed: copies written now are believed when
        one is demanded again.

        Raises Unavailable where the record is damaged, or belongs to another directory: it is not known then which
        copies to believe.
        """
        if self._disk is None or self._record is None:
            return b""
        try:
            data = read_whole(self._disk, self._record, RECORD_BYTES_MAX)
        except FileNotFoundError:
            self._known = None
            self._directory_id = (directory_id or _random.bytes(ID_BYTES)) if self.is_demanding else b""
            return self._directory_id
        if not self.is_demanding:
            self._disk.remove(self._record)
            self._disk.sync_directory(self._record.parent)
            return b""
        digest, rest = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if xxhash.xxh3_128_digest(rest) != digest or len(rest) < ID_BYTES or len(rest) % 16:
            raise Unavailable(
                f"{self._record} is damaged: put back the one you have a copy of, or remove it, and all copies without "
                "an envelope that lie on the device now are believed"
            )
        self._directory_id = rest[:ID_BYTES]
        if directory_id not in (None, self._directory_id):
            raise Unavailable(
                f"{self._record} is of another directory than the one that is there: mount its device, or remove the "
                "record, and all copies without an envelope that lie on the device now are believed"
            )
        self._known = np.frombuffer(rest, np.uint64, offset=ID_BYTES).reshape(-1, 2)
        return self._directory_id

    def believes(self, residencies: NDArray[np.int64], marks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return a flag per copy: True when it is sealed, or is believed without an envelope."""
        if not self.is_demanding or self._known is None:
            return np.ones(len(residencies), np.bool_)
        sealed = residencies & SEALED != 0
        if not len(self._known):
            self._refused_count += int((~sealed).sum())
            return np.asarray(sealed, np.bool_)
        places = (residencies & PLACE_MASK).astype(np.uint64)
        said, marks_said = _said_of(self._known, places)
        of_files, _ = _said_of(self._known, places | np.uint64(_WHOLE_FILE))
        believed: NDArray[np.bool_] = sealed | of_files | (said & ((marks_said == marks) | (marks_said == _ANY)))
        self._refused_count += int((~believed).sum())
        return believed

    def keep(self, columns: IndexColumns, regions: Regions) -> None:
        """Record the copies without an envelope that a start found, and those it could not see but that were believed
        before: they are believed from now on."""
        if self._disk is None or self._record is None or not self.is_demanding:
            return
        plain = columns.residencies & SEALED == 0
        rows = np.stack([(columns.residencies & PLACE_MASK).astype(np.uint64), columns.marks], axis=1)[plain]
        rows = np.concatenate([rows, self._unseen(regions)])
        rows = rows[np.argsort(rows[:, 0])]
        if plain.any():
            _log.warning(
                "copies without an envelope lay on the device before it was turned on: they are read as they are, "
                "until they are replaced; begin with an empty tiers.nvme.directory to have none",
                extra={"chunks": int(plain.sum())},
            )
        if self._refused_count:
            _log.error(
                "copies without an envelope lie on the device that were not there when it was turned on: they are not "
                "believed",
                extra={"chunks": self._refused_count},
            )
        if self._known is not None and np.array_equal(rows, self._known):
            return
        data = self._directory_id + rows.tobytes()
        try:
            self._disk.make_directory(self._record.parent)
            replace_whole(self._disk, self._record, xxhash.xxh3_128_digest(data) + data)
        except (OSError, Unavailable) as error:
            if self._known is None:
                raise
            _log.warning(
                "the record of copies without an envelope says more than there are", extra={"reason": str(error)}
            )
            return
        self._known = rows

    def _unseen(self, regions: Regions) -> NDArray[np.uint64]:
        """Return the believed rows for places that a start could not see: slots, files that did not open, and files
        that are missing."""
        unseen = regions.unseen_places()
        files = [number << 32 | _WHOLE_FILE for number in regions.away_numbers]
        if self._known is None:
            return np.array([(place, _ANY) for place in (*unseen, *files)], np.uint64).reshape(-1, 2)
        places = self._known[:, 0]
        is_away = np.isin(places | np.uint64(_WHOLE_FILE), np.array(files, np.uint64))
        is_away |= ~np.isin(places >> np.uint64(32), np.array(list(regions.by_number), np.uint64))
        return self._known[np.isin(places, np.array(unseen, np.uint64)) | is_away]


def _said_of(known: NDArray[np.uint64], places: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.uint64]]:
    """Return a flag per place, True when the record names it, and the recorded marks."""
    rows = known[np.minimum(np.searchsorted(known[:, 0], places), len(known) - 1)]
    return rows[:, 0] == places, rows[:, 1]
