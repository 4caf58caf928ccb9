"""A chunk written is the chunk read; anything else is noticed."""

from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.chunk import (
    ChunkHeader,
    ChunkLayout,
    checksum_strips,
    layout_of,
    pack_header,
    parse_header,
    slab_parts,
    strip_seeds,
    verify_slab,
)
from kvstore.chunk.header import _CHECKSUM_AT, _FIXED
from kvstore.chunk.layout import KEPT_STRIPS_MAX, STRIP_COUNT_MAX
from kvstore.errors import DataLoss, InvalidRequest
from kvstore.spec import DTYPES, CacheKind, Exactness, LayerSpec, ModelSpec, Provenance
from tests.specs import odd_spec, small_spec

GOLDEN = {
    "kv": "e6294985acaec6c8ae141a1ce37547ee",
    "kv tail": "8173fe2c0dc95e5d79a9741c627a1d15",
    "mla": "b1d0af8384e29bfc2f7eb4308b522cda",
    "e": "babce7ee42e7ee8b917f563aaecbf60b",
}


def header_of(layout: ChunkLayout, seed: int = 0) -> ChunkHeader:
    random = np.random.default_rng(seed)
    e = layout.kind is CacheKind.E
    return ChunkHeader(
        kind=layout.kind, e_layer=layout.slabs[0].layer if e else -1, token_count=layout.token_count,
        namespace=b"n" * 32, fingerprint=b"f" * 32, storage_key=b"s" * 32, parent=bytes(32),
        chain_digest=b"c" * 32,
        token_digest=b"t" * 32, tenant_digest=b"T" * 16, first_position=7, rope_digest=b"r" * 16,
        write_id=b"w" * 16, checksums=random.integers(0, 255, (layout.strip_count, 16), dtype=np.uint8),
    )  # fmt: skip


def layouts() -> dict[str, ChunkLayout]:
    kv = small_spec()
    mla = odd_spec("bfloat16", 1, 24, 8, 100, mla=True)
    return {
        "kv": layout_of(kv, CacheKind.KV, 16),
        "kv tail": layout_of(kv, CacheKind.KV, 5),
        "mla": layout_of(mla, CacheKind.MLA, 100),
        "e": layout_of(kv, CacheKind.E, 16, 1),
    }


def filled_body(layout: ChunkLayout) -> np.ndarray:
    body = np.zeros(layout.body_bytes, np.uint8)
    for index, slab in enumerate(layout.slabs):
        for part in slab_parts(layout, index, body[slab.offset :]):
            part.array[...] = np.arange(part.array.size).reshape(part.array.shape) % 251 + part.which
    return body


def golden_digests() -> dict[str, str]:
    found = {}
    for name, layout in layouts().items():
        body = filled_body(layout)
        seeds = strip_seeds(b"s" * 32, layout, b"w" * 16)
        rows = b"".join(
            checksum_strips(body[slab.offset : slab.offset + slab.byte_count], layout, index, seeds)
            for index, slab in enumerate(layout.slabs)
        )
        checksums = np.frombuffer(rows, np.uint8).reshape(-1, 16)
        packed = pack_header(replace(header_of(layout), checksums=checksums), layout)
        found[name] = xxhash.xxh3_128_hexdigest(packed + body.tobytes())
    return found


def test_golden_chunks() -> None:
    assert golden_digests() == GOLDEN


@st.composite
def geometries(draw: st.DrawFn) -> tuple[ModelSpec, CacheKind, int, int | None]:
    mla = draw(st.booleans())
    chunk_tokens = draw(st.sampled_from([1, 17, 64, 100, 256]))
    spec = odd_spec(
        draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from([1, 2, 5, 8])),
        draw(st.sampled_from([1, 8, 80])), draw(st.sampled_from([3, 8, 128])), chunk_tokens, mla=mla,
    )  # fmt: skip
    count = draw(st.integers(1, chunk_tokens))
    if draw(st.booleans()):
        return spec, CacheKind.E, count, draw(st.sampled_from([0, 1, 2]))
    return spec, spec.kind, count, None


