"""The connector against vLLM's own classes: what the CPU build cannot run, and what is refused at the start."""

from __future__ import annotations

import copy
import os
import shutil
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from kvstore_client.engines.vllm import KVStoreConnector
from kvstore_client.engines.vllm.connector import StepMetadata
from kvstore_client.engines.vllm.documents import NamedDocuments
from kvstore_client.engines.vllm.geometry import geometry_of
from kvstore_client.engines.vllm.hashes import block_hashes, seed_of_process
from kvstore_client.engines.vllm.identity import FROM_FILES, OF_ADAPTERS, Adapters, adapter_settings, spec_of
from kvstore_client.engines.vllm.naming import Naming, extras_of
from kvstore_client.engines.vllm.settings import ConnectorSettings
from kvstore_client.engines.vllm.step import Load, Mend, Save, Step
from vllm.config import (
    KVTransferConfig,
    LoRAConfig,
    MultiModalConfig,
    PoolerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.quantization import QuantizationConfigArgs, QuantSpec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.logging_utils.dump_input import prepare_object_to_dump
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import LoadFormats
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.request import Request

from kvstore.errors import InvalidRequest
from kvstore.keys import Extra
from kvstore.spec import LayerKind
from tests.vllm.engine import CONNECTOR, ENVIRONMENT

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
NAMES = [f"model.layers.{index}.self_attn.attn" for index in range(12)]
FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
NOWHERE = "unix:///nonexistent/kvstore.sock"


@pytest.fixture(scope="module")
def configured(models: dict[str, Path]) -> VllmConfig:
    """A real configuration of the tiny Llama."""
    os.environ.update(ENVIRONMENT)
    transfer = KVTransferConfig(**CONNECTOR, kv_connector_extra_config={"address": NOWHERE})
    options: dict[str, Any] = {"enforce_eager": True, "block_size": 32, "dtype": "float32", "max_model_len": 512}
    return EngineArgs(
        model=str(models["llama"]), skip_tokenizer_init=True, kv_transfer_config=transfer, **options
    ).create_engine_config()


def caches(*groups: Any, names: list[str] = NAMES) -> KVCacheConfig:
    split = [
        KVCacheGroupSpec(layer_names=names[number :: len(groups)], kv_cache_spec=each)
        for number, each in enumerate(groups)
    ]
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=split)


def changed(configured: VllmConfig, part: str, **values: Any) -> Any:
    """The configuration with some values of one part changed; what vLLM checks itself is not checked."""
    shadow = SimpleNamespace(**vars(configured))
    inner = copy.copy(getattr(configured, part))
    vars(inner).update(values)
    setattr(shadow, part, inner)
    return shadow


def spec_for(configured: Any, kv_caches: KVCacheConfig, **extra: Any) -> Any:
    return spec_of(configured, geometry_of(configured, kv_caches), ConnectorSettings.of(extra))


# ---------------------------------------------------------------- whose cache it is


def test_a_spec_is_the_models(configured: VllmConfig) -> None:
    spec = spec_for(configured, caches(FULL))
    assert (spec.layer_count, spec.layers[0].kv_heads, spec.layers[0].k_dim) == (12, 2, 32)
    assert (spec.cache_dtype, spec.vocab_size, spec.hidden_size, spec.mla) == ("float32", 512, 128, False)
    assert spec.rope.rotary_dim == 32
    assert len(spec.weights_digest) == 64


def test_layers_are_in_the_order_of_their_numbers(configured: VllmConfig) -> None:
    backwards = sorted(NAMES, reverse=True)
    assert geometry_of(configured, caches(FULL, names=backwards)).layer_names == tuple(NAMES)


def test_every_byte_of_the_weights_and_the_configuration_counts(
    configured: VllmConfig, models: dict[str, Path]
) -> None:
    def digest(config: Any) -> str:
        return str(spec_for(config, caches(FULL)).weights_digest)

    found = {digest(configured)}
    other = changed(configured, "model_config", model=str(models["other"]))
    online = [
        changed(configured, "model_config", quantization="online", quantization_config=given)
        for given in (
            QuantizationConfigArgs(linear=QuantSpec(weight="fp8_per_token")),
            QuantizationConfigArgs(linear=QuantSpec(weight="fp8_per_tensor_dynamic")),
            QuantizationConfigArgs(linear=QuantSpec(weight="fp8_per_token"), ignore=["model.layers.0"]),
        )
    ]
    for shadow in (other, changed(configured, "model_config", quantization="fp8"), *online):
        found.add(digest(shadow))
    assert len(found) == 6


