"""Which of vLLM's caches have a name here: dtypes, by vLLM's own list of them, and the heads of several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from kvstore_client.engines.vllm.geometry import PER_TENSOR, geometry_of
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec, get_kv_quant_mode

from kvstore.errors import InvalidRequest
from tests.vllm.test_interface import FULL, caches, changed, configured

__all__ = ["configured"]  # a fixture
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
E4M3 = "float8_e4m3fn"
KEPT = {"auto": "float32", "float16": "float16", "bfloat16": "bfloat16", "fp8": E4M3, "fp8_e4m3": E4M3}


@pytest.mark.parametrize("called", get_args(CacheDType))
def test_a_cache_has_a_dtype_of_ours_or_is_refused(configured: VllmConfig, called: str) -> None:
    shadow = changed(configured, "cache_config", cache_dtype=called)
    dtype = kv_cache_dtype_str_to_dtype(called, configured.model_config)
    group = caches(replace(FULL, dtype=dtype, kv_quant_mode=get_kv_quant_mode(called)))
    if called in KEPT:
        assert geometry_of(shadow, group).cache_dtype == KEPT[called]
    else:
        with pytest.raises(InvalidRequest, match="which kvstore cannot name: set --kv-cache-dtype fp8, or auto"):
            geometry_of(shadow, group)


@pytest.mark.parametrize(("ranks", "each", "replicas"), [(1, 2, 1), (2, 1, 1), (4, 1, 2), (8, 1, 4)])
def test_heads_that_several_ranks_have_are_kept_once(
    configured: VllmConfig, ranks: int, each: int, replicas: int
) -> None:
    shadow = changed(configured, "parallel_config", tensor_parallel_size=ranks)
    geometry = geometry_of(shadow, caches(replace(FULL, num_kv_heads=each)))
    assert (geometry.replicas, {layer.kv_heads for layer in geometry.layers}) == (replicas, {2})
    shadow.model_config = changed(configured, "model_config").model_config
    shadow.model_config.hf_text_config = type("Latent", (), {"kv_lora_rank": 64, "qk_rope_head_dim": 32})()
    latent = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=96, dtype=torch.bfloat16)
    geometry = geometry_of(shadow, caches(latent))
    assert (geometry.replicas, {layer.kv_heads for layer in geometry.layers}) == (ranks, {1})


def test_latent_attention_has_8_bits_where_its_items_are_plain(configured: VllmConfig) -> None:
    latent = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=96, dtype=torch.uint8, kv_quant_mode=PER_TENSOR)
    model = changed(configured, "model_config")
    model.model_config.hf_text_config = type("Latent", (), {"kv_lora_rank": 64, "qk_rope_head_dim": 32})()
    assert KVQuantMode.FP8_PER_TENSOR == PER_TENSOR
    geometry = geometry_of(changed(model, "cache_config", cache_dtype="fp8"), caches(latent))
    assert (geometry.cache_dtype, geometry.mla) == (E4M3, True)
    with pytest.raises(InvalidRequest, match="'fp8_ds_mla', which"):
        geometry_of(changed(model, "cache_config", cache_dtype="fp8_ds_mla"), caches(latent))
