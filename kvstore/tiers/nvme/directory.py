"""The directory as a whole: its owner, its format, and the snapshot of the last clean stop."""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.chunk import Sealing, open_file, seal_file
from kvstore.errors import DataLoss, Unavailable
from kvstore.keys import DIGEST_BYTES
from kvstore.seams import Disk, EnvelopeRing, FaultPoints, Lender, OwnThreads
from kvstore.seams.disk import LOCK_WAIT_S, read_whole, replace_whole
from kvstore.spec import Exactness, Provenance
from kvstore.tiers.contract import IndexColumns, NotOurs

FORMAT = 1
NEWEST = "newest"
"""The feature of a directory with a file ``newest``: a release that does not read that file serves older values."""
ENVELOPES_USED = "envelopes"
"""The feature of a directory with sealed copies: a release that does not know them takes their slots for free."""
KNOWN_FEATURES = frozenset({NEWEST, ENVELOPES_USED})
FORMAT_FILE, INDEX_FILE, TIMES_FILE, LOCK_FILE = "format", "index", "times", "lock"
_INDEX_MAGIC = b"KVSINDEX"
_INDEX_ABOUT, _TIMES_ABOUT = b"nvme snapshot", b"nvme times"
_INDEX_HEAD = struct.Struct("<8sHHIQQ")
_SPACE = struct.Struct("<32sBB2x")
_PROVENANCES = (Provenance.IN_CONTEXT, Provenance.STANDALONE)
_EXACTNESSES = (Exactness.EXACT, Exactness.DERIVED)
FILE_BYTES_MAX = 1 << 40
ID_BYTES = 16
_CLEAN_BYTES = 16
_log = logging.getLogger("kvstore.nvme")


@dataclass(frozen=True)
class Snapshot:
    """The content of the directory at a clean stop. ``regions`` are the numbers of the files that it describes (None:
    all); ``unread`` are the places (region, slot) of which it knew nothing. Everything else that is there now must be
    read. ``key_ids``: the keys that the copies may be sealed with."""

    columns: IndexColumns
    regions: frozenset[int] | None = None
    unread: tuple[tuple[int, int], ...] = ()
    key_ids: frozenset[bytes] = frozenset()

    @property
    def is_whole(self) -> bool:
        return self.regions is None and not self.unread


