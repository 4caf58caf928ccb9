"""Layers with block tables of their own, without vLLM: what is refused, and how such layers are named."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm.geometry import geometry_of
from kvstore_client.engines.vllm.groups import CHUNK_TOKENS, LayerGroup, check_groups, chunk_tokens_of
from kvstore_client.engines.vllm.settings import ConnectorSettings

from kvstore.errors import InvalidRequest
from tests.engines.vllm.engine import BLOCK
from tests.engines.vllm.test_identity import FullAttentionSpec
from tests.engines.vllm.test_identity import engine as vllm_engine


def of(window: int, block: int = 16) -> tuple[LayerGroup, ...]:
    return LayerGroup(0, (0,), block), LayerGroup(1, (1,), block, window)


@pytest.mark.parametrize(
    ("window", "given", "count"),
    [(1024, None, CHUNK_TOKENS), (128, None, 128), (100, None, 112), (128, 64, 64), (100, 112, 112), (0, None, 256)],
)
def test_chunks_are_at_most_as_long_as_a_window(window: int, given: int | None, count: int) -> None:
    assert chunk_tokens_of(of(window), 16, ConnectorSettings(chunk_tokens=given)) == count


def test_a_longer_chunk_is_refused() -> None:
    """A step that begins within its last block frees its first one."""
    for given, longest in ((256, 128), (144, 128)):
        with pytest.raises(InvalidRequest, match=rf"chunk_tokens {given}: .* at most {longest}, .*--disable-hybrid"):
            chunk_tokens_of(of(128), 16, ConnectorSettings(chunk_tokens=given))
    with pytest.raises(InvalidRequest, match="or set --disable-sliding-window"):
        chunk_tokens_of(of(128)[1:], 16, ConnectorSettings(chunk_tokens=256))
    with pytest.raises(InvalidRequest, match="chunk_tokens 100 must be a multiple of vLLM's block of 16"):
        chunk_tokens_of(of(128), 16, ConnectorSettings(chunk_tokens=100))
    with pytest.raises(InvalidRequest, match=r"chunk_tokens 64: .* at most 32, in blocks of 64"):
        chunk_tokens_of((LayerGroup(0, (0,), 64), LayerGroup(1, (1,), 16, 32)), 64, ConnectorSettings())


@pytest.mark.parametrize("window", range(1, 40))
def test_the_longest_chunk_is_there_when_it_is_computed(window: int) -> None:
    """For each token at which the step that completes it may begin. A block more would not be."""
    group = LayerGroup(0, (0,), BLOCK, window)

    def is_there(chunk: int) -> bool:
        tokens = range(3 * chunk, 5 * chunk)
        frees = {start: max(0, start - window + 1) // BLOCK * BLOCK for start in tokens}  # vLLM's arithmetic
        return all(freed <= start // chunk * chunk for start, freed in frees.items())

    assert is_there(group.chunk_tokens_max)
    assert not is_there(group.chunk_tokens_max + BLOCK)


@pytest.mark.parametrize(
    ("setting", "said"),
    [({"load": "layerwise"}, '"load": "async"'), ({"planning": "on"}, '"planning": "off"'), ({"digests": "vllm"}, "")],
)
def test_what_needs_one_table_is_refused(setting: dict[str, Any], said: str) -> None:
    settings = ConnectorSettings(**setting)
    if said:
        with pytest.raises(InvalidRequest, match=f"{said}.*--disable-hybrid-kv-cache-manager"):
            check_groups(of(128), settings, has_draft=False)
    else:
        check_groups(of(128), settings, has_draft=False)
    check_groups(of(128), ConnectorSettings(), has_draft=False)


def test_what_helps_where_every_layer_has_a_window_is_said() -> None:
    """vLLM frees the blocks of such a model without its hybrid allocator, too."""
    alone = (LayerGroup(0, (0, 1), 16, 128),)
    with pytest.raises(InvalidRequest, match="or set --disable-sliding-window"):
        check_groups(alone, ConnectorSettings(load="layerwise"), has_draft=False)
    with pytest.raises(InvalidRequest, match="at most 128, in blocks of 16, or set --disable-sliding-window"):
        chunk_tokens_of(alone, 16, ConnectorSettings(chunk_tokens=256))


def test_drafts_and_hashes_of_blocks_of_other_sizes_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="a draft with a cache of its own"):
        check_groups(of(128), ConnectorSettings(), has_draft=True)
    with pytest.raises(InvalidRequest, match='"digests": "kvstore"'):
        check_groups((*of(128), *of(0, 32)), ConnectorSettings(digests="vllm"), has_draft=False)


class SlidingWindowSpec(FullAttentionSpec):
    """Named as vLLM's."""

    sliding_window = 64


