"""Envelopes: they protect a copy outside memory. Someone who can write to the store cannot alter a byte unnoticed, and
with ``aead`` cannot read the bytes either.

The header of such a copy asks for a reader of version 2. Earlier releases take the copy for one of a newer release: it
is a miss, and they leave it in place. Beside the fields of a plain header it has

     32  envelope kind at 36: 1 mac, 2 aead; tag bytes at 37: 16
    304  envelope key id 16
    328  salt 16, header tag 16
         behind the strip table, a tag of 16 bytes per strip

and is as long as these need. The copy's key is derived from the envelope key, the storage key, the write, the encoding,
the envelope kind, and a salt that is drawn anew for each copy. The header's tag covers the whole header but the
checksum; it includes the seat, where a tier writes one, and the strips' tags. ``aead`` also encrypts the header fields
that could confirm a guessed prompt: the token count, the first position, the digests of chain, parent and tokens, and
the strips' checksums. Without the key, a reader still sees the sizes, the chunk and write, the model and the tenant: a
scan counts by these.

Opening gives the plain header byte for byte, so that a promoted chunk equals the one that was stored.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import xxhash
from blake3 import blake3

from kvstore.chunk.checksum import CHECKSUM_BYTES, seeds_of
from kvstore.chunk.header import (
    HEADER_BYTES_MAX,
    KNOWN_FEATURES,
    MAGIC,
    READER_VERSION,
    ChunkHeader,
    Envelope,
    is_newer_format,
    parse_header,
)
from kvstore.chunk.layout import FIXED_HEADER_BYTES, STRIP_ENTRY_BYTES, ChunkLayout
from kvstore.chunk.seal import AEAD, AEAD_NEEDS, HEADER_NUMBER, TAG_BYTES, StripSeal, as_bytes, is_available
from kvstore.chunk.strips import StripMemory, StripRun
from kvstore.errors import DataLoss, InvalidRequest
from kvstore.seams import EnvelopeKey, EnvelopeRing, SystemRandom
from kvstore.seams.memory import Bytes
from kvstore.spec import ENVELOPES
from kvstore.units import PAGE_BYTES

ENVELOPE_READER = 2
"""The format version of copies in envelopes, and the least reader version that they ask for."""
SALT_BYTES = 16
_CONTEXT = "kvstore 2026-11 envelope of one copy"
_HEAD = struct.Struct("<8sHHIQQ6B2xII")
_STORAGE_KEY, _WRITE_ID = slice(128, 160), slice(288, 304)
_KEY_ID, _SEAT, _SALT, _TAG, _CHECKSUM = (
    slice(304, 320), slice(320, 328), slice(328, 344), slice(344, 360), slice(368, 384),
)  # fmt: skip
_HIDDEN = (slice(40, 44), slice(56, 64), slice(160, 256))
_random = SystemRandom()
_log = logging.getLogger("kvstore.chunk")


@dataclass(frozen=True, slots=True)
class Sealing:
    """The envelope kind and the key with which a copy is sealed."""

    kind: str
    key: EnvelopeKey


class Trust:
    """A tier's envelope policy. ``kind``: the envelope of new copies; with "none", copies without an envelope are read
    too. Copies that are sealed with a key in the ``ring`` are read whatever the kind is."""

    def __init__(self, kind: str = "none", ring: EnvelopeRing | None = None) -> None:
        self.kind = kind
        self.ring = ring or EnvelopeRing()
        assert kind == "none" or self.ring

    def sealing(self) -> Sealing | None:
        """Return the sealing of a copy that is written now; None: it is written without an envelope."""
        return None if self.kind == "none" else Sealing(self.kind, self.ring.newest)

    def header_bytes(self, layout: ChunkLayout) -> int:
        """Return the largest number of bytes that a copy's header can have."""
        return sealed_header_bytes(layout.strip_count) if self.ring else layout.header_bytes

    def read_header(
        self, data: bytes | Bytes, layout: ChunkLayout | None, *, may_be_plain: bool = False
    ) -> ChunkHeader | None:
        """Return the header of a copy; ``data`` are its first ``header_bytes``. None: a newer release wrote the copy,
        or this node lacks the key or the package that opens it. That is a miss, and the copy stays. ``may_be_plain``:
        this copy needs no envelope. Raises DataLoss for a copy that is damaged, has a wrong tag, or lacks an envelope
        where one is required."""
        if not is_sealed(data):
            if is_newer_format(bytes(data[:FIXED_HEADER_BYTES])):
                return None
            if self.kind != "none" and not may_be_plain:
                raise DataLoss("a copy without an envelope where tiers' settings demand one", reason="envelope")
            return parse_header(data, layout)
        if not self.ring:
            return None
        whole = _whole(data)
        key = self.ring.key_of(bytes(whole[_KEY_ID]))
        if key is None:
            return None
        if not is_available(ENVELOPES[whole[36]]):
            _warn_of_package()
            return None
        return open_header(key, whole, layout)


