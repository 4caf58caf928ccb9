"""Options of generate: what CachedModel honours gives transformers' own answer, all else is left to transformers."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvstore_client import Client, connect
from kvstore_client.engines.transformers import CachedModel, TransformersRunner
from kvstore_client.engines.transformers_options import ARGUMENTS, HONOURED, NEUTRAL, why_left
from kvstore_ops.sidecar import Sidecar
from transformers import GenerationConfig, LogitsProcessor, TextStreamer
from transformers.generation import MaxLengthCriteria, StoppingCriteriaList

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from tests.recompute.models import VOCABULARY, model_of
from tests.recompute.models import prompt as tokens_of

STEP = 16
IDS = tokens_of(STEP * 3 + 5, 11)[None]
MODEL = model_of("llama", 4)
WORDS = MODEL.generate(IDS, max_new_tokens=8, do_sample=False)[0, IDS.shape[1] :].tolist()
SAMPLED: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6}
OPTIONS: dict[str, dict[str, Any]] = {
    "max_length": {"max_length": IDS.shape[1] + 3}, "max_new_tokens": {"max_new_tokens": 3},
    "min_length": {"min_length": IDS.shape[1] + 4, "eos_token_id": WORDS[1], "pad_token_id": WORDS[1]},
    "min_new_tokens": {"min_new_tokens": 4, "eos_token_id": WORDS[1], "pad_token_id": WORDS[1]},
    "do_sample": SAMPLED, "temperature": {**SAMPLED, "temperature": 3.0}, "top_k": {**SAMPLED, "top_k": 3},
    "top_p": {**SAMPLED, "top_p": 0.3}, "min_p": {**SAMPLED, "min_p": 0.3}, "top_h": {**SAMPLED, "top_h": 0.4},
    "typical_p": {**SAMPLED, "typical_p": 0.3}, "epsilon_cutoff": {**SAMPLED, "epsilon_cutoff": 0.02},
    "eta_cutoff": {**SAMPLED, "eta_cutoff": 0.02}, "repetition_penalty": {"repetition_penalty": 5.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1}, "bad_words_ids": {"bad_words_ids": [[WORDS[0]]]},
    "renormalize_logits": {"renormalize_logits": True}, "remove_invalid_values": {"remove_invalid_values": True},
    "forced_eos_token_id": {"forced_eos_token_id": 5}, "suppress_tokens": {"suppress_tokens": [WORDS[0]]},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (1, 9.0), "eos_token_id": 5, "pad_token_id": 5,
    },
    "begin_suppress_tokens": {"begin_suppress_tokens": [WORDS[0]]}, "sequence_bias": {"sequence_bias": [[[7], 9.0]]},
    "pad_token_id": {"pad_token_id": 95, "attention_mask": torch.ones_like(IDS)}, "bos_token_id": {"bos_token_id": 1},
    "eos_token_id": {"eos_token_id": WORDS[2], "pad_token_id": WORDS[2]}, "disable_compile": {"disable_compile": True},
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
}  # fmt: skip
NEEDS_WORDS = {"stop_strings"}
"""Honoured, and not run here: it needs a tokenizer with words."""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """One sidecar for all of them, in which the prompt is kept."""
    with Sidecar("--capacity", "64 MiB") as sidecar, connect(sidecar.address) as connected:
        CachedModel(MODEL, connected, chunk_tokens=STEP).generate(IDS, max_new_tokens=1).report.wait_stored(60.0)
        yield connected


def answer(generate: Any, options: dict[str, Any]) -> tuple[list[int], Any]:
    torch.manual_seed(3)
    found = generate(IDS, **{"max_new_tokens": None, **options})
    report = getattr(found, "report", None)
    found = found.sequences if report else found
    return getattr(found, "sequences", found).tolist(), report


def both(client: Client, options: dict[str, Any]) -> Any:
    """The report, of an answer that is transformers' own."""
    defaults = {} if "max_length" in options else {"max_new_tokens": 6}
    options = {"do_sample": False, **defaults, **options}
    expected, _ = answer(MODEL.generate, options)
    found, report = answer(CachedModel(MODEL, client, chunk_tokens=STEP).generate, options)
    assert found == expected
    return report


@pytest.mark.parametrize("name", sorted(HONOURED - NEEDS_WORDS))
def test_what_is_honoured_is_answered_as_by_transformers(client: Client, name: str) -> None:
    report = both(client, OPTIONS[name])
    assert not report.bypassed
    assert report.reused_token_count == STEP * 3