class Directory:
    """An open directory. Opening takes its lock, and changes nothing else before all checks have passed."""

    def __init__(
        self, path: Path, disk: Disk, faults: FaultPoints, owner: str = "", lender: Lender | None = None
    ) -> None:
        """``owner`` tells a tenant's directory from another's; the default tenant has none. Byte movers share the lock:
        no other process may use the directory while one of them still writes to it."""
        self.path = path
        self._lender = lender or OwnThreads()
        self._owner = owner
        self._disk = disk
        self._faults = faults
        self._said: dict[str, Any] = {}
        self._has_format = False
        self.directory_id: bytes | None = b""
        """The id of this directory, where copies without an envelope are told apart; None: the record of it is
        damaged."""
        self.features: set[str] = set()
        """Features that a release must know to read this directory; in the format file from its next writing on."""
        disk.make_directory(path)
        self._lock = disk.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT)
        try:
            if not disk.lock(self._lock, LOCK_WAIT_S):
                raise Unavailable(f"another kvstore server uses {path}: stop it, or set tiers.nvme.directory")
            self._read_format()
            self._lock = self._lender.lend(self._lock)
        except BaseException:
            disk.close(self._lock)
            raise

    def _read_format(self) -> None:
        """Refuse a directory that a newer release or another tenant wrote, before a byte is changed."""
        try:
            found = json.loads(self.read(FORMAT_FILE))
        except FileNotFoundError:
            return
        except (ValueError, RecursionError):
            found = {}  # the regions carry their own version
        if not isinstance(found, dict):
            found = {}
        self.directory_id = _id_in(found)
        self._has_format = bool(found)
        minimum, features = found.get("minimum_reader", FORMAT), found.get("features", [])
        unknown = set(map(str, features)) - KNOWN_FEATURES if isinstance(features, list) else {str(features)}
        if not isinstance(minimum, int) or minimum > FORMAT or unknown:
            raise NotOurs(
                f"{self.path} was written by a newer kvstore (format {found.get('format')}, needs a reader of "
                f"{minimum}{', features ' + ', '.join(sorted(unknown)) if unknown else ''}; this one reads {FORMAT}): "
                "start that release, or set tiers.nvme.directory to another directory. Nothing was changed"
            )
        if found and found.get("owner", "") != self._owner:
            raise NotOurs(
                f"{self.path} was written by another tenant, or by this one with another secret: give it back the "
                "secret it had (tenants.NAME.secret_file), or move the directory away. Nothing was changed"
            )
        self._said = found
        if isinstance(features, list) and ENVELOPES_USED in features:
            self.features.add(ENVELOPES_USED)

    def begin(self, ring: EnvelopeRing | None = None) -> Snapshot | None:
        """Return the snapshot of the last clean stop, or None when there is none to be believed, also for want of a key
        in the ``ring``: then the slots are to be scanned. From here on the directory counts as in use: the snapshot is
        removed (a full device has room for that)."""
        ring = ring or EnvelopeRing()
        snapshot = self._read_snapshot(ring)
        if snapshot is not None and not snapshot.key_ids <= set(ring.key_ids):
            snapshot = None
        self.remove(INDEX_FILE)
        try:
            self._write_format("")  # no copy of an old snapshot is believed later on
        except OSError:
            if not self._has_format:
                raise
        return snapshot

    def end(self, snapshot: Snapshot, sealing: Sealing | None = None) -> None:
        """Leave the snapshot of a clean stop, which the next start believes."""
        packed = _pack(snapshot.columns)
        if sealing is not None:
            packed = seal_file(sealing, _INDEX_ABOUT, packed)
        clean = xxhash.xxh3_128_hexdigest(packed)
        self.write(INDEX_FILE, packed)
        self._faults.reach("nvme.snapshot.written")
        self._end_times(clean, snapshot.columns, sealing)
        keys = {"keys": sorted(each.hex() for each in snapshot.key_ids)} if snapshot.key_ids else {}
        if snapshot.is_whole:
            self._write_format(clean, keys)
            return
        regions, unread = sorted(snapshot.regions or ()), sorted(snapshot.unread)
        # Not as "clean": a release that knows nothing of parts reads every header instead.
        part = {"clean": clean, "regions": regions, "unread": unread}
        self._write_format("", {"part": part, **keys})

    def _end_times(self, clean: str, columns: IndexColumns, sealing: Sealing | None) -> None:
        """Write when the snapshot's chunks were stored, in a file of its own: releases that do not know that file can
        still read the snapshot. A hint: without it the chunks' age is not known."""
        data = bytes.fromhex(clean) + columns.times.tobytes()
        try:
            self.write(TIMES_FILE, seal_file(sealing, _TIMES_ABOUT, data) if sealing is not None else data)
        except OSError as error:
            _log.warning("how old chunks are will not be known", extra={"reason": str(error)})

    def _read_times(self, clean: str, count: int, ring: EnvelopeRing) -> NDArray[np.uint32]:
        """Return the times of a snapshot of ``count`` rows; empty where they are not known."""
        try:
            data = open_file(ring, _TIMES_ABOUT, self.read(TIMES_FILE)) or b""
        except (OSError, DataLoss):
            data = b""
        if data[:_CLEAN_BYTES] != bytes.fromhex(clean) or len(data) != _CLEAN_BYTES + 4 * count:
            return np.empty(0, np.uint32)
        return np.frombuffer(data, np.uint32, offset=_CLEAN_BYTES)

    def require(self, feature: str) -> None:
        """Keep releases that do not know this feature from opening the directory, from now on. Raises OSError."""
        if feature not in self.features:
            self.features.add(feature)
            try:
                self._write_format("")
            except OSError:
                self.features.discard(feature)
                raise

    def identify(self, directory_id: bytes) -> None:
        """Give the directory this id from now on (empty: none). Raises OSError."""
        if directory_id != self.directory_id:
            before, self.directory_id = self.directory_id, directory_id
            try:
                self._write_format("")
            except OSError:
                self.directory_id = before
                raise

    def close(self) -> None:
        """Release the lock, so that another process can have the directory. Idempotent."""
        if self._lock >= 0:
            self._lender.take_back(self._lock)
            self._disk.close(self._lock)
            self._lock = -1

    def _write_format(self, clean: str, more: dict[str, Any] | None = None) -> None:
        said: dict[str, Any] = {"kvstore": "nvme", "format": FORMAT, "minimum_reader": FORMAT}
        said |= {"features": sorted(self.features), "clean": clean}
        said |= more or {}
        if self.directory_id:
            said["id"] = self.directory_id.hex()
        if self._owner:
            said["owner"] = self._owner
        self.write(FORMAT_FILE, json.dumps(said).encode())

    def _read_snapshot(self, ring: EnvelopeRing) -> Snapshot | None:
        part = self._said.get("part")
        said = part if isinstance(part, dict) else self._said
        clean = str(said.get("clean", ""))
        try:
            key_ids = frozenset(map(bytes.fromhex, self._said.get("keys", ())))
            columns = self._read_index(clean, ring) if clean else None
            if columns is None or said is not part:
                return None if columns is None else Snapshot(columns, key_ids=key_ids)
            unread = tuple((int(region), int(slot)) for region, slot in said["unread"])
            return Snapshot(columns, frozenset(map(int, said["regions"])), unread, key_ids)
        except (OSError, KeyError, TypeError, ValueError, OverflowError, DataLoss):
            return None

    def _read_index(self, clean: str, ring: EnvelopeRing) -> IndexColumns | None:
        packed = self.read(INDEX_FILE)
        opened = open_file(ring, _INDEX_ABOUT, packed) if xxhash.xxh3_128_hexdigest(packed) == clean else None
        columns = None if opened is None else _unpack(opened)
        return None if columns is None else replace(columns, stored_s=self._read_times(clean, len(columns), ring))

    def read(self, name: str) -> bytes:
        """Return a whole file. Raises OSError."""
        return read_whole(self._disk, self.path / name, FILE_BYTES_MAX)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there, durably."""
        self._disk.remove(self.path / name)
        self._disk.sync_directory(self.path)

    def write(self, name: str, data: bytes, begins: Callable[[], None] = lambda: None) -> None:
        """Replace a file atomically: after a power cut it has the old content or the new. ``begins``: called before the
        new content can be there. Raises OSError; which of the two is there then is not known once that was called."""

        def reach() -> None:
            self._faults.reach("nvme.replace")
            begins()

        replace_whole(self._disk, self.path / name, data, reach)


def _id_in(found: dict[str, Any]) -> bytes | None:
    """Return the id of a directory, empty where it has none; None: what says so is damaged."""
    try:
        said = bytes.fromhex(found.get("id", "")) if found else None
    except (TypeError, ValueError):
        return None
    return said if said is None or len(said) in (0, ID_BYTES) else None


def _pack(columns: IndexColumns) -> bytes:
    names = b"".join(
        _SPACE.pack(name, _PROVENANCES.index(provenance), _EXACTNESSES.index(exactness))
        for name, provenance, exactness in columns.names
    )
    head = _INDEX_HEAD.pack(_INDEX_MAGIC, FORMAT, FORMAT, 0, len(columns.names), len(columns))
    arrays = (columns.residencies, columns.marks, columns.token_counts, columns.spaces)
    return b"".join([head, names, *(each.tobytes() for each in arrays), columns.digests, columns.parents])


def _unpack(packed: bytes) -> IndexColumns | None:
    """Return the snapshot's columns, or None when the bytes are not a snapshot, or name what this release does not
    know. Their checksum was compared before."""
    if len(packed) < _INDEX_HEAD.size:
        return None
    magic, _, reader, _, name_count, count = _INDEX_HEAD.unpack_from(packed)
    row_bytes = 8 + 8 + 4 + 2 + 2 * DIGEST_BYTES
    if magic != _INDEX_MAGIC or reader > FORMAT:
        return None
    if len(packed) != _INDEX_HEAD.size + name_count * _SPACE.size + count * row_bytes:
        return None
    place = _INDEX_HEAD.size
    spoken = list(_SPACE.iter_unpack(packed[place : place + name_count * _SPACE.size]))
    if any(one >= len(_PROVENANCES) or other >= len(_EXACTNESSES) for _, one, other in spoken):
        return None
    names = [(name, _PROVENANCES[provenance], _EXACTNESSES[exactness]) for name, provenance, exactness in spoken]
    place += name_count * _SPACE.size

    def column(dtype: Any) -> NDArray[Any]:
        nonlocal place
        values = np.frombuffer(packed, dtype, count, place)
        place += values.nbytes
        return values

    numbers, marks, counts, spaces = column(np.int64), column(np.uint64), column(np.int32), column(np.uint16)
    if count and spaces.max() >= name_count:
        return None
    middle = place + count * DIGEST_BYTES
    return IndexColumns(names, numbers, marks, counts, spaces, packed[place:middle], packed[middle:])
