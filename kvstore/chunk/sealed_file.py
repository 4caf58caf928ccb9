"""Files that a tier keeps beside chunks, in an envelope, because their contents could confirm a guessed prompt.

      0  magic "KVSENVEL", envelope kind u8, 7 zero bytes
     16  envelope key id 16, salt 16, tag 16
     64  the file: encrypted with ``aead``, unchanged with ``mac``

The key is derived from the envelope key, the file's name ``about``, and a salt that is drawn anew each time.
"""

from __future__ import annotations

import struct

import numpy as np
from blake3 import blake3

from kvstore.chunk.envelope import Sealing
from kvstore.chunk.seal import TAG_BYTES, StripSeal, is_available
from kvstore.errors import DataLoss
from kvstore.seams import EnvelopeKey, EnvelopeRing, SystemRandom
from kvstore.spec import ENVELOPES

_MAGIC = b"KVSENVEL"
_CONTEXT = "kvstore 2026-11 envelope of one file"
_HEAD = struct.Struct(f"<8sB7x16s16s{TAG_BYTES}s")
_random = SystemRandom()


def seal_file(sealing: Sealing, about: bytes, data: bytes) -> bytes:
    """Return the sealed file that holds ``data``. ``about``: names the file; ``open_file`` needs the same name."""
    salt, body = _random.bytes(16), np.frombuffer(bytearray(data), np.uint8)
    tag = _seal_of(sealing.kind, sealing.key, about, salt).seal(0, body, body)
    return _HEAD.pack(_MAGIC, ENVELOPES.index(sealing.kind), sealing.key.key_id, salt, tag) + body.tobytes()


def open_file(ring: EnvelopeRing, about: bytes, data: bytes) -> bytes | None:
    """Return the data of a sealed file, or a file without envelope as it is. None: the key that it is sealed with is
    not in the ring, or the package that opens it is not installed. Raises DataLoss when it was altered."""
    if data[: len(_MAGIC)] != _MAGIC:
        return data
    if len(data) < _HEAD.size:
        raise DataLoss("a sealed file ends early", reason="truncated")
    _, kind, key_id, salt, tag = _HEAD.unpack_from(data)
    if not 0 < kind < len(ENVELOPES):
        raise DataLoss("a sealed file of no envelope that there is", reason="tag")
    key = ring.key_of(key_id)
    if key is None or not is_available(ENVELOPES[kind]):
        return None
    body = np.frombuffer(bytearray(data[_HEAD.size :]), np.uint8)
    if not _seal_of(ENVELOPES[kind], key, about, salt).opens(0, body, tag):
        raise DataLoss("a sealed file was altered, or is not ours", reason="tag")
    return body.tobytes()


def _seal_of(kind: str, key: EnvelopeKey, about: bytes, salt: bytes) -> StripSeal:
    own = blake3(key.key + salt + bytes([ENVELOPES.index(kind)]) + about, derive_key_context=_CONTEXT).digest()
    return StripSeal(kind, own, about)
