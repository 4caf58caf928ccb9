"""Whose cache a vLLM engine computes, without vLLM: its configuration stood in for, real files. Whatever changes K, V
or embeddings changes the identity, of the connector's caches and of the encoder's."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kvstore_client.engines.vllm.geometry import geometry_of
from kvstore_client.engines.vllm.identity import IGNORED, OF_ITEMS, Adapters, engine_identity, spec_of
from kvstore_client.engines.vllm.naming import check_items
from kvstore_client.engines.vllm.settings import ConnectorSettings, EncoderSettings
from kvstore_client.opaque.encoder import encoder_namespace
from transformers import LlamaConfig

from kvstore.errors import InvalidRequest
from kvstore.keys import fingerprint
from kvstore.spec import ModelSpec
from tests.recompute.models import SIZES
from tests.specs import small_spec

VOUCHED = (None, "ab" * 16, "unverified:mine")
"""What may be set for weights_digest: it vouches for the weights alone."""
CHANGED: dict[str, Any] = {
    "rms_norm_eps": 0.1, "hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "pretraining_tp": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "of_tomorrow": 1, "max_position_embeddings": 7,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 500.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


class FullAttentionSpec:
    """Named as vLLM's."""

    def __init__(
        self, heads: int = 2, size: int = 8, dtype: str = "torch.float32", block: int = 16, mode: int = 0
    ) -> None:
        self.num_kv_heads, self.head_size, self.dtype, self.block_size = heads, size, dtype, block
        self.kv_quant_mode = mode


EIGHT_BITS = FullAttentionSpec(dtype="torch.uint8", mode=1)


def engine(
    directory: Path, *, layers: Any = None, config: dict[str, Any] | None = None, **more: Any
) -> tuple[Any, Any]:
    """(vLLM's configuration, its caches')."""
    hf = LlamaConfig.from_dict({**LlamaConfig(**SIZES).to_dict(), **(config or {})})
    model: dict[str, Any] = {
        "hf_config": hf, "hf_text_config": hf, "model": str(directory), "dtype": "torch.float32", "quantization": None,
        "max_model_len": 512, "multimodal_config": None, "revision": None, "get_hidden_size": lambda: 32,
        "get_vocab_size": lambda: 96, "get_total_num_kv_heads": lambda: 2,
    }  # fmt: skip
    load = {"load_format": more.pop("load_format", "auto"), "download_dir": more.pop("download_dir", None)}
    draft = more.pop("draft", None)
    cache = {"cache_dtype": more.pop("cache_dtype", "auto")}
    model.update(more)
    group = SimpleNamespace(
        layer_names=["model.layers.0", "model.layers.1"], kv_cache_spec=layers or FullAttentionSpec()
    )
    return (
        SimpleNamespace(
            model_config=SimpleNamespace(**model), load_config=SimpleNamespace(**load),
            parallel_config=SimpleNamespace(tensor_parallel_size=1), speculative_config=draft,
            cache_config=SimpleNamespace(**cache),
        ),
        SimpleNamespace(kv_cache_groups=[group]),
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "model-1.safetensors").write_bytes(bytes(range(256)) * 4)
    (made / "model-2.safetensors").write_bytes(b"two")
    (made / "preprocessor_config.json").write_text("{}")
    return made


def name_of(made: tuple[Any, Any], vouched: str | None = None, **settings: Any) -> bytes:
    found = spec_of(made[0], geometry_of(*made), ConnectorSettings(weights_digest=vouched, **settings))
    return fingerprint(found, found.kind)


@pytest.mark.parametrize("vouched", VOUCHED)
def test_every_attribute_of_the_configuration_is_in_the_identity(directory: Path, vouched: str | None) -> None:
    plain = engine(directory)
    attributes = set(plain[0].model_config.hf_config.to_dict()) - set(IGNORED) - {"model_type", "output_attentions"}
    names = {name_of(plain, vouched)}
    sizes = {name: value * 2 for name, value in SIZES.items() if isinstance(value, int)}
    for attribute in sorted(attributes):
        value = plain[0].model_config.hf_config.to_dict()[attribute]
        other = CHANGED.get(attribute, sizes.get(attribute, not value if isinstance(value, bool) else "another"))
        made = engine(directory)
        vars(made[0].model_config.hf_config)[attribute] = other
        names.add(name_of(made, vouched))
    assert len(names) == 1 + len(attributes)
    for ignored in IGNORED:
        made = engine(directory)
        vars(made[0].model_config.hf_config)[ignored] = "another"
        assert name_of(made, vouched) == name_of(plain, vouched)


