"""What is encoded decodes to the same bytes, or to nothing."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import lz4.block
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    EncodedChunk,
    checksum_strips,
    decode_slab,
    encode_chunk,
    layout_of,
    pack_header,
    parse_header,
    raw_header,
    slab_parts,
    slab_range,
    strip_seeds,
)
from kvstore.chunk.layout import place_strips
from kvstore.errors import DataLoss
from kvstore.spec import DTYPES, CacheKind, LayerSpec, ModelSpec
from tests.chunk.test_chunk import geometries, header_of, layouts, sealed
from tests.specs import odd_spec, small_spec

Geometry = tuple[ModelSpec, CacheKind, int, int | None]
FILLS = ("random", "constant", "gaussian", "mixed")
POISON = 0xDB
MANY = settings(max_examples=300)


@dataclass
class Raw:
    """A raw chunk as an arena keeps it."""

    header: ChunkHeader
    layout: ChunkLayout
    pieces: list[np.ndarray]
    seeds: list[int]


def big_layout(dtype: str) -> ChunkLayout:
    """Strips of 128 KiB in bf16."""
    layers = (LayerSpec(kv_heads=4, k_dim=128, v_dim=128),) * 2
    spec = small_spec(model_id=f"big-{dtype}", layers=layers, cache_dtype=dtype, chunk_tokens=256)
    return layout_of(spec, CacheKind.KV, 256)


def gaussian_bits(random: np.random.Generator, count: int, item_size: int) -> np.ndarray:
    """Floats of a cache: their upper bytes."""
    wide = random.standard_normal(count).astype(np.float32).view(np.uint32)
    return wide >> np.uint32(32 - 8 * item_size)


def raw_chunk(layout: ChunkLayout, fill: str, seed: int = 0) -> Raw:
    random = np.random.default_rng(seed)
    body = np.zeros(layout.body_bytes, np.uint8)
    pieces = []
    for index, slab in enumerate(layout.slabs):
        pieces.append(body[slab.offset : slab.offset + slab.byte_count])
        for part in slab_parts(layout, index, pieces[-1]):
            kind = FILLS[(index + part.which) % 3] if fill == "mixed" else fill
            if kind == "constant":
                part.array[...] = 7 + part.which
            elif kind == "gaussian":
                part.array[...] = gaussian_bits(random, part.array.size, layout.item_size).reshape(part.array.shape)
            else:
                part.array[...] = random.integers(0, 1 << 8 * layout.item_size, part.array.shape, np.uint64)
    header = header_of(layout)
    seeds = strip_seeds(header.storage_key, layout, header.write_id)
    header = raw_header(header, (checksum_strips(piece, layout, i, seeds) for i, piece in enumerate(pieces)))
    return Raw(header, layout, [np.frombuffer(pack_header(header, layout), np.uint8), *pieces], seeds)


def decoded(raw: Raw, header: ChunkHeader, body: np.ndarray, first: int = 0, stop: int | None = None) -> list:
    """Slabs ``first .. stop`` read as one range, then decoded; None for each that fails."""
    layout, found = raw.layout, []
    stop = len(layout.slabs) if stop is None else stop
    start, byte_count = slab_range(header, layout, first, stop)
    run = body[start : start + byte_count].copy()
    for index in range(first, stop):
        at, size = slab_range(header, layout, index, index + 1)
        target = np.full(layout.slabs[index].byte_count, POISON, np.uint8)
        good = decode_slab(header, layout, index, run[at - start : at - start + size], target, raw.seeds)
        found.append(target if good else None)
    return found


def body_of(raw: Raw, encoded: EncodedChunk) -> np.ndarray:
    return encoded.data[raw.layout.header_bytes :]


@MANY
@given(geometries(), st.sampled_from(FILLS), st.integers(0, 3))
def test_an_encoded_chunk_decodes_to_the_raw_one_header_included(geometry: Geometry, fill: str, seed: int) -> None:
    check_round_trip(raw_chunk(layout_of(*geometry), fill, seed))


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_full_chunks_of_every_dtype_decode_to_the_raw_ones(dtype: str, fill: str) -> None:
    check_round_trip(raw_chunk(big_layout(dtype), fill))
    mla = odd_spec(dtype, 1, 512, 64, 256, mla=True)
    check_round_trip(raw_chunk(layout_of(mla, CacheKind.MLA, 200), fill))


def stored_bytes(header: ChunkHeader, layout: ChunkLayout) -> int:
    """Header and body."""
    return layout.header_bytes + slab_range(header, layout, 0, len(layout.slabs))[1]


def check_round_trip(raw: Raw) -> None:
    layout = raw.layout
    encoded = encode_chunk(raw.header, layout, raw.pieces)
    header = parse_header(encoded.data, layout)
    assert header.encoding == "lz4"
    assert encoded.data.size == stored_bytes(header, layout) <= layout.total_bytes
    slabs = decoded(raw, header, body_of(raw, encoded))
    assert all((slab == piece).all() for slab, piece in zip(slabs, raw.pieces[1:], strict=True))
    again = raw_header(header, (checksum_strips(slab, layout, i, raw.seeds) for i, slab in enumerate(slabs)))
    assert pack_header(again, layout) == raw.pieces[0].tobytes()
    assert again == raw.header


@given(geometries(), st.sampled_from(FILLS), st.data())
def test_any_run_of_slabs_is_one_aligned_range(geometry: Geometry, fill: str, data: st.DataObject) -> None:
    raw = raw_chunk(layout_of(*geometry), fill)
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    first = data.draw(st.integers(0, len(raw.layout.slabs) - 1))
    stop = data.draw(st.integers(first + 1, len(raw.layout.slabs)))
    for header, body in (
        (encoded.header, body_of(raw, encoded)),
        (raw.header, np.concatenate(raw.pieces[1:])),
    ):
        start, byte_count = slab_range(header, raw.layout, first, stop)
        assert start % 4096 == byte_count % 4096 == 0
        assert 0 < start + byte_count <= body.size
        found = decoded(raw, header, body, first, stop)
        assert all((a == b).all() for a, b in zip(found, raw.pieces[1 + first : 1 + stop], strict=True))


@given(geometries())
def test_raw_strips_lie_where_their_lengths_put_them(geometry: Geometry) -> None:
    layout = layout_of(*geometry)
    placed = place_strips(layout, layout.strip_lengths)
    assert (placed.offsets == layout.strip_offsets).all()
    assert placed.slab_offsets.tolist() == [*(slab.offset for slab in layout.slabs), layout.body_bytes]


def test_encoding_is_the_same_each_time_and_fills_the_memory_it_is_given() -> None:
    raw = raw_chunk(layouts()["mla"], "gaussian")
    target = np.full(raw.layout.total_bytes + 5, POISON, np.uint8)
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces, target)
    assert np.shares_memory(encoded.data, target)
    assert (encoded.data == encode_chunk(raw.header, raw.layout, raw.pieces).data).all()
    assert (target[raw.layout.total_bytes :] == POISON).all()


def test_a_chunk_gone_bad_in_memory_is_not_given_a_fresh_checksum() -> None:
    raw = raw_chunk(layouts()["kv"], "gaussian")
    raw.pieces[2][5] ^= 1
    with pytest.raises(DataLoss):
        encode_chunk(raw.header, raw.layout, raw.pieces)


# ------------------------------------------------------------------ what it is for


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gaussian_values_become_smaller(dtype: str) -> None:
    raw = raw_chunk(big_layout(dtype), "gaussian")
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    floor = {"bfloat16": 1.1, "float32": 1.04}[dtype]
    assert raw.layout.total_bytes / encoded.data.size > floor


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_random_bytes_are_kept_as_they_are(dtype: str) -> None:
    raw = raw_chunk(big_layout(dtype), "random")
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    assert encoded.data.size == raw.layout.total_bytes
    assert (body_of(raw, encoded) == np.concatenate(raw.pieces[1:])).all()


# ------------------------------------------------------------------ damage


@MANY
@given(st.sampled_from(sorted(layouts())), st.sampled_from(FILLS), st.data())
def test_a_flipped_byte_is_noticed_or_changes_nothing(name: str, fill: str, data: st.DataObject) -> None:
    raw = raw_chunk(layouts()[name], fill)
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    at = data.draw(st.integers(0, encoded.data.size - 1))
    damaged = encoded.data.copy()
    damaged[at] ^= data.draw(st.integers(1, 255))
    if at < raw.layout.header_bytes:
        with pytest.raises(DataLoss):
            parse_header(damaged, raw.layout)
        return
    place = at - raw.layout.header_bytes
    for index, found in enumerate(decoded(raw, encoded.header, damaged[raw.layout.header_bytes :])):
        assert found is None or (found == raw.pieces[1 + index]).all()
        start, byte_count = slab_range(encoded.header, raw.layout, index, index + 1)
        if not start <= place < start + byte_count:
            assert found is not None
        elif in_a_strip(encoded.header, place):
            assert found is None


def in_a_strip(header: ChunkHeader, place: int) -> bool:
    """Return True when this byte of the stored body belongs to a strip, not to a gap."""
    assert header.stored is not None
    starts = header.stored.offsets.astype(np.int64)
    return bool(((starts <= place) & (place < starts + header.stored.lengths)).any())


def test_a_stored_slab_of_another_length_is_refused() -> None:
    raw = raw_chunk(layouts()["kv"], "constant")
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    target = np.zeros(raw.layout.slabs[0].byte_count, np.uint8)
    for header, body in ((encoded.header, body_of(raw, encoded)), (raw.header, np.concatenate(raw.pieces[1:]))):
        start, byte_count = slab_range(header, raw.layout, 0, 1)
        assert start == 0
        for size in (0, 1, 64, byte_count - 64, byte_count - 1, byte_count + 1):
            assert not decode_slab(header, raw.layout, 0, body[:size].copy(), target, raw.seeds)


def test_strips_and_slabs_in_each_others_place_are_refused() -> None:
    raw = raw_chunk(layouts()["kv"], "constant")
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    stored = encoded.header.stored
    assert stored is not None
    body = body_of(raw, encoded)
    a, b, length = int(stored.offsets[0]), int(stored.offsets[1]), int(stored.lengths[0])
    assert (body[a : a + length] == body[b : b + length]).all()  # alike: only the seeds can tell them apart
    for order in ([1, 0, 2, 3], [2, 3, 0, 1]):
        swapped = replace(encoded.header, checksums=encoded.header.checksums[order])
        assert decoded(raw, swapped, body)[0] is None
    raw = raw_chunk(layouts()["kv"], "gaussian")
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    for header, held in ((encoded.header, body_of(raw, encoded)), (raw.header, np.concatenate(raw.pieces[1:]))):
        start, size = slab_range(header, raw.layout, 1, 2)
        target = np.zeros(raw.layout.slabs[0].byte_count, np.uint8)
        assert not decode_slab(header, raw.layout, 0, held[start : start + size].copy(), target, raw.seeds)


def test_raw_in_place_is_verified_and_its_gaps_zeroed() -> None:
    raw = raw_chunk(layouts()["kv tail"], "random")
    slab = raw.pieces[1].copy()
    slab[-1] = 1  # a gap: no strip reaches the slab's end
    assert decode_slab(raw.header, raw.layout, 0, slab, slab, raw.seeds)
    assert (slab == raw.pieces[1]).all()
    slab[0] ^= 1
    assert not decode_slab(raw.header, raw.layout, 0, slab, slab, raw.seeds)


# ------------------------------------------------------------------ hostile tables


def packed_of(name: str = "kv", fill: str = "constant") -> tuple[Raw, bytearray]:
    raw = raw_chunk(layouts()[name], fill)
    encoded = encode_chunk(raw.header, raw.layout, raw.pieces)
    return raw, bytearray(encoded.data[: raw.layout.header_bytes].tobytes())


@pytest.mark.parametrize(
    ("at", "form", "value"),
    [
        (16, "<Q", 0),  # body bytes
        (16, "<Q", 1 << 39),
        (35, "<B", 0),  # raw
        (35, "<B", 2),  # no such encoding
        (48, "<i", 0),  # E layer of a KV chunk
        (384, "<Q", 64),  # first strip's offset
        (384 + 32, "<Q", 0),  # strips over each other
        (384 + 32, "<Q", 1 << 63),
        (384 + 2 * 32, "<Q", 64),  # second slab not at 4 KiB
        (392, "<I", 0),  # first strip's length
        (392, "<I", 1 << 20),
        (392, "<I", (1 << 32) - 1),
        (392 + 3 * 32, "<I", 513),  # one above the bound
        (396, "<I", 1),  # zero
    ],
)
def test_a_table_that_no_writer_makes_is_refused(at: int, form: str, value: int) -> None:
    raw, packed = packed_of()
    assert struct.unpack_from(form, packed, at) != (value,)
    struct.pack_into(form, packed, at, value)
    with pytest.raises(DataLoss) as caught:
        parse_header(sealed(packed), raw.layout)
    assert caught.value.fields["reason"] != "checksum does not match"


@pytest.mark.parametrize("length", [0, 513, 1 << 16, (1 << 32) - 1])
def test_a_table_true_to_itself_is_still_bounded_by_the_layout(length: int) -> None:
    raw, packed = packed_of()
    header = parse_header(bytes(packed), raw.layout)
    assert header.stored is not None
    lengths = header.stored.lengths.copy()
    lengths[1] = length
    forged = pack_header(replace(header, stored=place_strips(raw.layout, lengths)), raw.layout)
    with pytest.raises(DataLoss, match="empty or longer"):
        parse_header(forged, raw.layout)


@MANY
@given(st.sampled_from(sorted(layouts())), st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=4))
def test_whatever_a_sealed_header_says_decoding_stays_in_bounds(name: str, changes: list[tuple[int, int]]) -> None:
    raw, packed = packed_of(name)
    for at, value in changes:
        packed[at] = value
    try:
        header = parse_header(sealed(packed), raw.layout)
    except DataLoss:
        return
    assert stored_bytes(header, raw.layout) <= raw.layout.total_bytes
    for index in range(len(raw.layout.slabs)):
        start, byte_count = slab_range(header, raw.layout, index, index + 1)
        assert start + byte_count <= raw.layout.body_bytes


def test_a_header_read_without_its_layout_says_nothing_of_strips() -> None:
    raw, packed = packed_of()
    header = parse_header(bytes(packed))
    assert (header.encoding, header.stored) == ("lz4", None)
    with pytest.raises(AssertionError):
        slab_range(header, raw.layout, 0, 1)


def test_the_documented_form_written_by_hand_decodes() -> None:
    """Here the second plane is kept as it is although it would compress: a reader takes what a writer chose."""
    layout = layouts()["kv"]
    raw = raw_chunk(layout, "constant")
    body = np.zeros(layout.body_bytes, np.uint8)
    lengths, rows, place = [], [], 0
    for slab in layout.slabs:
        for strip in range(slab.strip_first, slab.strip_first + slab.strip_count):
            start = int(layout.strip_offsets[strip]) - slab.offset
            source = raw.pieces[1 + layout.slabs.index(slab)][start : start + int(layout.strip_lengths[strip])]
            high, low = source[1::2].tobytes(), source[0::2].tobytes()
            block = lz4.block.compress(high, store_size=False)
            stored = struct.pack("<2I", len(block), len(low)) + block + low
            body[place : place + len(stored)] = np.frombuffer(stored, np.uint8)
            lengths.append(len(stored))
            rows.append(xxhash.xxh3_128_digest(stored, raw.seeds[strip]))
            place += -(-len(stored) // 64) * 64
        place = -(-place // 4096) * 4096
    table = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 16)
    placed = place_strips(layout, np.array(lengths, np.uint32))
    assert placed.body_bytes == place
    header = replace(raw.header, encoding="lz4", stored=placed, checksums=table)
    found = decoded(raw, parse_header(pack_header(header, layout), layout), body)
    assert all((slab == piece).all() for slab, piece in zip(found, raw.pieces[1:], strict=True))
