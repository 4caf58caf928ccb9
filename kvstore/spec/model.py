"""ModelSpec: the identity and geometry of a model's cache, validated when it is made."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvstore.errors import InvalidRequest
from kvstore.spec.dtypes import item_size

if TYPE_CHECKING:
    from collections.abc import Callable

LAYER_COUNT_MAX = 1024
HEAD_COUNT_MAX = 1024
DIM_MAX = 65536
CHUNK_TOKENS_MAX = 65536


class CacheKind(StrEnum):
    """The content of a chunk. KV, MLA, E_FOR_KV or OPAQUE follows from the spec. E holds the hidden states entering one
    layer, E_FOR_KV those entering every layer, in place of KV."""

    KV = "kv"
    E = "e"
    MLA = "mla"
    ENCODER = "encoder"
    OPAQUE = "opaque"
    E_FOR_KV = "e_for_kv"


class Provenance(StrEnum):
    """The context in which the cache was computed: IN_CONTEXT, after its whole prefix; STANDALONE, as a segment alone
    from position 0 or behind a preamble."""

    IN_CONTEXT = "in_context"
    STANDALONE = "standalone"


class Exactness(StrEnum):
    """EXACT: the model's own computation. DERIVED: computed from KV that was not exact; never served as exact."""

    EXACT = "exact"
    DERIVED = "derived"


class LayerKind(StrEnum):
    """The kind of cache that a layer keeps per token. NONE keeps nothing and has no slab."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT = "recurrent"
    CROSS = "cross"
    NONE = "none"


def _real(value: object, what: str) -> float:
    """Return the number as a float, without a negative zero. 10000 and 10000.0, 0.0 and -0.0 are equal, so they must be
    written alike: equal specs have one canonical form and one name."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"{what} must be a number, not {value!r:.80}")
    try:
        return float(value) + 0.0
    except OverflowError:
        raise InvalidRequest(f"{what} is too large") from None