@pytest.mark.parametrize("vouched", VOUCHED)
def test_what_is_beside_the_configuration_is_in_the_identity(directory: Path, vouched: str | None) -> None:
    made = [
        engine(directory), engine(directory, dtype="torch.float16"), engine(directory, quantization="fp8"),
        engine(directory, quantization="fp8", quantization_config={"ignore": ["lm_head"]}),
        engine(directory, quantization="fp8", quantization_config={"ignore": []}),
        engine(directory, load_format="gguf"), engine(directory, layers=FullAttentionSpec(dtype="torch.float16")),
        engine(directory, layers=FullAttentionSpec(heads=1)), engine(directory, layers=FullAttentionSpec(size=16)),
        engine(directory, config={"rope_parameters": YARN}),
        engine(directory, config={"rope_parameters": {**YARN, "beta_fast": 16.0}}),
        engine(directory, config={"rope_parameters": LONG}),
        engine(directory, config={"rope_parameters": {**LONG, "long_factor": [3.0] * 4}}),
        engine(directory, config={"rope_parameters": LONG}, max_model_len=4096),
        engine(directory, layers=EIGHT_BITS, cache_dtype="fp8"),
        engine(directory, model_class_overrides={"LlamaForCausalLM": "ours:Llama"}),
    ]  # fmt: skip
    names = [name_of(each, vouched) for each in made] + [name_of(made[0], vouched, chunk_tokens=64)]
    assert len(set(names)) == len(names)
    assert name_of(engine(directory, max_model_len=4096), vouched) == names[0], "nothing reads it here"
    assert len({name_of(made[0], each) for each in VOUCHED}) == len(VOUCHED)


@pytest.mark.parametrize("called", ["fp8", "fp8_e4m3"])
def test_a_cache_of_8_bits_has_its_own_dtype(directory: Path, called: str) -> None:
    assert geometry_of(*engine(directory, layers=EIGHT_BITS, cache_dtype=called)).cache_dtype == "float8_e4m3fn"


MIXED = SimpleNamespace(
    kv_cache_specs={"model.layers.0": EIGHT_BITS, "model.layers.1": FullAttentionSpec()}, block_size=16
)


