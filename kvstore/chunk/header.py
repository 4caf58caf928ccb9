"""The chunk header: which chunk this is, how it is laid out, and the checksum of every strip.

Layout, little-endian, padded with zeros to a multiple of 4 KiB:

      0  magic "KVSCHUNK", format version u16, minimum reader u16, header bytes u32
     16  body bytes u64, feature bits u64
     32  kind, provenance, exactness, encoding, envelope kind, tag bytes (u8 each), 2 zero bytes
     40  token count u32, strip count u32, E layer i32, zero u32, first position u64
     64  namespace 32, fingerprint 32, storage key 32, parent 32, chain digest 32, token digest 32
    256  tenant digest 16, rope digest 16, write id 16, envelope key id 16
    320  seat u64, zeros (see ``envelope``), stored u32 at 360, zeros, header checksum 16 at 368
    384  strip table: per strip offset u64, stored bytes u32, zero u32, checksum 16
         envelope tags, when there is an envelope: see ``envelope``

The strip table has the places of the stored strips, and the checksums of their stored bytes. The offsets follow from
the lengths: a reader refuses other offsets, and any length above the layout's.
The seat is the place where a tier wrote this copy, in the tier's own numbers; 0: the tier gives none. A faulty
device may write a copy to a wrong place, too, where it outlives the right one; its seat shows that it is misplaced.
``stored`` is the time at which the chunk was stored, in whole seconds since 1970; 0: an earlier release wrote none.
The header's checksum is XXH3-128 of its bytes with the checksum field zero.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np
import xxhash

from kvstore.chunk.checksum import CHECKSUM_BYTES, Checksums
from kvstore.chunk.layout import (
    CHUNK_BYTES_MAX,
    FIXED_HEADER_BYTES,
    STRIP_ENTRY_BYTES,
    ChunkLayout,
    StoredStrips,
    place_strips,
)
from kvstore.chunk.seal import TAG_BYTES, StripSeal
from kvstore.errors import DataLoss
from kvstore.keys import FORMAT_VERSION
from kvstore.seams.memory import Bytes
from kvstore.spec import CacheKind, Exactness, Provenance
from kvstore.units import PAGE_BYTES

MAGIC = b"KVSCHUNK"
READER_VERSION = 1
KNOWN_FEATURES = 0
HEADER_BYTES_MAX = 64 << 20
TOKEN_COUNT_MAX = (1 << 31) - 1

_KINDS = (CacheKind.KV, CacheKind.E, CacheKind.MLA, CacheKind.ENCODER, CacheKind.OPAQUE, CacheKind.E_FOR_KV)
_PROVENANCES = (Provenance.IN_CONTEXT, Provenance.STANDALONE)
_EXACTNESSES = (Exactness.EXACT, Exactness.DERIVED)
ENCODINGS = ("raw", "lz4")
_FIXED = struct.Struct("<8sHHIQQ6B2xIIiIQ32s32s32s32s32s32s16s16s16s16s40xI4x16s")
_SEAT_AT = 320
_SEAT_STOP = 328
_CHECKSUM_AT = 368
_ENTRY = np.dtype([("offset", "<u8"), ("length", "<u4"), ("zero", "<u4"), ("checksum", "u1", 16)])
assert _FIXED.size == FIXED_HEADER_BYTES
assert _ENTRY.itemsize == STRIP_ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Envelope:
    """The envelope of one copy: the seal that opens its strips, a tag of 16 bytes per strip, and the bytes of its
    stored header."""

    seal: StripSeal
    tags: bytes
    header_bytes: int


@dataclass(frozen=True, kw_only=True)
class ChunkHeader:
    """A chunk's identity, and its strips' checksums [strips, 16].

    ``stored`` has the places of encoded strips; None for raw strips, which lie where the layout says. ``envelope`` is
    the envelope of the copy that the header was read from, if that has one; a packed header does not contain it.
    """

    kind: CacheKind
    e_layer: int = -1
    provenance: Provenance = Provenance.IN_CONTEXT
    exactness: Exactness = Exactness.EXACT
    encoding: str = "raw"
    token_count: int
    namespace: bytes
    fingerprint: bytes
    storage_key: bytes
    parent: bytes
    chain_digest: bytes
    token_digest: bytes
    tenant_digest: bytes
    first_position: int
    rope_digest: bytes
    write_id: bytes
    checksums: Checksums = field(repr=False, compare=False)
    stored_s: int = field(default=0, compare=False)
    stored: StoredStrips | None = field(default=None, repr=False, compare=False)
    envelope: Envelope | None = field(default=None, repr=False, compare=False)

    def checksums_of(self, first: int, stop: int) -> bytes:
        """Return 16 bytes to check each of strips ``first .. stop`` as stored: its tag where the copy has an envelope,
        else its checksum."""
        if self.envelope is not None:
            return self.envelope.tags[first * TAG_BYTES : stop * TAG_BYTES]
        return self.checksums[first:stop].tobytes()

    @property
    def seal(self) -> StripSeal | None:
        """The seal that opens the copy's strips; None: the copy has no envelope."""
        return None if self.envelope is None else self.envelope.seal

    def bytes_before(self, layout: ChunkLayout) -> int:
        """Return the offset at which the body of the copy begins."""
        return layout.header_bytes if self.envelope is None else self.envelope.header_bytes


