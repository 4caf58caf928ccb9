"""A load's pieces: every slab once, wanted layers first, small ones first, and large ones only of large loads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.chunk import ChunkLayout, layout_of
from kvstore.movement.pieces import PIECE_COUNT_MIN, later_pieces, piece_bytes_of, pieces_in_order
from kvstore.planning.loading.facts import PIECE_BYTES
from kvstore.spec import CacheKind, LayerSpec
from tests.specs import small_spec

MIB = 1 << 20
LAYERS = 32


def wide(layer_bytes: int) -> ChunkLayout:
    """A chunk of so many bytes per layer."""
    layer = LayerSpec(kv_heads=8, k_dim=128, v_dim=128)
    tokens = layer_bytes // (2 * 2 * 8 * 128)
    return layout_of(small_spec(layers=(layer,) * LAYERS, chunk_tokens=tokens), CacheKind.KV, tokens)


@given(
    layer_bytes=st.sampled_from([MIB // 2, MIB, 3 * MIB, 5 * MIB]),
    first=st.frozensets(st.integers(0, LAYERS - 1)),
    piece_bytes=st.integers(PIECE_BYTES, 20 * MIB),
)
def test_every_slab_is_in_one_piece_and_no_piece_is_too_large(
    layer_bytes: int, first: frozenset[int], piece_bytes: int
) -> None:
    layout = wide(layer_bytes)
    pieces = pieces_in_order(layout, first, piece_bytes)
    order = [layout.slabs[slab].layer for piece in pieces for slab in piece]
    assert sorted(order) == sorted(slab.layer for slab in layout.slabs)
    assert [layer in first for layer in order] == sorted((layer in first for layer in order), reverse=True)
    for number, piece in enumerate(pieces):
        most = piece_bytes if number else PIECE_BYTES
        assert len(piece) == 1 or sum(layout.slabs[slab].byte_count for slab in piece) <= most


@pytest.mark.parametrize(
    ("load", "most", "piece"),
    [(32, 0, 4), (4096, 0, 4), (16, 16, 4), (32, 16, 4), (64, 16, 8), (128, 16, 16), (4096, 16, 16)],
)
def test_pieces_are_large_where_the_tier_gains_by_it_and_the_load_has_many(load: int, most: int, piece: int) -> None:
    assert piece_bytes_of(load * MIB, most * MIB) == piece * MIB
    assert load < PIECE_COUNT_MIN * piece or load // piece >= PIECE_COUNT_MIN


def test_the_first_layers_of_all_chunks_come_before_the_next_ones() -> None:
    chunks = [[range(2), range(2, 4), range(4, 8)], [range(8)], [range(4), range(4, 8)]]
    assert list(later_pieces(chunks)) == [(0, range(2, 4)), (2, range(4, 8)), (0, range(4, 8))]
