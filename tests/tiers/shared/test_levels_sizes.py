"""A level is reached by all that a store stored for others, or it is not reached: also by chunks that a tier finds too
small to take."""

from __future__ import annotations

from pathlib import Path

from kvstore.chunk import ChunkLayout
from kvstore.spec import Durability
from tests.specs import small_spec
from tests.tiers.shared.world import Node, Wide, run

OBJECT = Durability.OBJECT
TIMEOUT_S = 5.0


def takes_from(node: Node, byte_count_min: int) -> None:
    """The node's bucket takes chunks of this size and larger ones."""

    def takes(layout: ChunkLayout) -> bool:
        return layout.total_bytes >= byte_count_min

    node.shared[1].takes = takes


async def why_not(node: Node, *rows: int) -> str:
    """Why these have not reached OBJECT; empty: they have."""
    found = await node.controller.parts.movement.levels.settle(rows, OBJECT, TIMEOUT_S)
    assert found.is_settled
    return found.missing.get(OBJECT, "")


def test_object_is_not_reached_while_a_part_is_too_small_to_be_sent(tmp_path: Path) -> None:
    """A chunk's E, say, beside its attention cache: another node finds nothing without it."""
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        small = node.of(small_spec(model_id="small", layers=small_spec().layers[:1]))
        assert small.layout.total_bytes < node.layout.total_bytes
        await node.keep(1)
        await small.keep(1)
        assert await why_not(node, node.row(1), small.row(1)) == ""
        takes_from(node, node.layout.total_bytes)
        assert await why_not(node, node.row(1)) == ""
        assert "tiers.s3.chunk_bytes_min" in await why_not(node, node.row(1), small.row(1))

    run([node], scenario)


def test_who_stores_nothing_but_small_chunks_is_told_the_setting(tmp_path: Path) -> None:
    wide = Wide(tmp_path)
    node = wide.node(redis="never", s3="never")

    async def scenario() -> None:
        takes_from(node, node.layout.total_bytes + 1)
        await node.keep(1)
        assert "tiers.s3.chunk_bytes_min" in await why_not(node, node.row(1))

    run([node], scenario)