@cache
def _warn_of_package() -> None:
    _log.warning(f"copies are sealed with aead, and misses here: {AEAD_NEEDS}")


def check_openable(data: bytes | Bytes, ring: EnvelopeRing) -> None:
    """Raises InvalidRequest when only a package is missing for opening a copy in an envelope: its key is in the
    ring."""
    whole = _whole(data)
    if ring.key_of(bytes(whole[_KEY_ID])) is not None and not is_available(ENVELOPES[whole[36]]):
        raise InvalidRequest(f"a copy is sealed with aead and cannot be checked: {AEAD_NEEDS}")


def is_sealed(data: bytes | Bytes) -> bool:
    """True when a copy is in an envelope of this release's format. ``data`` are the first bytes of its header."""
    first = bytes(data[:FIXED_HEADER_BYTES])
    if len(first) < FIXED_HEADER_BYTES or first[: len(MAGIC)] != MAGIC:
        return False
    _, _, reader, _, _, features, _, _, _, _, envelope, *_ = _HEAD.unpack_from(first)
    return bool(reader == ENVELOPE_READER and not features & ~KNOWN_FEATURES and 0 < envelope < len(ENVELOPES))


def sealed_header_bytes(strip_count: int) -> int:
    """Return the header bytes of a copy in an envelope."""
    return _pages(FIXED_HEADER_BYTES + strip_count * (STRIP_ENTRY_BYTES + TAG_BYTES))