def _whole(value: object, what: str) -> int:
    """Return the number as an int: 8 and 8.0 are equal, so they must be written alike."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise InvalidRequest(f"{what} must be a whole number, not {value!r:.80}")
    return int(value)


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer's cache geometry. For MLA: ``kv_heads`` 1, ``k_dim`` the latent, ``v_dim`` the rope part."""

    kind: LayerKind = LayerKind.FULL
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    window: int = 0
    group: int = 0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "kind", LayerKind(self.kind))
        except ValueError:
            raise InvalidRequest(f"layer kind {self.kind!r:.40} must be one of {', '.join(LayerKind)}") from None
        for name in ("kv_heads", "k_dim", "v_dim", "window", "group"):
            object.__setattr__(self, name, _whole(getattr(self, name), f"a layer's {name}"))

    @property
    def has_slab(self) -> bool:
        return self.kind is not LayerKind.NONE


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """The rotation with which K was stored. ``factors`` are the scaling's parameters, sorted by name."""

    theta: float = 10000.0
    kind: str = "default"
    rotary_dim: int = 0
    factors: tuple[tuple[str, float], ...] = ()
    mrope: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "theta", _real(self.theta, "rope theta"))
        object.__setattr__(self, "rotary_dim", _whole(self.rotary_dim, "rope rotary_dim"))
        object.__setattr__(self, "mrope", tuple(_whole(each, "a section of rope mrope") for each in self.mrope))
        factors = tuple((name, _real(value, f"rope factor {name}")) for name, value in self.factors)
        object.__setattr__(self, "factors", factors)


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The identity of the model that a cache belongs to, and the geometry of its cache.

    ``weights_digest`` is a hex digest of the weights, or ``unverified:<name>`` when the caller vouches for the
    identity by name; the two never mix. ``hidden_dtype`` is the dtype of E.
    ``keeps_e``: E of every layer is kept in place of its KV, which is projected from E on arrival: half the bytes
    where every query head has a KV head of its own.
    ``tokenizer_digest``: hex digest of the tokenizer; empty: unknown. Models with different tokenizers share no caches,
    nor does a model with a digest share any with a model without one.
    ``scales`` holds (k_scale, v_scale) per layer for scaled fp8 caches. A spec without layers is for no model: its
    chunks are opaque bytes, a "token" of them is ``hidden_size`` items of ``hidden_dtype``.

    Raises: InvalidRequest naming the field that is wrong.
    """

    model_id: str
    weights_digest: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    vocab_size: int
    cache_dtype: str
    hidden_dtype: str = "bfloat16"
    rope: RopeSpec = RopeSpec()
    chunk_tokens: int = 256
    adapter_id: str = ""
    mla: bool = False
    scales: tuple[tuple[float, float], ...] = ()
    keeps_e: bool = False
    tokenizer_digest: str = ""

    def __post_init__(self) -> None:
        scales = tuple((_real(k, "k_scale"), _real(v, "v_scale")) for k, v in self.scales)
        object.__setattr__(self, "scales", scales)
        _check_identity(self)
        _check_sizes(self)
        for index, layer in enumerate(self.layers):
            _check_layer(self, index, layer)
        if self.keeps_e:
            _check_e(self)

    @classmethod
    def dense(
        cls,
        model_id: str,
        weights_digest: str,
        *,
        layer_count: int,
        kv_heads: int,
        head_dim: int,
        hidden_size: int,
        vocab_size: int,
        cache_dtype: str = "bfloat16",
        hidden_dtype: str = "bfloat16",
        rope: RopeSpec | None = None,
        chunk_tokens: int = 256,
        adapter_id: str = "",
        keeps_e: bool = False,
    ) -> ModelSpec:
        """Return the spec of a decoder whose layers are all alike: full attention, K and V of one head dim."""
        if not 0 < layer_count <= LAYER_COUNT_MAX:
            raise InvalidRequest(f"layer_count {layer_count} must be in 1..{LAYER_COUNT_MAX}")
        layer = LayerSpec(kv_heads=kv_heads, k_dim=head_dim, v_dim=head_dim)
        return cls(
            model_id=model_id,
            weights_digest=weights_digest,
            layers=(layer,) * layer_count,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            cache_dtype=cache_dtype,
            hidden_dtype=hidden_dtype,
            rope=rope or RopeSpec(rotary_dim=head_dim),
            chunk_tokens=chunk_tokens,
            adapter_id=adapter_id,
            keeps_e=keeps_e,
        )

    @classmethod
    def from_transformers(
        cls, config: Any, weights: Any, chunk_tokens: int = 256, adapter_id: str = "", *, keeps_e: bool = False,
        tokenizer: Any = None,
    ) -> ModelSpec:  # fmt: skip
        """Return the spec of a Hugging Face model: geometry from ``config``, identity from digests of ``weights``, of
        ``config``, and of ``tokenizer`` when it is given (or from its digest). ``weights``: a model, a state dict, its
        ``weights_digest``, or 'unverified:<name>' when the caller vouches for them. Needs torch when they are tensors.

        Cost: every byte of the weights is read once per model object, and again when a change is seen: each call
        compares a sample of every tensor. A change of very few numbers that bypasses PyTorch's own bookkeeping (through
        ``.data``) may be missed for a while: see ``refreshed``. Raises: InvalidRequest for a family without a spec, and
        for a model whose forward pass differs from its configuration (adapters, quantised layers, hooks)."""
        from kvstore.spec.from_transformers import spec_from_transformers  # seam: read where it is used, with torch

        build: Callable[..., ModelSpec] = spec_from_transformers
        return build(config, weights, chunk_tokens, adapter_id, keeps_e, tokenizer)

    def refreshed(self, model: Any) -> ModelSpec:
        """Return the spec with the digest of the model's weights and configuration as they are now: every byte is read.
        Call it after changing a few numbers in place. Raises: InvalidRequest for an unverified spec."""
        from kvstore.spec.from_transformers import refreshed  # seam: read where it is used, with torch

        again: Callable[..., ModelSpec] = refreshed
        return again(self, model)

    def __hash__(self) -> int:
        """Some fields tell most specs apart. A spec is the key of many caches, and a hash of all its layers costs more
        than most of them save."""
        return hash((self.model_id, self.weights_digest, self.adapter_id, self.chunk_tokens, len(self.layers)))

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def kind(self) -> CacheKind:
        """The kind of this model's attention cache."""
        if not self.layers:
            return CacheKind.OPAQUE
        if self.keeps_e:
            return CacheKind.E_FOR_KV
        return CacheKind.MLA if self.mla else CacheKind.KV

    @property
    def item_size(self) -> int:
        return item_size(self.cache_dtype)

    @cached_property
    def slab_layers(self) -> tuple[int, ...]:
        """Indices of the layers that keep a cache, in order."""
        return tuple(index for index, layer in enumerate(self.layers) if layer.has_slab)

    @cached_property
    def are_layers_alike(self) -> bool:
        """True when all layers keep as much of a token, in the same shapes."""
        return len({self.kept(index) for index in range(len(self.layers))}) == 1

    @cached_property
    def canonical(self) -> bytes:
        """The spec as canonical JSON: the bytes that are digested, sent and compared. Fields that came after version 1
        are left out when they have their default, so that the names of existing caches do not change."""
        fields = asdict(self)
        for name in ("keeps_e", "tokenizer_digest"):
            if not fields[name]:
                del fields[name]
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    def kept(self, layer: int) -> tuple[int, tuple[int, ...]]:
        """Return (heads, dims) of a layer's cache of one token: K and V of each kv head, or E."""
        each = self.layers[layer]
        return (1, (self.hidden_size,)) if self.keeps_e else (each.kv_heads, (each.k_dim, each.v_dim))


