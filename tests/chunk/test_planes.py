"""A stored strip fills its raw strip, or is refused. Whole chunks: ``test_encoding``."""

from __future__ import annotations

import struct

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.chunk import planes
from kvstore.chunk.planes import pack_strip, unpack_strip

POISON = 0xDB


@settings(max_examples=300)
@given(st.integers(0, 2), st.data())
def test_strips_whose_checksum_is_right_and_whose_form_is_wrong_are_refused(index: int, data: st.DataObject) -> None:
    """A hostile writer can seal anything: it decodes to a whole strip or not at all, and never past the target."""
    size = 1 << index
    source = np.zeros(64 * size, np.uint8)
    room = np.zeros(source.size, np.uint8)
    packed = bytearray(room[: pack_strip(source, size, room)].tobytes())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(packed) - 1), st.integers(0, 255)), max_size=4)):
        packed[at] = value
    packed = packed[: data.draw(st.integers(0, len(packed)))] + data.draw(st.binary(max_size=8))
    memory = np.full(source.size + 128, POISON, np.uint8)
    unpack_strip(np.frombuffer(bytes(packed), np.uint8), size, memory[64:-64])
    assert (memory[:64] == POISON).all()
    assert (memory[-64:] == POISON).all()


def bomb(byte_count: int) -> bytes:
    return bytes(lz4.block.compress(bytes(byte_count), store_size=False))


def incompressible(byte_count: int) -> bytes:
    block = bytes(lz4.block.compress(np.random.default_rng(0).bytes(byte_count), store_size=False))
    assert len(block) > byte_count
    return block


def strip_of(*planes: bytes) -> np.ndarray:
    head = struct.pack(f"<{len(planes)}I", *map(len, planes))
    return np.frombuffer(head + b"".join(planes), np.uint8)


@pytest.mark.parametrize(
    "stored",
    [
        strip_of(bomb(4096), bomb(1 << 20)),  # expands past its plane
        strip_of(bomb(4096), bomb(4095)),  # ends short of it
        strip_of(bomb(4096), b""),
        strip_of(bomb(4096), b"\xff" * 40),
        strip_of(bomb(4096), bytes(4097)),  # longer than a plane
        strip_of(bomb(4096), incompressible(4096)),  # a block of a whole plane, and longer than it
        np.append(strip_of(bomb(4096), bomb(4096)), np.uint8(0)),  # something follows
        np.frombuffer(struct.pack("<2I", 0xFFFFFFFF, 0xFFFFFFFF) + bytes(50), np.uint8),
        np.frombuffer(struct.pack("<2I", 30, 30) + bytes(50), np.uint8),
        np.zeros(8, np.uint8),
        np.zeros(0, np.uint8),
        np.zeros(8193, np.uint8),  # longer than the strip
    ],
)
def test_a_form_that_does_not_fill_the_strip_is_refused(stored: np.ndarray) -> None:
    assert not unpack_strip(stored, 2, np.zeros(8192, np.uint8))
    assert unpack_strip(strip_of(bomb(4096), bomb(4096)), 2, np.zeros(8192, np.uint8))


def test_a_plane_too_large_for_a_block_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.zeros(8192, np.uint8)
    room = np.zeros(8192, np.uint8)
    length = pack_strip(source, 2, room)
    assert length < 100
    monkeypatch.setattr(planes, "PLANE_BYTES_MAX", 4095)
    assert not unpack_strip(room[:length], 2, np.zeros(8192, np.uint8))
    assert pack_strip(source, 2, room) == 8192
