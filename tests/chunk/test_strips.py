"""What a byte mover does to a chunk's strips: copies of them check to what they are, and right is told from wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from kvstore_copies import copy_checked, is_checked_compiled

from kvstore.chunk import are_right, checksum, checksum_strips, layout_of, slab_runs, strip_run, strip_seeds, strips
from kvstore.seams.movers.crossing import pack_answer, unpack
from kvstore.spec import CacheKind, LayerSpec
from tests.chunk.test_chunk import filled_body, layouts
from tests.specs import small_spec

POISON = 0xDB
KEY, WRITE = b"s" * 32, b"w" * 16


def test_a_copy_is_checked_by_what_was_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is a client's, and may change at any time: here, as soon as it was copied."""
    layout = layouts()["kv tail"]
    source = filled_body(layout)
    wanted = source.copy()
    target = np.full(layout.body_bytes, POISON, np.uint8)
    digest = xxhash.xxh3_128_digest

    def scribbling(data: memoryview, seed: int) -> bytes:
        source[:] = POISON
        return digest(data, seed)

    run = strip_run(layout, KEY, WRITE, 0, layout.strip_count)
    with monkeypatch.context() as patched:
        patched.setattr(xxhash, "xxh3_128_digest", scribbling)
        rows = run.copy(source, target)
    assert (target == wanted).all(), "gaps are zero, whatever was there"
    seeds = strip_seeds(KEY, layout, WRITE)
    slabs = [target[slab.offset : slab.offset + slab.byte_count] for slab in layout.slabs]
    assert rows == b"".join(checksum_strips(slab, layout, index, seeds) for index, slab in enumerate(slabs))


@pytest.mark.parametrize("dims", [64, 24])
def test_copies_that_are_checked_in_one_pass_are_the_same(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code copies strips of whole cache lines, parts of the run the others; the source ends with the last
    strip, before its gap."""
    layout = layout_of(small_spec(layers=(LayerSpec(kv_heads=3, k_dim=dims, v_dim=dims),) * 3), CacheKind.KV, 9)
    run = strip_run(layout, KEY, WRITE, 0, layout.strip_count)
    source = filled_body(layout)[: int(run.stops[-1])]
    made, in_one_pass = [], []

    def watched(*args: Any) -> bytes | None:
        rows = copy_checked(*args)
        in_one_pass.append(rows is not None)
        return rows

    monkeypatch.setattr(strips, "copy_checked", watched)
    for how in ("as it is", "in parts"):
        if how == "in parts":
            monkeypatch.setattr(strips, "copy_checked", lambda *_: None)
        target = np.full(layout.body_bytes, POISON, np.uint8)
        made.append((run.copy(source, target), target.tobytes()))
    assert made[0] == made[1]
    assert in_one_pass == [dims == 64 and is_checked_compiled()]
    for start, stop in zip(run.starts.tolist(), run.stops.tolist(), strict=True):
        assert made[0][1][start:stop] == source[start:stop].tobytes()


@pytest.mark.parametrize("dims", [64, 24])
def test_checksums_without_compiled_code_are_the_same(dims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(small_spec(layers=(LayerSpec(kv_heads=3, k_dim=dims, v_dim=dims),) * 3), CacheKind.KV, 9)
    slab = filled_body(layout)[: layout.slabs[0].byte_count]
    found = []
    for how in ("as it is", "plain"):
        if how == "plain":
            monkeypatch.setattr(checksum, "keyed_words", lambda *_: None)
        seeds = strip_seeds(KEY, layout, WRITE)
        assert len(seeds) >= checksum.FEW_STRIPS
        found.append((seeds, checksum_strips(slab, layout, 0, seeds), checksum_strips(slab, layout, 0, seeds, 1, 2)))
    assert found[0] == found[1]
    assert found[0][1][16:48] == found[0][2]


@pytest.mark.parametrize("name", sorted(layouts()))
def test_strips_in_memory_are_right_or_not(name: str) -> None:
    layout = layouts()[name]
    body = filled_body(layout)
    slabs = [body[slab.offset : slab.offset + slab.byte_count] for slab in layout.slabs]
    runs = slab_runs(layout, KEY, WRITE, range(len(slabs)), slabs)
    seeds = strip_seeds(KEY, layout, WRITE)
    expected = b"".join(checksum_strips(slab, layout, index, seeds) for index, slab in enumerate(slabs))
    assert are_right(runs, expected)
    for strip in range(layout.strip_count):
        at = int(layout.strip_offsets[strip])
        body[at] ^= 1
        assert not are_right(runs, expected)
        body[at] ^= 1
    assert are_right(runs, expected)


def test_a_run_crosses_to_a_byte_mover_as_plain_bytes() -> None:
    """Arrays cost the service's loop more than the rest of a job, for every four megabytes of a load."""
    run = strip_run(layouts()["kv tail"], KEY, WRITE, 1, 5)
    crossed = pack_answer(1, run)
    assert b"numpy" not in crossed
    back = unpack(crossed)
    for name in ("key", "first", "seal"):
        assert getattr(back, name) == getattr(run, name)
    for name in ("layers", "heads", "starts", "stops"):
        mine, theirs = getattr(run, name), getattr(back, name)
        assert (mine.dtype, mine.tolist()) == (theirs.dtype, theirs.tolist())