@given(geometries())
def test_parts_cover_every_element_once_and_nothing_else(
    geometry: tuple[ModelSpec, CacheKind, int, int | None],
) -> None:
    spec, kind, count, layer = geometry
    layout = layout_of(spec, kind, count, layer)
    touched = np.zeros(layout.body_bytes, np.uint8)
    for index, slab in enumerate(layout.slabs):
        assert slab.offset % 4096 == 0
        for part in slab_parts(layout, index, touched[slab.offset :]):
            ones = np.iinfo(part.array.dtype).max // 255
            part.array[...] += part.array.dtype.type(ones)
    assert touched.max() == 1
    assert int(touched.sum()) == int(layout.strip_lengths.sum(dtype=np.uint64))
    for offset, length in zip(layout.strip_offsets.tolist(), layout.strip_lengths.tolist(), strict=True):
        assert offset % 64 == 0
        assert touched[offset : offset + length].all()


@given(geometries())
def test_a_header_comes_back(geometry: tuple[ModelSpec, CacheKind, int, int | None]) -> None:
    layout = layout_of(*geometry)
    header = header_of(layout)
    packed = pack_header(header, layout)
    assert len(packed) == layout.header_bytes
    assert len(packed) % 4096 == 0
    found = parse_header(packed + b"more", layout)
    assert found == header
    assert (found.checksums == header.checksums).all()