def test_arguments_that_see_tokens_only_are_honoured(client: Client) -> None:
    class Shifted(LogitsProcessor):
        def __call__(self, _input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.roll(1, -1)

    stop = StoppingCriteriaList([MaxLengthCriteria(IDS.shape[1] + 2)])
    given: list[dict[str, Any]] = [
        {"logits_processor": [Shifted()]}, {"stopping_criteria": stop}, {"attention_mask": torch.ones_like(IDS)},
        {"prefix_allowed_tokens_fn": lambda _batch, _ids: [3, 4]},
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False), "max_new_tokens": None},
    ]  # fmt: skip
    for options in given:
        report = both(client, options)
        assert not report.bypassed
        assert report.reused_token_count == STEP * 3


def test_a_streamer_gets_the_prompt_once_whatever_is_lost(client: Client) -> None:
    from kvstore.errors import DataLoss

    class Streamed(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def put(self, value: Any) -> None:
            self.seen.append(value.flatten().tolist())

        def end(self) -> None:
            self.seen.append([])

    def lose() -> None:
        raise DataLoss("lost, says the test")

    plain, cached = Streamed(), Streamed()
    MODEL.generate(IDS, max_new_tokens=4, do_sample=False, streamer=plain)
    client.faults.arm("fetch.copy.middle", lose)
    try:
        model = CachedModel(MODEL, client, chunk_tokens=STEP)
        report = model.generate(IDS, max_new_tokens=4, do_sample=False, streamer=cached).report
    finally:
        client.faults.arm("fetch.copy.middle", lambda: None)
    assert not report.bypassed
    assert cached.seen == plain.seen


LEFT_VALUES: dict[str, Any] = {
    "num_beams": 2, "num_return_sequences": 2, "num_beam_groups": 2, "use_cache": False, "output_attentions": True,
    "output_hidden_states": True, "token_healing": True, "is_assistant": True, "use_mtp": True, "low_memory": True,
}  # fmt: skip


def test_every_other_option_is_left_to_transformers() -> None:
    """Each field that this transformers has: in the call, in its configuration, in the model's own."""
    fields = {name for name in vars(GenerationConfig()) if name[0] != "_"} - {"transformers_version"}
    assert fields >= HONOURED
    for name in sorted(fields - HONOURED):
        value = LEFT_VALUES.get(name, 7)
        given, model = GenerationConfig(), model_of("llama", 4)
        setattr(given, name, value)
        setattr(model.generation_config, name, value)
        for options, of in (({name: value}, MODEL), ({"generation_config": given}, MODEL), ({}, model)):
            assert name in why_left(of, IDS, options, "default"), name
        for value in NEUTRAL.get(name, ()):
            assert not why_left(MODEL, IDS, {name: value}, "default")
    unknown = ("inputs_embeds", "position_ids", "past_key_values", "cache_position", "assistant_model", "synced_gpus")
    for name in (
        *unknown,
        "custom_generate",
        "negative_prompt_ids",
        "token_type_ids",
        "inputs",
        "labels",
        "of_tomorrow",
    ):
        assert name not in ARGUMENTS
        assert why_left(MODEL, IDS, {name: torch.zeros(1)}, "default") == f"{name} is given"
        assert not why_left(MODEL, IDS, {name: None}, "default")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"generation_config": GenerationConfig(num_beams=3, max_new_tokens=4)}, "num_beams is 3"),
        ({"generation_config": GenerationConfig(use_cache=False, max_new_tokens=4)}, "use_cache is False"),
        ({"position_ids": torch.arange(500, 500 + IDS.shape[1])[None] * 3}, "position_ids is given"),
        ({"cache_implementation": "static"}, "cache_implementation is given"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states is True"),
        ({"pad_token_id": int(IDS[0, 3])}, "holds pad_token_id"),
        ({"attention_mask": (torch.arange(IDS.shape[1]) > 2).long()[None]}, "attention_mask hides"),
    ],
)
def test_what_is_left_is_transformers_own_answer(client: Client, options: dict[str, Any], why: str) -> None:
    assert why in both(client, options).bypassed


def test_a_pad_token_that_ends_answers_is_no_padding(client: Client) -> None:
    """transformers hides nothing then."""
    both_ends = {"pad_token_id": int(IDS[0, 3]), "eos_token_id": [VOCABULARY - 1, int(IDS[0, 3])]}
    assert not both(client, both_ends).bypassed
    as_tensor = {**both_ends, "eos_token_id": torch.tensor(both_ends["eos_token_id"])}
    assert not both(client, as_tensor).bypassed
    mask = {"pad_token_id": int(IDS[0, 3]), "attention_mask": torch.ones_like(IDS)}
    assert not both(client, mask).bypassed


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_an_answer_may_be_trained_on_and_written_to(client: Client, options: dict[str, Any]) -> None:
    """As transformers' own may."""
    cached = CachedModel(MODEL, client, chunk_tokens=STEP)
    answer = cached.generate(IDS, max_new_tokens=3, do_sample=False, **options).sequences
    MODEL(answer).logits.sum().backward()
    MODEL.zero_grad()
    answer[0, -1] = 1


