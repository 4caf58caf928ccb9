"""What a vLLM engine keeps of a token: its layers, their dtype, its blocks and ranks. The rest is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvstore.errors import InvalidRequest
from kvstore.spec import LayerKind, LayerSpec
from kvstore_client.engines.vllm.drafts import Draft, draft_of
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.engines.vllm.objects import CacheConfig, CacheGroup, EngineConfig, LayerCache, ModelConfig

PER_TENSOR = 1
"""vLLM's mode of caches of 8 bits that have one scale per layer, which is the checkpoint's, or 1."""
FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn"}
"""Their dtype, by vLLM's name. What it calls fp8_e5m2 is e4m3 with some of its backends."""
HEADS = re.compile("key_value_heads|kv_heads|kv_n_heads|head_kv|attention_groups|query_group|heads_in_group")
"""Names by which configurations tell numbers of kv heads, of some layers or of all."""
KNOWN = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec")
"""vLLM's kinds of caches that are kept. Not of these: states of recurrent layers (MambaSpec), which are of no prefix;
attention within fixed pieces (ChunkedLocalAttentionSpec), to an encoder's output, or to rings of tokens; and what only
some models have."""


@dataclass(frozen=True)
class Geometry:
    """The layers that keep a cache, in order, with the kv heads of all ranks together. ``block_tokens``: the unit in
    which all groups' blocks begin and end together."""

    layer_names: tuple[str, ...]
    layers: tuple[LayerSpec, ...]
    groups: tuple[LayerGroup, ...]
    is_one_table: bool
    """True where all layers share one block table, in which no block is given up before its request ends."""
    cache_dtype: str
    block_tokens: int
    mla: bool
    ranks: int
    """Number of tensor-parallel ranks. Each has an equal share of every layer's kv heads."""
    replicas: int
    """Number of ranks that have the same heads, where there are more ranks than heads."""
    draft: Draft | None
    """The draft whose layers are among them."""