@given(st.data())
def test_a_damaged_header_is_data_loss_and_nothing_worse(data: st.DataObject) -> None:
    layout = layouts()["kv"]
    packed = bytearray(pack_header(header_of(layout), layout))
    match data.draw(st.sampled_from(["flip", "cut", "random"])):
        case "flip":
            bit = data.draw(st.integers(0, len(packed) * 8 - 1))
            packed[bit // 8] ^= 1 << bit % 8
        case "cut":
            packed = packed[: data.draw(st.integers(0, len(packed) - 1))]
        case _:
            packed = bytearray(data.draw(st.binary(max_size=600)))
    with pytest.raises(DataLoss):
        parse_header(bytes(packed), layout)


def test_a_header_of_another_layout_is_refused() -> None:
    kinds = layouts()
    packed = pack_header(header_of(kinds["kv"]), kinds["kv"])
    for name in ("kv tail", "mla", "e"):
        with pytest.raises(DataLoss):
            parse_header(packed, kinds[name])


def test_right_bytes_in_a_wrong_place_fail() -> None:
    layout = layouts()["kv"]
    body = np.zeros(layout.body_bytes, np.uint8)  # all strips alike: only the seeds can tell them apart
    slab = body[: layout.slabs[0].byte_count]
    seeds = strip_seeds(b"s" * 32, layout, b"w" * 16)
    rows = b"".join(checksum_strips(slab, layout, index, seeds) for index in range(len(layout.slabs)))
    good = np.frombuffer(rows, np.uint8).reshape(-1, 16).copy()
    assert verify_slab(slab, layout, 0, seeds, good)
    assert not verify_slab(slab, layout, 0, seeds, good[[2, 3, 0, 1]])  # layers swapped
    assert not verify_slab(slab, layout, 0, seeds, good[[1, 0, 2, 3]])  # heads swapped
    assert not verify_slab(slab, layout, 0, strip_seeds(b"x" * 32, layout, b"w" * 16), good)  # another chunk
    assert not verify_slab(slab, layout, 0, strip_seeds(b"s" * 32, layout, b"v" * 16), good)  # an earlier write
    flipped = slab.copy()
    flipped[3] ^= 1
    assert not verify_slab(flipped, layout, 0, seeds, good)


@pytest.mark.parametrize(("count", "layer"), [(0, None), (17, None), (16, 2), (16, -1)])
def test_impossible_layouts_are_refused(count: int, layer: int | None) -> None:
    with pytest.raises(InvalidRequest):
        layout_of(small_spec(), CacheKind.KV if layer is None else CacheKind.E, count, layer)


def test_the_layouts_that_are_kept_are_bounded_however_many_lengths_a_client_names() -> None:
    layer = LayerSpec(kv_heads=128, k_dim=1, v_dim=1)
    large = replace(small_spec(), layers=(layer,) * 256, chunk_tokens=256)
    made = [weakref.ref(layout_of(large, CacheKind.KV, count)) for count in range(1, 257)]
    kept = sum(layout.strip_count for each in made if (layout := each()) is not None)
    assert kept <= KEPT_STRIPS_MAX
    assert layout_of(large, CacheKind.KV, 256) is layout_of(large, CacheKind.KV, 256)
    usual = [layout_of(small_spec(), CacheKind.KV, count) for count in range(1, 17)]
    assert [layout_of(small_spec(), CacheKind.KV, count) for count in range(1, 17)] == usual


def test_a_layout_that_takes_long_to_make_is_refused() -> None:
    """Any client may name the model, and all of them wait for the server's loop."""
    layers = (LayerSpec(kv_heads=1024, k_dim=1, v_dim=1),) * 1024
    with pytest.raises(InvalidRequest, match="strips"):
        layout_of(small_spec(layers=layers), CacheKind.KV, 16)
    assert layout_of(small_spec(layers=layers[:128]), CacheKind.KV, 16).strip_count == STRIP_COUNT_MAX


@given(geometries(), st.integers(1, 3))
def test_elements_written_through_parts_lie_in_the_strip_the_layout_names(
    geometry: tuple[ModelSpec, CacheKind, int, int | None], chunk_count: int
) -> None:
    """Reads each strip back by the documented format alone: its first part [tokens, dim], then its second."""
    layout = layout_of(*geometry)
    stride = layout.body_bytes + 4096
    memory = np.zeros(stride * chunk_count, np.uint8)
    random = np.random.default_rng(0)
    dtype = np.dtype(f"<u{layout.item_size}")
    for index, slab in enumerate(layout.slabs):
        wanted: dict[tuple[int, int, int], list[np.ndarray]] = {}  # (chunk, head, first token) -> parts in order
        for part in slab_parts(layout, index, memory[slab.offset :], chunk_count, stride):
            part.array[...] = random.integers(0, np.iinfo(dtype).max, part.array.shape, dtype, endpoint=True)
            for chunk in range(chunk_count):
                for head in range(part.array.shape[1]):
                    wanted.setdefault((chunk, head, part.token_start), []).append(part.array[chunk, head].copy())
        for chunk in range(chunk_count):
            for strip in range(slab.strip_count):
                at = slab.strip_first + strip
                start = chunk * stride + int(layout.strip_offsets[at])
                stored = memory[start : start + int(layout.strip_lengths[at])].view(dtype)
                place = (chunk, 0, strip * 64) if layout.blocked else (chunk, strip, 0)
                assert (stored == np.concatenate([array.ravel() for array in wanted.pop(place)])).all()
        assert not wanted


@pytest.mark.parametrize("provenance", Provenance)
@pytest.mark.parametrize("exactness", Exactness)
def test_how_a_chunk_came_to_be_comes_back(provenance: Provenance, exactness: Exactness) -> None:
    layout = layouts()["e"]
    header = replace(header_of(layout), provenance=provenance, exactness=exactness)
    found = parse_header(pack_header(header, layout), layout)
    assert (found.provenance, found.exactness, found.e_layer) == (provenance, exactness, 1)


def sealed(packed: bytearray) -> bytes:
    """The header with a checksum that matches: what a hostile or buggy writer would send."""
    packed[_CHECKSUM_AT : _CHECKSUM_AT + 16] = bytes(16)
    packed[_CHECKSUM_AT : _CHECKSUM_AT + 16] = xxhash.xxh3_128_digest(packed)
    return bytes(packed)


@given(st.sampled_from(sorted(layouts())), st.lists(st.tuples(st.integers(0, 511), st.integers(0, 255)), max_size=4))
def test_a_header_with_any_fields_is_read_or_refused(name: str, changes: list[tuple[int, int]]) -> None:
    layout = layouts()[name]
    packed = bytearray(pack_header(header_of(layout), layout))
    for at, value in changes:
        packed[at] = value
    for expected in (None, layout):
        try:
            found = parse_header(sealed(packed), expected)
        except DataLoss:
            continue
        assert len(found.checksums) * 32 <= len(packed)
        assert expected is None or len(found.checksums) == layout.strip_count


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, 0),  # magic
        (8, 0),  # format version
        (10, 2),  # minimum reader
        (12, 1),  # header bytes
        (30, 1),  # features
        (32, 9),  # kind
        (32, 2),  # another kind of the same layout
        (33, 2),  # provenance
        (34, 2),  # exactness
        (35, 2),  # encoding
        (36, 1),  # envelope
        (40, 15),  # token count
        (44, 3),  # strip count
        (48, 0),  # E layer
        (17, 1),  # body bytes
        (384, 1),  # first strip's offset
        (392, 1),  # first strip's length
        (396, 1),  # first strip's zero
    ],
)
def test_each_field_that_contradicts_the_layout_is_refused(at: int, value: int) -> None:
    layout = layouts()["kv"]
    packed = bytearray(pack_header(header_of(layout), layout))
    assert sealed(bytearray(packed)) == bytes(packed)
    assert packed[at] != value
    packed[at] = value
    with pytest.raises(DataLoss) as caught:
        parse_header(sealed(packed), layout)
    assert caught.value.fields["reason"] != "checksum does not match"