@pytest.mark.parametrize(
    ("layers", "called", "said"),
    [
        (EIGHT_BITS, "fp8_e5m2", "'fp8_e5m2', which kvstore cannot name: set --kv-cache-dtype fp8, or auto"),
        (EIGHT_BITS, "auto", "'auto', which kvstore cannot name"),
        (EIGHT_BITS, "fp8_ds_mla", "'fp8_ds_mla', which"),
        (FullAttentionSpec(dtype="torch.uint8", mode=3), "fp8_per_token_head", "'fp8_per_token_head', which"),
        (FullAttentionSpec(dtype="torch.uint8", mode=3), "fp8", "'fp8', which"),
        (MIXED, "fp8", "float32, float8_e4m3fn: set --kv-cache-dtype auto, and no --kv-cache-dtype-skip-layers"),
    ],
)
def test_caches_whose_bytes_have_no_name_are_refused(directory: Path, layers: Any, called: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        geometry_of(*engine(directory, layers=layers, cache_dtype=called))


def test_ranks_that_have_one_head_of_each_layer_need_layers_that_are_alike(directory: Path) -> None:
    """A rank tells its own heads alone: of 4 or 2 heads on 4 ranks, each has one."""

    def on_ranks(ranks: int, draft: Any = None, **config: Any) -> int:
        made = engine(directory, layers=FullAttentionSpec(heads=max(1, 2 // ranks)), config=config, draft=draft)
        made[0].parallel_config.tensor_parallel_size = ranks
        return geometry_of(*made).replicas

    other = drafting(directory, get_total_num_kv_heads=lambda: 4)
    same = drafting(directory, get_total_num_kv_heads=lambda: 2)
    for each in (other, same):
        each.draft_model_config.hf_text_config.to_dict = lambda: {"num_attention_heads": 4}
    assert [on_ranks(ranks, draft) for ranks in (1, 2, 4) for draft in (None, same)] == [1, 1, 1, 1, 2, 2]
    assert on_ranks(2, other) == 1, "each rank has a head of its own"
    assert on_ranks(2, swa_num_key_value_heads=4) == 1
    for draft, config in (
        (other, {}), (None, {"swa_num_key_value_heads": 4}), (None, {"setting": {"num_attention_groups": 4}}),
        (None, {"num_key_value_heads_per_layer": [2, 4]}), (None, {"blocks": [{"attention": {"kv_n_heads": 4}}]}),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest, match="2 kv heads on 4 ranks, and layers with other numbers of them"):
            on_ranks(4, draft, **config)


def test_a_model_without_heads_is_refused_by_its_layers(directory: Path) -> None:
    made = engine(directory, layers=type("MambaSpec", (FullAttentionSpec,), {})(), get_total_num_kv_heads=lambda: 0)
    with pytest.raises(InvalidRequest, match="keeps a MambaSpec"):
        geometry_of(*made)


def drafting(directory: Path, method: str = "eagle", **more: Any) -> Any:
    """vLLM's configuration of a draft in a directory."""
    rope = SimpleNamespace(rope_parameters=more.pop("rope", {}))
    model = {"model": str(directory), "revision": None, "dtype": "torch.float32", "quantization": None, **more}
    config = SimpleNamespace(**{"max_model_len": 512, "hf_config": SimpleNamespace(), "hf_text_config": rope, **model})
    given = {"num_speculative_tokens": 2, "draft_load_config": None, "disable_padded_drafter_batch": True}
    return SimpleNamespace(method=method, draft_model_config=config, **given)


@pytest.mark.parametrize("vouched", VOUCHED)
def test_a_drafts_layers_have_its_weights_in_their_name(directory: Path, tmp_path: Path, vouched: str | None) -> None:
    drafts = [tmp_path / name for name in ("one", "two", "three")]
    for number, each in enumerate(drafts):
        each.mkdir()
        (each / "model.safetensors").write_bytes(bytes([number % 2]))
        (each / "config.json").write_text("{}" if number < 2 else '{"rope": 1}')

    def named(draft: Any) -> bytes:
        return name_of(engine(directory, draft=draft), vouched)

    plain = [named(None), named(drafting(drafts[0], "ngram"))]
    assert plain[0] == plain[1], "no draft has a cache"
    first = drafting(drafts[0])
    names = [
        plain[0], named(first), named(drafting(drafts[2])), named(drafting(drafts[0], "eagle3")),
        named(drafting(drafts[0], dtype="torch.float16")), named(drafting(drafts[0], quantization="fp8")),
        named(drafting(directory, "mtp")),
    ]  # fmt: skip
    assert len(set(names)) == len(names)
    assert (named(drafting(drafts[1])) == names[1]) == bool(vouched), "weights_digest vouches for these weights, too"
    first.draft_model_config.hf_config.draft_vocab_size = 96  # as a draft that is loaded changes it
    assert named(first) == names[1]


def test_what_else_a_draft_depends_on_is_in_its_name(directory: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"1")

    def named(draft: Any, **more: Any) -> bytes:
        return name_of(engine(directory, draft=draft, **more))

    names = [
        named(drafting(draft)), named(drafting(draft, rope=LONG)), named(drafting(draft, rope=LONG, max_model_len=256)),
        named(drafting(draft, rope=LONG), max_model_len=256), named(drafting(directory, "mtp")),
        named(drafting(directory, "mtp", revision="another")),
    ]  # fmt: skip
    assert named(drafting(draft, max_model_len=256)) == names[0], "its rope is of no length"
    for name in ("config.json", "hf_quant_config.json", "params.json"):
        (draft / name).write_text("{}")
        names.append(named(drafting(draft)))
    (directory / "config.json").write_text('{"rope": 1}')  # which --hf-overrides change for the target alone
    names.append(named(drafting(directory, "mtp")))
    assert len(set(names)) == len(names)


def test_a_draft_whose_weights_are_made_up_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    draft = drafting(tmp_path)
    draft.draft_load_config = SimpleNamespace(load_format="dummy")
    with pytest.raises(InvalidRequest, match="load_format dummy makes up weights"):
        name_of(engine(directory, draft=draft))
    name_of(engine(directory, draft=draft), VOUCHED[1])
    own = drafting(directory, "mtp")
    own.draft_load_config = draft.draft_load_config
    with pytest.raises(InvalidRequest, match="load_format dummy makes up weights"):
        name_of(engine(directory, draft=own))


def test_every_byte_of_the_weights_files_counts(directory: Path) -> None:
    names = {name_of(engine(directory))}
    for count, path in enumerate(sorted(directory.glob("*.safetensors"))):
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 1
        path.write_bytes(whole)
        names.add(name_of(engine(directory)))
        assert len(names) == count + 2
    (directory / "model-3.safetensors").write_bytes(b"")
    names.add(name_of(engine(directory)))
    assert len(names) == 4
    (directory / "README.md").write_text("says nothing")
    assert name_of(engine(directory)) in names


@pytest.mark.parametrize("vouched", VOUCHED)
def test_what_becomes_of_an_image_is_in_the_encoders_identity(directory: Path, vouched: str | None) -> None:
    def name(**settings: Any) -> str:
        made, _ = engine(directory, multimodal_config=SimpleNamespace(**settings))
        digest = engine_identity(made, EncoderSettings(weights_digest=vouched))
        return encoder_namespace(small_spec(weights_digest=digest, layers=()))

    names = [name(), *(name(**{each: "another"}) for each in OF_ITEMS)]
    (directory / "preprocessor_config.json").write_text(json.dumps({"image_mean": [1, 0, 0]}))
    names.append(name())
    (directory / "video_preprocessor_config.json").write_text("{}")
    names.append(name())
    assert len(set(names)) == len(names)
    other, _ = engine(directory, multimodal_config=SimpleNamespace(), config={"rms_norm_eps": 0.1})
    digest = engine_identity(other, EncoderSettings(weights_digest=vouched))
    assert encoder_namespace(small_spec(weights_digest=digest, layers=())) not in names


def test_images_need_a_name_by_their_content(directory: Path) -> None:
    def check(**items: Any) -> None:
        made, _ = engine(directory, multimodal_config=SimpleNamespace(**items) if items else None)
        made.cache_config = SimpleNamespace(enable_prefix_caching=has_prefixes)
        check_items(made)

    has_prefixes = True
    check(mm_processor_cache_gb=0)
    has_prefixes = False
    for good in ({}, {"mm_processor_cache_gb": 0.5}, {"mm_processor_cache_gb": 0, "language_model_only": True}):
        check(**good)
    with pytest.raises(InvalidRequest, match="set --enable-prefix-caching, or --mm-processor-cache-gb above 0"):
        check(mm_processor_cache_gb=0)


def test_an_encoders_namespace_is_of_its_model_alone() -> None:
    spec = small_spec()
    others = [small_spec(weights_digest="cd" * 32), small_spec(model_id="x"), small_spec(adapter_id="x")]
    others += [small_spec(hidden_dtype="float32"), small_spec(hidden_size=64)]
    assert len({encoder_namespace(each) for each in (spec, *others)}) == 6
    with pytest.raises(InvalidRequest, match="must be a ModelSpec"):
        encoder_namespace("x")  # type: ignore[arg-type]


def test_adapters_that_come_for_ever_are_not_all_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those in use are: their files are not read again."""
    monkeypatch.setattr("kvstore_client.engines.vllm.identity.ADAPTERS_KEPT", 3)
    read: list[str] = []
    monkeypatch.setattr("kvstore_client.engines.vllm.identity._add_files", lambda _, files: read.append(files[0].name))
    adapters = Adapters(small_spec())

    def use(name: str) -> None:
        path = tmp_path / f"{name}.safetensors"
        if not path.exists():
            path.touch()
        number = 21 if name.startswith("used") else 1 + int(name)
        adapters.spec_for(SimpleNamespace(lora_name=name, lora_int_id=number, lora_path=str(path)))

    for number in range(20):
        use("used again and again")
        use(str(number))
        assert len(adapters._known) <= 3
        assert len(adapters._loaded) <= 3
    assert len(read) == 21


@pytest.mark.parametrize("is_in_place", [False, True])
def test_an_adapter_is_known_by_its_files_as_they_are_now(tmp_path: Path, is_in_place: bool) -> None:
    """Also when its settings alone are written again, or a file of the same size and time takes another's place. vLLM
    loads them anew under another number, or in place."""
    adapters, numbers = Adapters(small_spec()), itertools.count(1)
    weights, settings = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"

    def name() -> bytes:
        number = 1 if is_in_place else next(numbers)
        found: ModelSpec = adapters.spec_for(lora(tmp_path, number, load_inplace=is_in_place))
        return fingerprint(found, found.kind)

    weights.write_bytes(b"one")
    settings.write_text('{"lora_alpha": 16}')
    names = [name()]
    settings.write_text('{"lora_alpha": 32}')
    names.append(name())
    before = weights.stat()
    weights.write_bytes(b"two")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    names.append(name())
    assert len(set(names)) == 3
    assert name() == names[-1]
    assert fingerprint(adapters.spec_for(None), small_spec().kind) not in names


def test_files_that_change_under_a_loaded_adapter_name_nothing(tmp_path: Path) -> None:
    """vLLM goes on with what it has read, or reads again when it needs room: nobody tells which."""
    adapters, weights = Adapters(small_spec()), tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"one")
    first = adapters.spec_for(lora(tmp_path, 1))
    weights.write_bytes(b"two")
    for _ in range(2):
        with pytest.raises(
            InvalidRequest, match=r"files of adapter 'fine' have changed.* load it anew, best from another path"
        ):
            adapters.spec_for(lora(tmp_path, 1))
        adapters.cache_cleared()
    later = adapters.spec_for(lora(tmp_path, 2))
    assert later != first
    assert adapters.spec_for(lora(tmp_path, 1, load_inplace=True)) == later
    assert adapters.spec_for(lora(tmp_path, 1)) == later


def lora(path: Path, number: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(lora_name="fine", lora_int_id=number, lora_path=str(path), **more)