def _pages(byte_count: int) -> int:
    return -(-byte_count // PAGE_BYTES) * PAGE_BYTES


# ------------------------------------------------------------ seal


class Sealer:
    """Seals one copy: all its strips, in order, then its header. ``header`` is the packed plain header, ``seat`` the
    place where the copy is written. Raises DataLoss when the header is damaged."""

    def __init__(self, sealing: Sealing, header: Bytes, seat: int = 0) -> None:
        self._plain = header.tobytes()
        parse_header(self._plain)
        self._sealing, self._seat = sealing, seat
        self._salt = _random.bytes(SALT_BYTES)
        self._seal = _seal_of(sealing.kind, sealing.key, self._plain, self._salt)
        self._table = _table(np.frombuffer(self._plain, np.uint8))
        self._tags: list[bytes] = []

    def body(self, data: Bytes, strips: StripRun, room: Bytes | None = None) -> Bytes:
        """Seal the next strips, and return their bytes in the copy: with ``mac`` the memory itself, with ``aead`` the
        beginning of ``room``, or new memory. Raises DataLoss when a strip fails its checksum in the header: no tag must
        vouch for it."""
        target = data if self._sealing.kind != AEAD else np.empty(data.size, np.uint8) if room is None else room
        seeds = seeds_of(strips.key, strips.layers, strips.heads)
        for start, stop, seed in zip(strips.starts.tolist(), strips.stops.tolist(), seeds, strict=True):
            strip, number = data[start:stop], len(self._tags)
            self._tags.append(self._seal.seal(number, strip, target[start:stop]))
            # Checked after sealing: memory that was reused for another chunk meanwhile fails the check here.
            if xxhash.xxh3_128_digest(strip.data, seed) != self._table[number, -CHECKSUM_BYTES:].tobytes():
                raise DataLoss("strips of a resident chunk are not the ones its header names", strip=number)
        if target is not data:
            target = target[: data.size]
            strips.zero_gaps(target)
        return target

    def header(self) -> Bytes:
        """Return the sealed header. Call it once all strips are sealed."""
        assert len(self._tags) == len(self._table)
        tags = b"".join(self._tags)
        return as_bytes(_sealed_header(self._plain, self._sealing, self._seal, self._salt, self._seat, tags))


def sealed(sealing: Sealing, header: Bytes, runs: Sequence[StripMemory]) -> list[Bytes]:
    """Blocking. Return a copy of a chunk in an envelope: its header, then its body, as a ``Sealer`` makes them.
    ``runs`` are all strips in their stored form. Raises DataLoss as ``Sealer`` does."""
    sealer = Sealer(sealing, header)
    bodies = [sealer.body(*run) for run in runs]
    return [sealer.header(), *bodies]


def _sealed_header(plain: bytes, sealing: Sealing, seal: StripSeal, salt: bytes, seat: int, tags: bytes) -> bytearray:
    strip_count = len(tags) // TAG_BYTES
    whole = bytearray(sealed_header_bytes(strip_count))
    end = FIXED_HEADER_BYTES + strip_count * STRIP_ENTRY_BYTES
    whole[:end] = plain[:end]
    _say(whole, ENVELOPE_READER, len(whole), ENVELOPES.index(sealing.kind), TAG_BYTES)
    whole[_KEY_ID], whole[_SALT], whole[_SEAT] = sealing.key.key_id, salt, struct.pack("<Q", seat)
    whole[_CHECKSUM] = bytes(CHECKSUM_BYTES)
    whole[end : end + len(tags)] = tags
    hidden = as_bytes(_hidden(whole))
    _hide(whole, bytes(hidden.size))
    tag = seal.seal(HEADER_NUMBER, hidden, hidden, bytes(whole))
    _hide(whole, hidden.tobytes())
    whole[_TAG] = tag
    whole[_CHECKSUM] = xxhash.xxh3_128_digest(whole)
    return whole


def _seal_of(kind: str, key: EnvelopeKey, header: bytes | bytearray, salt: bytes) -> StripSeal:
    encoding = header[35]
    material = key.key + header[_STORAGE_KEY] + header[_WRITE_ID] + bytes([encoding, ENVELOPES.index(kind)]) + salt
    own = blake3(bytes(material), derive_key_context=_CONTEXT).digest()
    return StripSeal(kind, own, bytes(struct.pack("<HB", ENVELOPE_READER, encoding) + header[_STORAGE_KEY]))


def _say(whole: bytearray, version: int, header_bytes: int, envelope: int, tag_bytes: int) -> None:
    struct.pack_into("<HHI", whole, len(MAGIC), version, version, header_bytes)
    struct.pack_into("<BB", whole, 36, envelope, tag_bytes)


def _table(whole: Bytes) -> Bytes:
    """Return the strip table, [strips, 32]; the last 16 bytes of a row are the checksum."""
    strip_count = int.from_bytes(whole[44:48].tobytes(), "little")
    stop = FIXED_HEADER_BYTES + strip_count * STRIP_ENTRY_BYTES
    return whole[FIXED_HEADER_BYTES:stop].reshape(strip_count, STRIP_ENTRY_BYTES)


def _hidden(whole: bytearray) -> bytes:
    """Return the bytes of a header that ``aead`` encrypts."""
    fixed = b"".join(bytes(whole[part]) for part in _HIDDEN)
    return fixed + _table(np.frombuffer(whole, np.uint8))[:, -CHECKSUM_BYTES:].tobytes()


def _hide(whole: bytearray, hidden: bytes) -> None:
    """Write ``hidden`` to the places that ``_hidden`` reads."""
    at = 0
    for part in _HIDDEN:
        size = part.stop - part.start
        whole[part] = hidden[at : at + size]
        at += size
    table = _table(np.frombuffer(whole, np.uint8))
    table[:, -CHECKSUM_BYTES:] = np.frombuffer(hidden[at:], np.uint8).reshape(-1, CHECKSUM_BYTES)


# ------------------------------------------------------------ open


def _whole(data: bytes | Bytes) -> bytearray:
    """Return the whole header of a copy in an envelope, its checksum verified and set to zero. Raises DataLoss."""
    _, _, _, header_bytes, *_, strip_count = _HEAD.unpack_from(bytes(data[: _HEAD.size]))
    if header_bytes != sealed_header_bytes(strip_count) or not header_bytes <= min(len(data), HEADER_BYTES_MAX):
        raise DataLoss("chunk header: its length does not fit its strips", reason="header")
    whole = bytearray(bytes(data[:header_bytes]))
    checksum, whole[_CHECKSUM] = bytes(whole[_CHECKSUM]), bytes(CHECKSUM_BYTES)
    if xxhash.xxh3_128_digest(whole) != checksum:
        raise DataLoss("chunk header: checksum does not match", reason="header")
    return whole


def open_header(key: EnvelopeKey, whole: bytearray, layout: ChunkLayout | None) -> ChunkHeader:
    """Return the plain header that was sealed, with the envelope that opens its strips. ``whole``: the result of
    ``_whole``. Raises DataLoss."""
    tag, whole[_TAG] = bytes(whole[_TAG]), bytes(TAG_BYTES)
    seal = _seal_of(ENVELOPES[whole[36]], key, whole, bytes(whole[_SALT]))
    hidden = as_bytes(_hidden(whole))
    _hide(whole, bytes(hidden.size))
    if not seal.opens(HEADER_NUMBER, hidden, tag, bytes(whole)):
        raise DataLoss("the envelope of a copy is not ours, or was altered", reason="tag")
    _hide(whole, hidden.tobytes())
    strip_count = int.from_bytes(whole[44:48], "little")
    end = FIXED_HEADER_BYTES + strip_count * STRIP_ENTRY_BYTES
    tags = bytes(whole[end : end + strip_count * TAG_BYTES])
    return replace(_plain(whole, end, layout), envelope=Envelope(seal, tags, len(whole)))


def _plain(whole: bytearray, end: int, layout: ChunkLayout | None) -> ChunkHeader:
    plain = bytearray(_pages(end))
    plain[:end] = whole[:end]
    _say(plain, READER_VERSION, len(plain), 0, 0)
    plain[_KEY_ID], plain[_SALT], plain[_SEAT] = bytes(16), bytes(SALT_BYTES), bytes(8)
    plain[_CHECKSUM] = xxhash.xxh3_128_digest(plain)
    return parse_header(bytes(plain), layout)


def shown_header(data: bytes | Bytes) -> ChunkHeader:
    """Return the part of a sealed copy's header that is readable without a key. The fields that ``aead`` encrypts are
    zero, also with ``mac``. Nothing in it is proven: that needs the key. Raises DataLoss."""
    whole = _whole(data)
    _hide(whole, bytes(len(_hidden(whole))))
    strip_count = int.from_bytes(whole[44:48], "little")
    return _plain(whole, FIXED_HEADER_BYTES + strip_count * STRIP_ENTRY_BYTES, None)


def open_slabs(header: ChunkHeader, layout: ChunkLayout, slabs: range, data: Bytes) -> bool:
    """Blocking. Open stored slabs in place. True when all tags are right, and for a copy without an envelope."""
    if header.envelope is None:
        return True
    first, stop = layout.strips_of(slabs)
    offsets = layout.strip_offsets if header.stored is None else header.stored.offsets
    lengths = layout.strip_lengths if header.stored is None else header.stored.lengths
    base = layout.slabs[slabs.start].offset if header.stored is None else int(header.stored.slab_offsets[slabs.start])
    for number in range(first, stop):
        start = int(offsets[number]) - base
        strip = data[start : start + int(lengths[number])]
        if not header.envelope.seal.opens(number, strip, header.checksums_of(number, number + 1)):
            return False
    return True
