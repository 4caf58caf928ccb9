"""The key is the meaning: whatever changes K or V of a model changes its fingerprint. Every attribute of the
configuration, every tensor, the rotation's settings and what a live model has beside these, one at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client import ModelSpec
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralForCausalLM

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.spec.configuration import WITHOUT_MEANING, described, named
from kvstore.spec.from_transformers import weights_digest
from tests.recompute.models import FAMILIES, SIZES, model_of, prompt

BASES = ("llama", "mistral-window", "qwen2-windows", "qwen3-windows-yarn")
SMALL = {"num_hidden_layers": 2, "max_window_layers": 1}
TOKENS = prompt(48, 1)[None]
SAID_ELSEWHERE = {
    "model_type": "another family is another class, and is made by its own test",
    "transformers_version": "written by transformers itself, whatever is set",
}
CHANGES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32, "hidden_act": "gelu", "rms_norm_eps": 0.05, "pretraining_tp": 2,
    "max_position_embeddings": 512, "attention_bias": True, "mlp_bias": True, "chunk_size_feed_forward": 1,
    "is_encoder_decoder": True, "sliding_window": 5, "use_sliding_window": False, "max_window_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "rope_parameters": {"rope_theta": 77.0, "rope_type": "default"},
    "per_layer_config": {0: {"rms_norm_eps": 0.1}},
    # what has no meaning for K and V
    "_name_or_path": "of/another/user/named", "_commit_hash": "ab" * 20, "architectures": ["LlamaModel"],
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": False, "return_dict": False,
    "output_hidden_states": True, "output_attentions": True, "id2label": {0: "A", 1: "B"},
    "label2id": {"A": 0, "B": 1}, "problem_type": "regression", "initializer_range": 0.5, "attention_dropout": 0.5,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3,
}  # fmt: skip


def base_of(family: str, **more: Any) -> Any:
    """Both ends of it have the same words, so that tying them changes nothing."""
    model = model_of(family, 3, **{**SMALL, **more})
    model.config.name_or_path = "named"
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def with_config(model: Any, **changes: Any) -> Any:
    """The same weights, as far as they fit, in a model of the changed configuration."""
    told = model.config.to_dict()
    if {"num_hidden_layers", "use_sliding_window", "max_window_layers"} & set(changes):
        told.pop("layer_types", None)  # they follow from these
    config = type(model.config).from_dict({**told, **changes})
    torch.manual_seed(3)
    other = type(model)(config)
    try:
        other.load_state_dict(model.state_dict(), strict=False)
    except RuntimeError:
        pass  # of other shapes: their digest differs for it
    return other.to(model.dtype).eval()


def kv_of(model: Any) -> list[torch.Tensor]:
    cache = DynamicCache()
    with torch.inference_mode():
        model.base_model(TOKENS, past_key_values=cache, use_cache=True)
    return [half for layer in cache.layers for half in (layer.keys, layer.values)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    alike = len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(one, other, strict=True)
    )
    return alike and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def name_of(model: Any, **more: Any) -> bytes:
    spec = ModelSpec.from_transformers(model.config, model, **more)
    return fingerprint(spec, spec.kind)


class Known:
    """A model's K and V, and its name."""

    def __init__(self, model: Any) -> None:
        self.kv, self.name = kv_of(model), name_of(model)

    def check(self, other: Any, what: str) -> bool:
        """Where K or V changed, the name did. Whether they changed."""
        if same(self.kv, kv_of(other)):
            return False
        assert self.name != name_of(other), f"{what} changes K or V, and not the fingerprint"
        return True


@pytest.mark.parametrize("family", BASES)
def test_every_attribute_of_the_configuration_is_in_the_key_or_means_nothing(family: str) -> None:
    base = base_of(family)
    attributes = set(base.config.to_dict()) | set(WITHOUT_MEANING)
    unknown = attributes - set(CHANGES) - set(SAID_ELSEWHERE)
    assert not unknown, f"say what changes when {unknown} do"
    known = Known(base)
    for attribute in sorted(attributes & set(CHANGES) - set(WITHOUT_MEANING)):
        known.check(with_config(base, **{attribute: CHANGES[attribute]}), attribute)
    other = with_config(base, **{name: CHANGES[name] for name in set(WITHOUT_MEANING) & set(CHANGES)})
    assert same(known.kv, kv_of(other)), "one of those that are said to mean nothing changes K or V"
    assert name_of(other) == known.name, "one of those that mean nothing splits caches that are the same"