def _check_identity(spec: ModelSpec) -> None:
    if not isinstance(spec.model_id, str) or not 0 < len(spec.model_id) <= 512:
        raise InvalidRequest("model_id must be a name of 1..512 characters")
    if not isinstance(spec.adapter_id, str) or len(spec.adapter_id) > 512:
        raise InvalidRequest("adapter_id must be a name of at most 512 characters")
    check_digest(spec.weights_digest)
    tokenizer = spec.tokenizer_digest
    if not isinstance(tokenizer, str) or (tokenizer and not _is_hex(tokenizer)):
        raise InvalidRequest(f"tokenizer_digest {tokenizer!r:.40} must be 32..128 lower-case hex digits, or empty")


def check_digest(digest: str) -> None:
    """Raises InvalidRequest when ``digest`` is no valid weights_digest of a spec."""
    unverified = digest.startswith("unverified:") and len(digest) > len("unverified:")
    if not (unverified or _is_hex(digest)) or len(digest) > 512:
        raise InvalidRequest(
            f"weights_digest {digest[:40]!r} must be 32..128 lower-case hex digits, or 'unverified:<name>'"
        )


def _is_hex(digest: str) -> bool:
    return 32 <= len(digest) <= 128 and all(c in "0123456789abcdef" for c in digest)


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _check_sizes(spec: ModelSpec) -> None:
    item_size(spec.cache_dtype)
    item_size(spec.hidden_dtype)
    for name in ("mla", "keeps_e"):
        if not isinstance(getattr(spec, name), bool):
            raise InvalidRequest(f"{name} must be true or false, not {getattr(spec, name)!r}")
    if not _is_count(spec.chunk_tokens, CHUNK_TOKENS_MAX):
        raise InvalidRequest(f"chunk_tokens {spec.chunk_tokens} must be in 1..{CHUNK_TOKENS_MAX}")
    if not _is_count(spec.hidden_size, DIM_MAX * 16):
        raise InvalidRequest(f"hidden_size {spec.hidden_size} must be in 1..{DIM_MAX * 16}")
    if not _is_count(spec.vocab_size, 2**32):
        raise InvalidRequest(f"vocab_size {spec.vocab_size} must be in 1..2**32")
    if not isinstance(spec.layers, tuple) or len(spec.layers) > LAYER_COUNT_MAX:
        raise InvalidRequest(f"layers must be a tuple of 0..{LAYER_COUNT_MAX} LayerSpec")
    if spec.layers and not any(layer.has_slab for layer in spec.layers):
        raise InvalidRequest("no layer keeps a cache: every layer is of kind 'none'")
    if not math.isfinite(spec.rope.theta) or spec.rope.theta <= 0:
        raise InvalidRequest(f"rope theta {spec.rope.theta} must be positive and finite")
    if spec.scales and len(spec.scales) != len(spec.layers):
        raise InvalidRequest(f"scales must be empty or one pair per layer ({len(spec.layers)})")


def _check_layer(spec: ModelSpec, index: int, layer: LayerSpec) -> None:
    if layer.kind is LayerKind.NONE:
        return
    if layer.kind is LayerKind.RECURRENT:
        raise InvalidRequest(
            f"layer {index} is recurrent: it needs a state snapshot at each chunk's end, not supported yet"
        )
    if not _is_count(layer.kv_heads, HEAD_COUNT_MAX):
        raise InvalidRequest(f"layer {index}: kv_heads {layer.kv_heads} must be in 1..{HEAD_COUNT_MAX}")
    if not _is_count(layer.k_dim, DIM_MAX) or not _is_count(layer.v_dim, DIM_MAX):
        raise InvalidRequest(f"layer {index}: k_dim and v_dim must be in 1..{DIM_MAX}")
    if layer.kind is LayerKind.SLIDING_WINDOW and not _is_count(layer.window, 2**31):
        raise InvalidRequest(f"layer {index}: a sliding window needs window >= 1")
    if spec.mla and layer.kv_heads != 1:
        raise InvalidRequest(f"layer {index}: MLA keeps one latent, kv_heads must be 1, got {layer.kv_heads}")


def _check_e(spec: ModelSpec) -> None:
    """Raises InvalidRequest unless K and V of every layer follow from E alone, and E is smaller."""
    if spec.mla or spec.scales or not spec.layers:
        raise InvalidRequest("keeps_e is for plain K and V: mla and scales must be unset, and there must be layers")
    if spec.hidden_dtype != spec.cache_dtype:
        raise InvalidRequest(
            f"keeps_e: K and V projected from E are {spec.hidden_dtype} (hidden_dtype), the cache is "
            f"{spec.cache_dtype} (cache_dtype): give both the model's dtype"
        )
    for index in spec.slab_layers:
        layer = spec.layers[index]
        if layer.kind not in (LayerKind.FULL, LayerKind.SLIDING_WINDOW):
            raise InvalidRequest(f"keeps_e: K and V of layer {index} ({layer.kind}) do not follow from its E")
        width = layer.kv_heads * (layer.k_dim + layer.v_dim)
        if spec.hidden_size >= width:
            raise InvalidRequest(
                f"keeps_e saves nothing: E of layer {index} has {spec.hidden_size} numbers per token, its K and V "
                f"{width}; it is for models with a KV head for every query head. Leave it out"
            )