def write_mark(write_id: bytes) -> int:
    """Return the first 8 bytes of a write id as a number: the catalog keeps only these."""
    return int.from_bytes(write_id[:8], "little")


def pack_header(header: ChunkHeader, layout: ChunkLayout) -> bytes:
    """Return the header as ``layout.header_bytes`` bytes."""
    assert header.checksums.shape == (layout.strip_count, CHECKSUM_BYTES)
    assert (header.stored is None) == (header.encoding == "raw")
    body_bytes = layout.body_bytes if header.stored is None else header.stored.body_bytes
    fixed = _FIXED.pack(
        MAGIC, FORMAT_VERSION, READER_VERSION, layout.header_bytes, body_bytes, 0,
        _KINDS.index(header.kind), _PROVENANCES.index(header.provenance), _EXACTNESSES.index(header.exactness),
        ENCODINGS.index(header.encoding), 0, 0,
        header.token_count, layout.strip_count, header.e_layer, 0, header.first_position,
        header.namespace, header.fingerprint, header.storage_key, header.parent, header.chain_digest,
        header.token_digest, header.tenant_digest, header.rope_digest, header.write_id, bytes(16),
        header.stored_s, bytes(16),
    )  # fmt: skip
    table = np.zeros(layout.strip_count, _ENTRY)
    table["offset"] = layout.strip_offsets if header.stored is None else header.stored.offsets
    table["length"] = layout.strip_lengths if header.stored is None else header.stored.lengths
    table["checksum"] = header.checksums
    packed = bytearray(fixed + table.tobytes())
    packed.extend(bytes(layout.header_bytes - len(packed)))
    packed[_CHECKSUM_AT : _CHECKSUM_AT + CHECKSUM_BYTES] = xxhash.xxh3_128_digest(packed)
    return bytes(packed)


def is_newer_format(data: bytes) -> bool:
    """True when a header asks for a newer release than this; ``data`` are its first bytes. Such a copy is not damaged:
    it is left in place for nodes that can read it."""
    if data[: len(MAGIC)] != MAGIC or len(data) < FIXED_HEADER_BYTES:
        return False
    _, _, reader, _, _, features, *_ = _FIXED.unpack_from(data)
    return bool(reader > FORMAT_VERSION or features & ~KNOWN_FEATURES)


def write_seat(header: Bytes, seat: int) -> None:
    """Write the place of this copy into the bytes of a whole header, and its checksum anew."""
    header[_SEAT_AT:_SEAT_STOP] = np.frombuffer(struct.pack("<Q", seat), np.uint8)
    header[_CHECKSUM_AT : _CHECKSUM_AT + CHECKSUM_BYTES] = 0
    checksum = xxhash.xxh3_128_digest(header.data)
    header[_CHECKSUM_AT : _CHECKSUM_AT + CHECKSUM_BYTES] = np.frombuffer(checksum, np.uint8)


def read_seat(header: Bytes) -> int:
    """Return the place at which this copy says it was written; 0: it says none. Check the header first."""
    return int.from_bytes(header[_SEAT_AT:_SEAT_STOP].tobytes(), "little")


def _bad(reason: str) -> NoReturn:
    raise DataLoss(f"chunk header: {reason}", reason=reason)