def test_layers_may_differ_and_slide(configured: VllmConfig) -> None:
    wide = replace(FULL, num_kv_heads=1, head_size=64, head_size_v=64)
    mixed = UniformTypeKVCacheSpecs(
        block_size=32, kv_cache_specs={name: (FULL, wide)[number % 2] for number, name in enumerate(NAMES)}
    )
    layers = spec_for(configured, caches(mixed)).layers
    assert [(each.kv_heads, each.k_dim) for each in layers[:3]] == [(2, 32), (1, 64), (2, 32)]
    sliding = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
    layer = spec_for(configured, caches(sliding)).layers[0]
    assert (layer.kind, layer.window) == (LayerKind.SLIDING_WINDOW, 64)


def test_latent_attention_is_one_head_of_latent_and_rope(configured: VllmConfig) -> None:
    latent = MLAAttentionSpec(block_size=32, num_kv_heads=1, head_size=96, dtype=torch.bfloat16)
    shadow = changed(configured, "model_config", hf_text_config=SimpleNamespace(kv_lora_rank=64, qk_rope_head_dim=32))
    geometry = geometry_of(shadow, caches(latent))
    assert geometry.mla
    assert [(each.kv_heads, each.k_dim, each.v_dim) for each in geometry.layers[:1]] == [(1, 64, 32)]


def test_adapters_and_extras_of_vllms_own_requests(configured: VllmConfig, tmp_path: Path) -> None:
    spec = spec_for(configured, caches(FULL))
    adapters = Adapters(spec)
    found = set()
    for number, content in ((1, b"1"), (2, b"2")):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "adapter_model.safetensors").write_bytes(content)
        found.add(adapters.spec_for(LoRARequest("fine", number, str(directory))).adapter_id)
    assert len(found) == 2
    assert adapters.spec_for(None) is spec
    picture = MultiModalFeatureSpec(
        data=None, modality="image", identifier="cat", mm_position=PlaceholderRange(offset=3, length=5)
    )
    asked = Request("a", list(range(20)), SamplingParams(max_tokens=1), None, mm_features=[picture], cache_salt="s")
    assert [(each.position, each.data) for each in extras_of(asked)] == [(0, b"salt\0s"), (3, b"mm\0cat\x005")]


HARMLESS = {
    "max_lora_rank", "max_loras", "max_cpu_loras", "fully_sharded_loras", "default_mm_loras", "specialize_active_lora",
    "max_lora_cls_labels",
}  # fmt: skip
"""Settings of adapters that change no cache: rooms, kernels, an adapter that requests then name, and heads."""


def test_each_setting_of_adapters_is_in_their_names_or_known_to_be_harmless(
    configured: VllmConfig, tmp_path: Path
) -> None:
    assert {each.name for each in fields(LoRAConfig)} == {*OF_ADAPTERS} | HARMLESS
    (tmp_path / "adapter_model.safetensors").write_bytes(b"1")
    spec = spec_for(configured, caches(FULL))

    def name(is_fused: bool = False, **settings: Any) -> str:
        lora = LoRAConfig(**settings)
        lora.verify_with_model_config(configured.model_config)
        shadow = SimpleNamespace(**{**vars(configured), "lora_config": lora})
        asked = LoRARequest("fine", 1, str(tmp_path), is_3d_lora_weight=is_fused)
        return str(Adapters(spec, adapter_settings(shadow)).spec_for(asked).adapter_id)

    plain = SimpleNamespace(**{**vars(configured), "lora_config": None})
    assert adapter_settings(plain) == ""
    assert name() == name(max_loras=4) == name(lora_dtype="auto")
    assert name(target_modules=["q_proj", "o_proj"]) == name(target_modules=["o_proj", "q_proj"])
    names = [name(), name(is_fused=True), name(lora_dtype="bfloat16"), name(target_modules=["q_proj"])]
    names += [name(**{each: True}) for each in OF_ADAPTERS if each.startswith("enable_")]
    assert len(set(names)) == len(names) == 7


def test_hashes_made_here_are_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By vLLM's own functions: a salt, an adapter, images within and across blocks, and another seed."""
    cat, dog = (
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=offset, length=length)
        )
        for name, offset, length in (("cat", 3, 5), ("dog", 30, 40))
    )
    tokens = [(7 * each) ** 3 % 100_000 for each in range(100)]
    algorithm = get_hash_fn_by_name("sha256_cbor")
    for seed in (None, "0"):
        if seed is not None:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        init_none_hash(algorithm)
        for more in ({}, {"cache_salt": "s"}, {"lora_request": LoRARequest("fine", 1, "/a/b")}):
            asked = Request(
                "a", tokens, SamplingParams(max_tokens=1), None, mm_features=[cat, dog],
                block_hasher=get_request_block_hasher(32, algorithm), **more,
            )  # fmt: skip
            lora = ("fine", "/a/b") if "lora_request" in more else None
            given = {"salt": more.get("cache_salt"), "lora": lora, "seed": seed_of_process()}
            items = [(3, 5, "cat"), (30, 40, "dog")]
            assert asked.block_hashes == block_hashes(tokens, 32, items=items, **given)
            assert Naming("vllm", 32).can_name(asked)
    monkeypatch.undo()
    init_none_hash(algorithm)
    assert not Naming("vllm", 32).can_name(asked)  # of another seed