def test_a_model_that_trains_or_is_cast_on_its_way_is_left_alone(client: Client) -> None:
    model = model_of("llama", 4)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast" in cached.generate(IDS, max_new_tokens=1).report.bypassed
    model.train()
    assert "training" in cached.generate(IDS, max_new_tokens=1).report.bypassed
    model.eval()
    assert cached.generate(IDS, max_new_tokens=1).report.reused_token_count == STEP * 3
    model.config.attention_dropout = 0.5
    model.model.layers[0].self_attn.train()
    assert "training" in cached.generate(IDS, max_new_tokens=1).report.bypassed


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"is_prompt_learning": True}, "acts on a prompt as a whole"),
        ({"alora_invocation_tokens": [3, 4]}, "acts on a prompt as a whole"),
        ({"peft_type": "XLORA"}, "acts on a prompt as a whole"),
        ({"is_adaption_prompt": True}, "swaps attention modules"),
    ],
)
def test_an_adapter_that_no_step_of_a_prompt_shows_is_left_alone_though_vouched_for(
    client: Client, says: dict[str, Any], why: str
) -> None:
    """PEFT's ``generate`` puts tokens before the prompt, looks for words in it, or weights adapters by all of it; or
    the modules of its layers do not tell whether the adapter acts."""
    model = model_of("llama", 4)
    model.config.dtype = "float32"
    spec = ModelSpec.from_transformers(model.config, "unverified:tuned", STEP)
    cached = CachedModel(model, client, spec=spec)
    plain = {"is_prompt_learning": False, "is_adaption_prompt": False, "alora_invocation_tokens": None}
    model.peft_config = {"plain": SimpleNamespace(peft_type="LORA", **plain)}
    assert not cached.generate(IDS, max_new_tokens=1).report.bypassed
    model.peft_config["tuned"] = SimpleNamespace(**says)
    assert f"'tuned' {why}" in cached.generate(IDS, max_new_tokens=1).report.bypassed


LONG = {"rope_theta": 10000.0, "factor": 4.0}
LENGTHS: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", **LONG},
    "longrope": {
        "rope_type": "longrope", **LONG, "original_max_position_embeddings": 32, "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_rotation_that_depends_on_the_prompts_length_is_left_to_transformers(client: Client, kind: str) -> None:
    def made() -> Any:
        return model_of("llama", 4, rope_parameters=LENGTHS[kind], max_position_embeddings=32)

    expected = made().generate(IDS, max_new_tokens=12, do_sample=False)
    for _ in range(2):  # a model each: dynamic ones keep what the longest prompt made of them
        found = CachedModel(made(), client, chunk_tokens=STEP).generate(IDS, max_new_tokens=12, do_sample=False)
        assert kind in found.report.bypassed
        assert torch.equal(found.sequences, expected)
        assert found.report.receipt is None


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
def test_a_model_that_sees_what_comes_later_has_no_spec_and_is_left_to_transformers(
    client: Client, family: str
) -> None:  # fmt: skip
    """With config.is_causal False the masks of transformers hide nothing: a prefill in steps is another model's."""
    model = model_of(family, 4)
    cached = CachedModel(model, client, chunk_tokens=STEP)
    model.config.is_causal = False
    for weights in (model, "unverified:sees-all"):
        with pytest.raises(InvalidRequest, match="is_causal"):
            ModelSpec.from_transformers(model.config, weights)
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    found = cached.generate(IDS, max_new_tokens=8, do_sample=False)
    assert "is_causal" in found.report.bypassed
    assert torch.equal(found.sequences, expected)


def test_another_models_spec_is_refused_by_both_digests(client: Client) -> None:
    other = model_of("llama", 5)
    spec = ModelSpec.from_transformers(MODEL.config, MODEL, STEP)
    theirs = ModelSpec.from_transformers(other.config, other, STEP)
    for make in (lambda: TransformersRunner(other, spec=spec), lambda: CachedModel(other, client, spec=spec)):
        with pytest.raises(InvalidRequest) as caught:
            make()
        assert spec.weights_digest in caught.value.message
        assert theirs.weights_digest in caught.value.message
    wrong = ModelSpec.dense(
        "x", "unverified:x", layer_count=4, kv_heads=1, head_dim=8, hidden_size=32, vocab_size=VOCABULARY
    )
    with pytest.raises(InvalidRequest, match=r"spec\.layers\[0\].*kv_heads=1.*kv_heads=2"):
        CachedModel(MODEL, client, spec=wrong)