def parse_header(data: bytes | Bytes, layout: ChunkLayout | None = None) -> ChunkHeader:
    """Read a header and, given the layout its spec implies, check that it describes exactly that layout.

    Without a layout the result identifies the chunk, but has no places of strips: ``stored`` is None.
    ``data`` begins with the header and may be longer. Trusts nothing; allocates no more than ``data`` holds.
    Raises: DataLoss with the problem in its ``reason`` field.
    """
    raw = bytes(data[:FIXED_HEADER_BYTES])
    if len(raw) < FIXED_HEADER_BYTES:
        _bad("truncated")
    (magic, version, reader, header_bytes, body_bytes, features, kind, provenance, exactness, encoding, envelope,
     tag_bytes, token_count, strip_count, e_layer, zero, first_position, namespace, fingerprint, storage_key, parent,
     chain_digest, token_digest, tenant_digest, rope_digest, write_id, _key, stored_s,
     checksum) = _FIXED.unpack(raw)  # fmt: skip
    if magic != MAGIC:
        _bad("no chunk begins here")
    if reader > FORMAT_VERSION or version < 1 or features & ~KNOWN_FEATURES:
        _bad(f"format version {version}, minimum reader {reader}, features {features:#x}: newer than this release")
    table_end = FIXED_HEADER_BYTES + strip_count * STRIP_ENTRY_BYTES
    sized = header_bytes % PAGE_BYTES == 0 and table_end <= header_bytes <= min(len(data), HEADER_BYTES_MAX)
    if not sized or header_bytes - table_end >= PAGE_BYTES or body_bytes > CHUNK_BYTES_MAX:
        _bad("its length does not fit its strips")
    whole = bytearray(bytes(data[:header_bytes]))
    whole[_CHECKSUM_AT : _CHECKSUM_AT + CHECKSUM_BYTES] = bytes(CHECKSUM_BYTES)
    if xxhash.xxh3_128_digest(whole) != checksum:
        _bad("checksum does not match")
    codes = kind < len(_KINDS) and provenance < 2 and exactness < 2 and encoding < len(ENCODINGS)
    if not codes or envelope or tag_bytes or zero:
        _bad("unknown kind, encoding or envelope")
    if token_count > TOKEN_COUNT_MAX:
        _bad("more tokens than a chunk can have")
    table = np.frombuffer(bytes(whole[FIXED_HEADER_BYTES:table_end]), _ENTRY)
    found = ChunkHeader(
        kind=_KINDS[kind], e_layer=e_layer, provenance=_PROVENANCES[provenance], exactness=_EXACTNESSES[exactness],
        encoding=ENCODINGS[encoding], token_count=token_count, namespace=namespace, fingerprint=fingerprint,
        storage_key=storage_key, parent=parent, chain_digest=chain_digest, token_digest=token_digest,
        tenant_digest=tenant_digest, first_position=first_position, rope_digest=rope_digest, write_id=write_id,
        checksums=table["checksum"], stored_s=stored_s,
    )  # fmt: skip
    return found if layout is None else _checked(found, layout, header_bytes, body_bytes, table)


def _checked(
    header: ChunkHeader, layout: ChunkLayout, header_bytes: int, body_bytes: int, table: np.ndarray
) -> ChunkHeader:
    """Return the header with its strips' places. Raises DataLoss when it contradicts the layout."""
    same = (
        header.kind is layout.kind
        and header.e_layer == (layout.slabs[0].layer if layout.kind is CacheKind.E else -1)
        and header.token_count == layout.token_count
        and header_bytes == layout.header_bytes
        and len(table) == layout.strip_count
        and not table["zero"].any()
    )
    if not same:
        _bad("it describes another model's chunk")
    if header.encoding == "raw":
        raw = body_bytes == layout.body_bytes and (table["length"] == layout.strip_lengths).all()
        if not raw or (table["offset"] != layout.strip_offsets).any():
            _bad("its strips do not lie where this model's do")
        return header
    lengths = table["length"].astype(np.uint32)
    if (lengths < 1).any() or (lengths > layout.strip_lengths).any():
        _bad("its strips are empty or longer than this model's")
    stored = place_strips(layout, lengths)
    if body_bytes != stored.body_bytes or (table["offset"] != stored.offsets).any():
        _bad("its strips do not lie where their lengths put them")
    return replace(header, stored=stored)