def test_what_becomes_of_an_image_counts(configured: VllmConfig, tmp_path: Path, models: dict[str, Path]) -> None:
    """Settings and files of the processor, which vLLM's identifiers of images do not have."""
    own = tmp_path / "model"
    shutil.copytree(models["llama"], own)

    def digest(settings: Any, **extra: Any) -> str:
        shadow = changed(configured, "model_config", multimodal_config=settings, model=str(own))
        return str(spec_for(shadow, caches(FULL), **extra).weights_digest)

    found = [digest(None), digest(MultiModalConfig())]
    found.append(digest(MultiModalConfig(mm_processor_kwargs={"do_normalize": False})))
    (own / "preprocessor_config.json").write_text('{"image_mean": [0, 0, 0]}')
    found += [digest(MultiModalConfig()), digest(MultiModalConfig(), weights_digest="unverified:a")]
    (own / "preprocessor_config.json").write_text('{"image_mean": [1, 0, 0]}')
    found += [digest(MultiModalConfig()), digest(MultiModalConfig(), weights_digest="unverified:a")]
    assert len(set(found)) == len(found)
    assert digest(None) == found[0]  # nothing of it matters to a model of text


def test_nothing_of_a_prompt_is_in_vllms_log_of_a_step_that_failed(configured: VllmConfig) -> None:
    """vLLM writes the step to its log then, and of its own requests the lengths alone."""
    spec, tokens = spec_for(configured, caches(FULL)), np.arange(700, 764, dtype=np.uint32)
    load = Load("a", b"a ticket", 64, [[1, 2]], 0, 64)
    save = Save(spec, tokens, (Extra(0, b"salt\0secret"),), [[3, 4]], b"a ticket")
    mend = Mend("b", spec, tokens, NamedDocuments((), 0), save.extras, [5, 6], 0, 64, 1)
    said = prepare_object_to_dump(StepMetadata(Step([load], [mend], [save], number=7)))
    assert "number=7, loads=[('a', 0, 64, [[1, 2]])], mends=[('b', 0, 64, [5, 6])], saves=[(64, [[3, 4]])]" in said
    assert not any(each in said for each in ("700", "secret", "ticket"))


# ---------------------------------------------------------------- what is refused, and what to set