def test_a_strip_count_past_the_data_is_refused_before_it_is_believed() -> None:
    layout = layouts()["kv"]
    packed = bytearray(pack_header(header_of(layout), layout))
    packed[44:48] = b"\xff" * 4
    with pytest.raises(DataLoss, match="length"):
        parse_header(sealed(packed))
    with pytest.raises(DataLoss, match="truncated"):
        parse_header(bytes(packed[: _FIXED.size - 1]))


def test_a_header_cut_short_is_data_loss_even_when_it_is_sealed() -> None:
    layout = layouts()["kv"]
    packed = bytearray(pack_header(header_of(layout), layout))
    for size in (_FIXED.size, _FIXED.size + 33, len(packed) - 1):
        with pytest.raises(DataLoss, match="length"):
            parse_header(sealed(packed[:size]))


@pytest.mark.parametrize("name", sorted(layouts()))
def test_every_strip_of_every_kind_is_bound_to_its_place(name: str) -> None:
    layout = layouts()[name]
    body = np.zeros(layout.body_bytes, np.uint8)
    seeds = strip_seeds(b"s" * 32, layout, b"w" * 16)
    assert len(set(seeds)) == layout.strip_count
    for index, slab in enumerate(layout.slabs):
        memory = body[slab.offset : slab.offset + slab.byte_count]
        good = np.zeros((layout.strip_count, 16), np.uint8)
        rows = checksum_strips(memory, layout, index, seeds)
        good[slab.strip_first : slab.strip_first + slab.strip_count] = np.frombuffer(rows, np.uint8).reshape(-1, 16)
        for strip in range(slab.strip_count):
            at = int(layout.strip_offsets[slab.strip_first + strip]) - slab.offset
            last = at + int(layout.strip_lengths[slab.strip_first + strip]) - 1
            for byte in (at, last):
                memory[byte] ^= 0x80
                alone = [verify_slab(memory, layout, index, seeds, good, k, 1) for k in range(slab.strip_count)]
                assert alone == [k != strip for k in range(slab.strip_count)]
                assert not verify_slab(memory, layout, index, seeds, good)
                memory[byte] ^= 0x80
        assert verify_slab(memory, layout, index, seeds, good)
