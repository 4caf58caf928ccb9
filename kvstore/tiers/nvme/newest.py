"""The record of which write of a replaceable chunk is the newest, where an older write may still lie on the device.

A store of other bytes under a key first erases the older write, with a sync. That cannot always be done: the device
refuses it, or there are places that cannot be read, where an older write may lie unseen. Then the file ``newest`` says,
before the new write is promised, which write of that key is to be believed from now on. A scan believes no other write.
Once there is no such place any more the file is removed.

    newest   records of 48 bytes: storage key 32, first 8 bytes of the write id, XXH3-64 of these 40

The file is replaced as a whole. Where it would pass ``COUNT_MAX`` keys, the places themselves are written down instead:
nothing replaceable in them is believed any more. Such a record has the name of the region file in the place of the key,
the slot in the place of the write id, and a checksum of another seed.

While the file is there it is a feature of the directory: an earlier release would serve the older values, and the
values that release stored would not be believed later.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import partial

import xxhash

from kvstore.keys import DIGEST_BYTES
from kvstore.tiers.nvme.directory import NEWEST, Directory

NEWEST_FILE = "newest"
COUNT_MAX = 4096
SlotPlace = tuple[str, int]
"""A region file's name, and a slot."""
WHOLE_FILE = (1 << 64) - 1
"""Stands in the place of a slot: all slots of the file."""
_RECORD = struct.Struct(f"<{DIGEST_BYTES}sQ")
_CHECKSUM_BYTES = 8
_KEY, _PLACE = 0, 1
"""Seeds of the records' checksums."""


class Newest:
    """The file ``newest`` and its content. ``load``, ``note`` and ``forget`` block, and raise OSError."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._marks: dict[bytes, int] = {}
        self.closed: frozenset[SlotPlace] = frozenset()
        """Places where nothing replaceable is believed."""
        self._is_damaged = False
        self._is_certain = True
        """False after a replacement that failed: the file may be the one before or the new one. ``_marks`` and
        ``closed`` have all keys and places of both then, and a key that both name has the newer write."""

    def __bool__(self) -> bool:
        return bool(self._marks or self.closed) or self._is_damaged

    def load(self) -> None:
        """Read the file at a start. Where it is damaged, nothing replaceable is believed."""
        try:
            data = self._directory.read(NEWEST_FILE)
        except FileNotFoundError:
            self._directory.features.discard(NEWEST)
            return
        self._directory.features.add(NEWEST)
        size = _RECORD.size + _CHECKSUM_BYTES
        self._is_damaged = not data or len(data) % size != 0
        for at in range(0, len(data) - size + 1, size):
            packed, checksum = data[at : at + _RECORD.size], data[at + _RECORD.size : at + size]
            key, number = _RECORD.unpack(packed)
            if checksum == xxhash.xxh3_64_digest(packed, _KEY):
                self._marks[key] = number
            elif checksum == xxhash.xxh3_64_digest(packed, _PLACE):
                self.closed |= {(key.rstrip(b"\0").decode("ascii", "replace"), number)}
            else:
                self._is_damaged = True

    def knows(self, keys: Iterable[bytes]) -> bool:
        """Return True when the file names another write of one of these keys, so that a new write would not be
        believed."""
        return any(key in self._marks for key in keys)

    def is_stale(self, key: bytes, mark: int, place: SlotPlace) -> bool:
        """Return True when a write that a scan found at ``place`` is not to be believed."""
        return self._is_damaged or self._closes(place) or self._marks.get(key, mark) != mark

    def speaks_of(self, file: str) -> bool:
        """Return True when nothing replaceable is believed in the file, or in some slot of it."""
        return self._is_damaged or any(place[0] == file for place in self.closed)

    def _closes(self, place: SlotPlace) -> bool:
        return place in self.closed or (place[0], WHOLE_FILE) in self.closed

    def note(self, writes: Mapping[bytes, int], unseen: frozenset[SlotPlace]) -> None:
        """Believe no other writes of these keys from now on. Other writes may lie in the ``unseen`` places, and nowhere
        else."""
        marks = {**self._marks, **writes}
        if self._is_damaged or len(marks) > COUNT_MAX or all(map(self._closes, unseen)):
            self._replace({}, self.closed | unseen)
        else:
            self._replace(marks, self.closed)

    def forget(self, unseen: frozenset[SlotPlace]) -> None:
        """Drop the records that are no longer needed: an older write can lie only in the ``unseen`` places, all others
        are erased."""
        whole = {file for file, slot in unseen if slot == WHOLE_FILE}
        closed = {place for place in unseen if self._is_damaged or self._closes(place)}
        closed |= {place for place in self.closed if place[0] in whole}
        self._replace(self._marks if unseen and not self._is_damaged else {}, frozenset(closed))

    def _replace(self, marks: Mapping[bytes, int], closed: frozenset[SlotPlace]) -> None:
        if self._is_certain and not self._is_damaged and (marks, closed) == (self._marks, self.closed):
            return
        records = [(_RECORD.pack(key, mark), _KEY) for key, mark in marks.items()]
        records += [(_RECORD.pack(file.encode(), slot), _PLACE) for file, slot in sorted(closed)]
        if records:
            data = b"".join(packed + xxhash.xxh3_64_digest(packed, seed) for packed, seed in records)
            self._directory.require(NEWEST)  # first: there is no moment at which an earlier release could be misled
            self._directory.write(NEWEST_FILE, data, partial(self._doubt, marks, closed))
        else:
            self._is_certain = False
            self._directory.remove(NEWEST_FILE)
            self._directory.features.discard(NEWEST)
        self._marks, self.closed, self._is_damaged, self._is_certain = dict(marks), closed, False, True

    def _doubt(self, marks: Mapping[bytes, int], closed: frozenset[SlotPlace]) -> None:
        """From now on the file may say this, too."""
        self._is_certain = False
        self._marks, self.closed = {**self._marks, **marks}, self.closed | closed