def test_layers_are_named_alike_with_one_table_and_with_several(tmp_path: Path) -> None:
    """Of several layers in one table vLLM says the window that some have as that of all."""
    full, windowed, merged = FullAttentionSpec(), SlidingWindowSpec(), FullAttentionSpec()
    merged.sliding_window = 64  # type: ignore[attr-defined]  # as vLLM's own has it
    names = [f"model.layers.{number}" for number in range(12)]
    config, _ = vllm_engine(tmp_path)
    given = [(windowed, names[1::2]), (full, names[::2]), (merged, names)]
    parts = [SimpleNamespace(kv_cache_spec=spec, layer_names=each[::-1]) for spec, each in given]
    several = geometry_of(config, SimpleNamespace(kv_cache_groups=parts[:2]))
    one = geometry_of(config, SimpleNamespace(kv_cache_groups=parts[2:]))
    assert several.layers == one.layers
    assert several.layer_names == one.layer_names == tuple(names)
    assert (several.is_one_table, one.is_one_table) == (False, True)
    assert [(each.index, each.layers, each.window) for each in several.groups] == [
        (0, (1, 3, 5, 7, 9, 11), 64), (1, (0, 2, 4, 6, 8, 10), 0),
    ]  # fmt: skip
    alone = geometry_of(config, SimpleNamespace(kv_cache_groups=parts[:1]))
    assert not alone.is_one_table, "blocks are given up in it"


def test_layers_of_several_shapes_have_their_own_windows(tmp_path: Path) -> None:
    """As vLLM tells them where they have one table: it makes one of layers only where all else is alike."""
    config, _ = vllm_engine(tmp_path)
    wide, windowed, unified = FullAttentionSpec(size=16), SlidingWindowSpec(), FullAttentionSpec()
    unified.sliding_window = 64  # type: ignore[attr-defined]  # as vLLM's own has it
    names = [f"model.layers.{number}" for number in range(4)]
    parts = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=each)
        for spec, each in ((wide, names[::2]), (windowed, names[1::2]))
    ]
    whole = SimpleNamespace(
        block_size=16, kv_cache_specs={name: (wide, unified)[n % 2] for n, name in enumerate(names)}
    )
    several = geometry_of(config, SimpleNamespace(kv_cache_groups=parts))
    one = geometry_of(
        config, SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=whole, layer_names=names)])
    )
    assert (several.is_one_table, one.is_one_table) == (False, True)
    assert several.layers == one.layers
    assert [each.window for each in one.layers] == [0, 64, 0, 64]


def test_blocks_of_several_sizes_end_together(tmp_path: Path) -> None:
    config, _ = vllm_engine(tmp_path)
    parts = [
        SimpleNamespace(kv_cache_spec=FullAttentionSpec(block=block), layer_names=[f"model.layers.{block}"])
        for block in (32, 48)
    ]
    geometry = geometry_of(config, SimpleNamespace(kv_cache_groups=parts))
    assert (geometry.block_tokens, [each.block_tokens for each in geometry.groups]) == (96, [32, 48])