def geometry_of(vllm_config: EngineConfig, kv_cache_config: CacheConfig) -> Geometry:
    """Return the geometry of an engine's cache. Raises InvalidRequest naming the vLLM setting that kvstore cannot
    serve, and what to set."""
    _check_parallel(vllm_config)
    draft = draft_of(vllm_config)
    if not getattr(vllm_config.model_config, "is_prefix_caching_supported", True):
        raise InvalidRequest(
            "this model needs all of a prompt in each computation, as poolers of a mean or of the first token do, and "
            "cannot go on after a prefix (vLLM turns its own prefix cache off for it): run it without the connector"
        )
    names, each_spec, groups = _grouped(kv_cache_config.kv_cache_groups)
    hf = vllm_config.model_config.hf_text_config
    ranks = int(vllm_config.parallel_config.tensor_parallel_size)
    mla = all(_is_mla(each) for each in each_spec.values())
    heads = 1 if mla else max(1, int(vllm_config.model_config.get_total_num_kv_heads()))  # 0: no layer has attention
    replicas = _replicas(heads, ranks)
    layers = _named_alike(tuple(_layer(name, each_spec[name], hf, ranks // replicas) for name in names), groups)
    called = vllm_config.cache_config.cache_dtype
    dtypes = {_dtype(name, each_spec[name], called) for name in names}
    if len(dtypes) != 1:
        raise InvalidRequest(
            f"the layers' caches are {', '.join(sorted(dtypes))}: set --kv-cache-dtype auto, and no "
            "--kv-cache-dtype-skip-layers"
        )
    known = {each.kv_heads for each in layers}
    if replicas > 1 and not mla:  # a rank has one head of each layer, however many there are
        known |= {each for model in (vllm_config.model_config, *_drafts(vllm_config)) for each in _heads_told(model)}
    if ranks > 1 and known != {heads}:
        raise InvalidRequest(
            f"{heads} kv heads on {ranks} ranks, and layers with other numbers of them: kvstore serves several ranks "
            "where all layers are alike; set --tensor-parallel-size 1"
        )
    return Geometry(
        tuple(names), layers, groups, len(kv_cache_config.kv_cache_groups) == 1 and not groups[0].window, dtypes.pop(),
        math.lcm(*(each.block_tokens for each in groups)), mla, ranks, replicas, draft,
    )  # fmt: skip


def _grouped(given: Sequence[CacheGroup]) -> tuple[list[str], dict[str, LayerCache], tuple[LayerGroup, ...]]:
    """Return the names of all layers in order, their caches, and their groups."""
    caches: dict[str, LayerCache] = {}
    kept = [(index, each) for index, each in enumerate(given) if getattr(each, "enable_kv_transfer", True)]
    for _, each in kept:
        caches |= getattr(each.kv_cache_spec, "kv_cache_specs", None) or dict.fromkeys(
            each.layer_names, each.kv_cache_spec
        )
    names = sorted(caches, key=lambda name: ([int(digits) for digits in re.findall(r"\d+", name)], name))
    groups = []
    for index, each in kept:
        windows = {_window(name, caches[name]) for name in each.layer_names}
        if len(windows) != 1:
            raise InvalidRequest(
                f"layer {each.layer_names[0]} shares a block table with layers of another window: set "
                "--disable-hybrid-kv-cache-manager"
            )
        layers = tuple(place for place, name in enumerate(names) if name in set(each.layer_names))
        groups.append(LayerGroup(index, layers, int(each.kv_cache_spec.block_size), windows.pop()))
    return names, caches, tuple(groups)


def _named_alike(layers: tuple[LayerSpec, ...], groups: Sequence[LayerGroup]) -> tuple[LayerSpec, ...]:
    """Return layers as vLLM tells them where they have one table, so that engines share their chunks whether they have
    one table or several: where layers differ in nothing but their windows, all of them with the window of some."""
    windows = {each.window for each in layers if each.window}
    shapes = {replace(each, kind=LayerKind.FULL, window=0) for each in layers}
    if len(groups) == 1 or len(windows) != 1 or len(shapes) != 1:
        return layers
    return tuple(replace(each, kind=LayerKind.SLIDING_WINDOW, window=next(iter(windows))) for each in layers)


def _window(name: str, spec: LayerCache) -> int:
    """Return the number of tokens of which vLLM keeps blocks for a layer; 0: all. Raises InvalidRequest."""
    kind = type(spec).__name__
    if kind not in KNOWN:
        raise InvalidRequest(
            f"layer {name} keeps a {kind}; kvstore keeps {', '.join(KNOWN)}: run this model without the connector, or, "
            "unless it has recurrent layers, with --disable-hybrid-kv-cache-manager"
        )
    return int(getattr(spec, "sliding_window", 0)) if kind == "SlidingWindowSpec" else 0


def _replicas(heads: int, ranks: int) -> int:
    """Return the number of ranks that have the same heads: with MLA, whose layers have one, all of them."""
    if heads % ranks and ranks % heads:
        raise InvalidRequest(
            f"{heads} kv heads on {ranks} ranks: kvstore serves ranks that have as many heads each; set "
            "--tensor-parallel-size to a divisor or a multiple of them"
        )
    return max(1, ranks // heads)


def _drafts(vllm_config: EngineConfig) -> list[ModelConfig]:
    """Return the draft's model, where its layers are kept."""
    found = getattr(vllm_config, "speculative_config", None)
    return [] if found is None or draft_of(vllm_config) is None else [found.draft_model_config]


def _heads_told(model: ModelConfig) -> Iterator[int]:
    """Yield all numbers of kv heads that a model's configuration tells. Layers may differ, as in MiMo-V2."""
    yield int(model.get_total_num_kv_heads())
    left: list[tuple[str, Any]] = [("", model.hf_text_config.to_dict())]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, (list, tuple)):
            left += [(name, each) for each in value]
        elif type(value) is int and HEADS.search(name):
            yield value


def _check_parallel(vllm_config: EngineConfig) -> None:
    parallel = vllm_config.parallel_config
    for name, flag in (
        ("pipeline_parallel_size", "--pipeline-parallel-size"),
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, name, 1) != 1:
            raise InvalidRequest(
                f"{name} is {getattr(parallel, name)}: this release serves tensor-parallel ranks only; set {flag} 1"
            )


def _is_mla(spec: object) -> bool:
    return any(each.__name__ == "MLAAttentionSpec" for each in type(spec).__mro__)


def _dtype(name: str, spec: LayerCache, called: str) -> str:
    """Return the dtype of a layer's cache. ``called``: vLLM's name of it. Bytes of a quantised cache mean nothing
    without their scales: one for all of a layer is the checkpoint's, and in the key with its weights."""
    mode = int(getattr(spec, "kv_quant_mode", 0))
    if mode == PER_TENSOR and called in FP8:
        return FP8[called]
    if mode:
        raise InvalidRequest(
            f"layer {name} keeps a cache of {called!r}, which kvstore cannot name: set --kv-cache-dtype fp8, or auto"
        )
    return str(spec.dtype).removeprefix("torch.")


def _layer(name: str, spec: LayerCache, hf: Any, shares: int) -> LayerSpec:
    """Return a layer with all its heads. ``shares``: the ranks among which they are shared out."""
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise InvalidRequest(
            f"layer {name} keeps several tokens as one state, which no prefix ends in: run this model without the "
            "connector"
        )
    if getattr(spec, "non_causal", False):
        raise InvalidRequest(
            f"layer {name} attends to later tokens, so its cache of a prefix is not that of a longer prompt (vLLM "
            "turns its own prefix cache off for it): run this model without the connector"
        )
    if _is_mla(spec):
        latent, rope = int(hf.kv_lora_rank), int(hf.qk_rope_head_dim)
        if latent + rope != spec.head_size:
            raise InvalidRequest(f"layer {name} keeps {spec.head_size} numbers per token, not {latent} + {rope}")
        return LayerSpec(kv_heads=1, k_dim=latent, v_dim=rope)
    window = getattr(spec, "sliding_window", None) or 0
    kind = LayerKind.SLIDING_WINDOW if window else LayerKind.FULL
    v_dim = getattr(spec, "head_size_v", None) or spec.head_size
    heads = int(spec.num_kv_heads) * shares
    return LayerSpec(kind=kind, kv_heads=heads, k_dim=int(spec.head_size), v_dim=int(v_dim), window=window)
