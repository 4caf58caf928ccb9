"""Numbers that a later release gives a meaning."""

from __future__ import annotations

import pytest
from kvstore_client.lookup.match import chunk_matches

from kvstore.spec import SPEED, ChunkState, Encoding, EventKind, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb


def test_a_tier_of_a_later_release_is_a_hit_of_a_tier_without_a_name() -> None:
    run = pb.ChunkRun(count=2, state=ChunkState.HIT, tier=99, encoding=Encoding.RAW)
    assert [(chunk.state, chunk.tier) for chunk in chunk_matches([run], 16, 0, 32)] == [(ChunkState.HIT, Tier.NONE)] * 2
    with pytest.raises(ValueError, match="redis"):
        Tier("redis")


def test_other_numbers_of_a_later_release_are_no_error_either() -> None:
    (miss,) = chunk_matches([pb.ChunkRun(count=1, state=ChunkState.MISS, reason=99, encoding=99)], 16, 0, 16)
    assert (miss.state, miss.reason) == (ChunkState.MISS, MissReason.UNAVAILABLE)
    assert (Encoding(99), EventKind(99)) == (Encoding.NONE, EventKind.NONE)


def test_every_kind_of_tier_has_its_place_among_the_others() -> None:
    """A locate compares them."""
    assert sorted(SPEED) == sorted(set(Tier) - {Tier.NONE})