SLIDING = SlidingWindowSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64)
MAMBA = MambaSpec(block_size=32, shapes=((4, 4),), dtypes=(torch.float32,))
LOCAL = ChunkedLocalAttentionSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, attention_chunk_size=64
)  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([FULL, LOCAL], "ChunkedLocalAttentionSpec.*--disable-hybrid-kv-cache-manager"),
        ([FULL, MAMBA], "MambaSpec.*recurrent layers"),
        ([MAMBA], "MambaSpec"),
        ([replace(FULL, non_causal=True)], "attends to later tokens"),
    ],
)
def test_caches_that_cannot_be_kept_are_refused(configured: VllmConfig, groups: list[Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        geometry_of(configured, caches(*groups))


@pytest.mark.parametrize(
    ("part", "values", "said"),
    [
        ("parallel_config", {"tensor_parallel_size": 3}, "--tensor-parallel-size to a divisor or a multiple of them"),
        ("parallel_config", {"tensor_parallel_size": 2}, "where all layers are alike; set --tensor-parallel-size 1"),
        ("parallel_config", {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ("parallel_config", {"decode_context_parallel_size": 2}, "--decode-context-parallel-size 1"),
    ],
)
def test_ranks_are_refused(configured: VllmConfig, part: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        geometry_of(changed(configured, part, **values), caches(FULL))


def test_drafts_with_a_cache_of_another_kind_are_refused(configured: VllmConfig) -> None:
    shadow = SimpleNamespace(**{**vars(configured), "speculative_config": SimpleNamespace(method="dflash")})
    with pytest.raises(InvalidRequest, match=r"'dflash'.*ngram"):
        geometry_of(shadow, caches(FULL))
    shadow.speculative_config.method = "ngram"
    geometry_of(shadow, caches(FULL))


def test_poolers_that_need_a_whole_prompt_are_refused(models: dict[str, Path]) -> None:
    """vLLM keeps no prefixes for them either, and ends where one is loaded."""
    options: dict[str, Any] = {"model": str(models["llama"]), "skip_tokenizer_init": True, "runner": "pooling"}
    for kind, is_refused in (("MEAN", True), ("CLS", True), ("LAST", False)):
        pooler = PoolerConfig(seq_pooling_type=kind)
        made = EngineArgs(**options, convert="embed", block_size=32, pooler_config=pooler).create_engine_config()
        if is_refused:
            with pytest.raises(InvalidRequest, match="cannot go on after a prefix"):
                geometry_of(made, caches(FULL))
        else:
            geometry_of(made, caches(FULL))


def test_weights_without_an_identity_are_refused(configured: VllmConfig, tmp_path: Path) -> None:
    dummy = changed(configured, "load_config", load_format="dummy")
    with pytest.raises(InvalidRequest, match="set weights_digest"):
        spec_for(dummy, caches(FULL))
    vouched = spec_for(dummy, caches(FULL), weights_digest="unverified:dummy-0").weights_digest
    assert vouched.startswith("unverified:dummy-0/")  # and the configuration behind it
    with pytest.raises(InvalidRequest, match="chunk_tokens 100 must be a multiple of vLLM's block of 32"):
        spec_for(configured, caches(FULL), chunk_tokens=100)


def test_each_of_vllms_load_formats_is_known_or_needs_a_digest() -> None:
    known = set(get_args(LoadFormats)) - {"dummy", "ipc_cache", "modelexpress", "tensorizer"}
    assert known == set(FROM_FILES) - {"gguf"}  # a plugin's, which reads the model's own file


def test_a_connector_is_made_by_vllms_factory(configured: VllmConfig) -> None:
    made = KVConnectorFactory.create_connector(configured, KVConnectorRole.SCHEDULER, caches(FULL))
    assert type(made) is KVStoreConnector
    assert made.requires_kv_delivery is False
    assert made.reset_cache() is True
    made.shutdown()


def test_hashes_that_cannot_be_names_are_refused(configured: VllmConfig) -> None:
    shadow = changed(configured, "kv_transfer_config", kv_connector_extra_config={"digests": "vllm"})
    with pytest.raises(InvalidRequest, match="--prefix-caching-hash-algo sha256_cbor, not sha256"):
        KVStoreConnector(shadow, KVConnectorRole.WORKER, caches(FULL))


def test_a_failure_policy_that_fails_requests_is_refused(configured: VllmConfig) -> None:
    shadow = changed(configured, "kv_transfer_config", kv_load_failure_policy="fail")
    with pytest.raises(InvalidRequest, match='"kv_load_failure_policy": "recompute"'):
        KVStoreConnector(shadow, KVConnectorRole.WORKER, caches(FULL))


@pytest.mark.parametrize(
    ("policy", "own", "said"),
    [("fail", {}, "the connector around"), ("recompute", {}, ""), ("recompute", {"recompute": {}}, "a MultiConnector")],
)
def test_what_is_around_the_connector_counts_too(configured: VllmConfig, policy: Any, own: Any, said: str) -> None:
    """vLLM goes by MultiConnector's policy, and its other connectors would keep what is mended. It makes the workers'
    connectors where its configuration can be seen."""
    inner = {**CONNECTOR, "kv_connector_extra_config": {"address": NOWHERE, **own}}
    whole = copy.copy(configured)
    whole.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [inner]},
    )  # fmt: skip
    with set_current_vllm_config(whole), pytest.raises(InvalidRequest, match=said) if said else nullcontext():
        KVConnectorFactory.create_connector(whole, KVConnectorRole.WORKER, caches(FULL)).shutdown()


def test_loads_within_steps_are_refused_where_vllm_schedules_ahead(configured: VllmConfig) -> None:
    """See ``test_failed_blocks`` for what vLLM would do."""
    for own, is_ahead in product(({"load": "layerwise"}, {"recompute": {}}, {}), (True, False)):
        transfer = KVTransferConfig(**CONNECTOR, kv_connector_extra_config={"address": NOWHERE, **own})
        ahead = SimpleNamespace(**{**vars(configured.scheduler_config), "async_scheduling": is_ahead})
        shadow = SimpleNamespace(**{**vars(configured), "kv_transfer_config": transfer, "scheduler_config": ahead})
        is_refused = bool(own) and is_ahead
        with pytest.raises(InvalidRequest, match="set --no-async-scheduling") if is_refused else nullcontext():
            KVStoreConnector(shadow, KVConnectorRole.WORKER, caches(FULL)).shutdown()


def test_an_unknown_version_is_refused_with_the_known_ones(
    configured: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore_client.engines.vllm.connector.vllm_version", "0.40.0")
    with pytest.raises(InvalidRequest, match=r"vLLM 0\.40\.0; .*0\.32 .*0\.33"):
        KVStoreConnector(configured, KVConnectorRole.WORKER, caches(FULL))


def test_layers_without_pages_are_said(configured: VllmConfig) -> None:
    worker = KVStoreConnector(configured, KVConnectorRole.WORKER, caches(FULL))
    with pytest.raises(InvalidRequest, match=r"registered no pages for model\.layers\.0"):
        worker.register_kv_caches({})
    worker.shutdown()