def test_an_attribute_that_nobody_knows_counts() -> None:
    base = base_of("llama")
    assert name_of(with_config(base, of_tomorrow=1)) != name_of(base)
    assert name_of(with_config(base, of_tomorrow=None)) == name_of(base)
    assert name_of(with_config(base, of_tomorrow=1)) == name_of(with_config(base, of_tomorrow=1.0))
    base.config.of_tomorrow = object()
    with pytest.raises(InvalidRequest, match=r"config\.of_tomorrow is a object"):
        name_of(base)


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 500.0},
    "linear": {"rope_theta": 500.0, "factor": 2.0},
    "llama3": {
        "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
        "beta_slow": 1.0, "attention_factor": 1.1, "truncate": True,
    },
    "longrope": {
        "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32, "short_factor": [1.0] * 4,
        "long_factor": [1.5] * 4, "attention_factor": 1.1,
    },
    "dynamic": {"rope_theta": 500.0, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_every_setting_of_the_rotation_is_in_the_key(kind: str) -> None:
    def made(settings: dict[str, Any], **more: Any) -> Any:
        return with_config(base_of("llama"), rope_parameters={"rope_type": kind, **settings}, **more)

    def changed(value: Any) -> Any:
        return [2.5, *value[1:]] if isinstance(value, list) else not value if isinstance(value, bool) else value * 1.5

    settings = ROPES[kind]
    known = Known(made(settings))
    others = {name: made({**settings, name: changed(value)}) for name, value in settings.items()}
    differing = [name for name, other in others.items() if known.check(other, f"{kind}'s {name}")]
    assert "rope_theta" in differing
    for length in (16, 4096):
        known.check(made(settings, max_position_embeddings=length), f"{kind}: max_position_embeddings {length}")


@pytest.mark.parametrize("family", BASES)
def test_every_tensor_counts_to_the_bit(family: str) -> None:
    """Those that are in no state dict, too: the rotation's frequencies."""
    model = base_of(family)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert any("inv_freq" in name for name in tensors)
    names = {name_of(model)}
    for count, tensor in enumerate(tensors.values()):
        with torch.no_grad():
            tensor.view(-1).view(torch.int32)[-1] ^= 1
        names.add(name_of(model))
        assert len(names) == count + 2
    for tensor in tensors.values():
        with torch.no_grad():
            tensor.view(-1).view(torch.int32)[-1] ^= 1
    assert name_of(model) in names


@pytest.mark.parametrize("family", BASES)
def test_dtype_adapter_and_kernels_of_attention_are_in_the_key(family: str) -> None:
    model = base_of(family)
    assert name_of(model) != name_of(model, adapter_id="fine")
    half, cast = base_of(family).to(torch.bfloat16), base_of(family)
    cast.model.rotary_emb.to(torch.bfloat16)
    eager = base_of(family)
    eager.set_attn_implementation("eager")
    known = Known(model)
    for what, other in (("dtype", half), ("a rotation that was cast", cast), ("kernels of attention", eager)):
        known.check(other, what)
        assert known.name != name_of(other)
    precise = known.name
    torch.set_float32_matmul_precision("medium")
    try:
        assert name_of(model) != precise
    finally:
        torch.set_float32_matmul_precision("highest")
    assert name_of(model) == precise


def test_equal_models_have_one_name_however_they_came(tmp_path: Any) -> None:
    model = base_of("qwen3-windows-yarn")
    model.save_pretrained(tmp_path / "named")
    loaded = type(model).from_pretrained(tmp_path / "named").eval()
    assert name_of(loaded) == name_of(model)
    spec = ModelSpec.from_transformers(model.config, model)
    assert ModelSpec.from_transformers(model.config, model.state_dict()) == spec
    assert ModelSpec.from_transformers(model.config, weights_digest(model)) == spec
    kept = kv_of(model), name_of(model)
    model(TOKENS, output_hidden_states=True)  # transformers' own hooks stay, and change nothing
    assert same(kv_of(model), kept[0])
    assert name_of(model) == kept[1]


def test_a_configuration_that_is_not_the_models_is_refused() -> None:
    model = base_of("llama")
    with pytest.raises(InvalidRequest, match=r"give model\.config"):
        ModelSpec.from_transformers(with_config(model, rms_norm_eps=0.1).config, model)


def test_a_class_over_the_configuration_of_another_family_has_no_key() -> None:
    """It reads fields of the same names, and may compute something else: Llama heeds no window."""
    config = LlamaConfig(**{**SIZES, **SMALL, "sliding_window": 5})
    assert name_of(LlamaForCausalLM(config).eval())
    with pytest.raises(InvalidRequest, match="made for a configuration of 'mistral', and has one of 'llama'"):
        name_of(MistralForCausalLM(config).eval())


def test_digests_are_the_same_for_ever() -> None:
    """Golden: who changes what is digested changes the domain with it."""
    state = {"b": torch.arange(6, dtype=torch.float32).view(2, 3), "a": torch.zeros(3, dtype=torch.bfloat16)}
    config = LlamaConfig(**SIZES)
    assert weights_digest(state) == "5fff22f77935e9d7e89283db0b0e8f36e76c71db33031684a630e466f4ccc4f5"
    assert named("ab" * 32, "{}") == "f2ec1d9dd39efaa4e251f83405ff8caac5bd161303d53b3d0e422a7087835dea"
    assert named("unverified:x", "{}") == "unverified:x/2bd546601498ff83ac64bbc01aa86797"
    found = described(config)
    assert '"rms_norm_eps":1e-06' in found
    assert '"attention":"sdpa"' in found
    assert "max_position_embeddings" not in found


# ---------------------------------------------------------------- what no configuration says


class Doubled(nn.Module):
    """As an adapter that is not merged: a layer in the place of a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


def adapted(model: Any) -> None:
    model.model.layers[0].self_attn.v_proj = Doubled(model.model.layers[0].self_attn.v_proj)


def steered(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda _module, args: (2 * args[0],))


def steered_behind(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _module, _args, out: 2 * out)


def patched(model: Any) -> None:
    linear = model.model.layers[0].self_attn.k_proj
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)


def scaled(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 2


def loosened(model: Any) -> None:
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def stretched(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 2.0


def bent(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.GELU()


def shortened(model: Any) -> None:
    del model.model.layers[1]


TINKERED = (adapted, steered, steered_behind, patched, scaled, loosened, stretched, bent, shortened)


@pytest.mark.parametrize("tinker", TINKERED, ids=lambda each: each.__name__)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_forward_pass_that_is_not_the_configurations_has_no_key(tinker: Any, *, is_known: bool) -> None:
    """Found before the first digest as well as behind it. Who vouches for it by name may keep it."""
    model = base_of("llama")
    plain, kv = ModelSpec.from_transformers(model.config, model) if is_known else None, kv_of(model)
    tinker(model)
    assert tinker is shortened or not same(kv_of(model), kv)
    with pytest.raises(InvalidRequest, match="unverified:<name>"):
        ModelSpec.from_transformers(model.config, model)
    model.config.dtype = "float32"
    vouched = ModelSpec.from_transformers(model.config, "unverified:mine")
    assert plain is None or fingerprint(vouched, vouched.kind) != fingerprint(plain, plain.kind)


def test_a_class_whose_forward_pass_was_replaced_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    model = base_of("llama")
    name_of(model)
    norm = type(model.model.norm)
    monkeypatch.setattr(norm, "forward", lambda self, x: 2 * x)
    with pytest.raises(InvalidRequest, match="LlamaRMSNorm"):
        name_of(base_of("llama"))
    with pytest.raises(InvalidRequest, match="LlamaRMSNorm"):
        name_of(model)


def test_a_model_of_the_users_own_class_is_taken_when_it_computes_alike() -> None:
    class Mine(LlamaForCausalLM):
        pass

    class Other(LlamaForCausalLM):
        def forward(self, *args: Any, **named: Any) -> Any:
            return super().forward(*args, **named)

    base = base_of("llama")
    for kind in (Mine, Other):
        model = kind(base.config).eval()
        model.load_state_dict(base.state_dict())
        if kind is Mine:
            assert name_of(model) == name_of(base)
        else:
            with pytest.raises(InvalidRequest, match="Other"):
                name_of(model)


def test_every_family_of_the_tests_is_walked() -> None:
    assert {FAMILIES[base][0] for base in BASES} == {each[0] for each in FAMILIES.values()}
