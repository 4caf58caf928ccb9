"""Which weights and which tokenizer a spec is of. Of a tokenizer counts what decides the tokens of a text, not how it
was last called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kvstore_client import ModelSpec
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from kvstore.errors import InvalidRequest
from kvstore.planning import Side
from kvstore.spec.from_transformers import weights_digest
from tests.recompute.models import model_of
from tests.specs import read_back, small_spec

WORDS = {"<unk>": 0, "a": 1, "b": 2, "c": 3}
CONFIG = LlamaConfig(
    vocab_size=4, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, dtype="float32"
)


def fast(words: dict[str, int], *, splits: bool = True) -> Any:
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    if splits:
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def digest(tokenizer: Any) -> str:
    return ModelSpec.from_transformers(CONFIG, "unverified:x", tokenizer=tokenizer).tokenizer_digest


def test_padding_and_cutting_say_nothing_but_a_word_or_a_rule_does() -> None:
    tokenizer = fast(WORDS)
    fresh = digest(tokenizer)
    tokenizer.pad_token = "<unk>"
    tokenizer(["a", "b c a"], padding=True, truncation=True, max_length=2)
    assert digest(tokenizer) == fresh == digest(fast(WORDS)) == digest(fresh)
    swapped = {**WORDS, "a": 2, "b": 1}
    added = fast(WORDS)
    added.add_tokens(["d"])
    others = [digest(each) for each in (fast(swapped), fast(WORDS, splits=False), added)]
    assert len({fresh, *others}) == 4


def test_a_tokenizer_without_a_definition_is_known_by_its_words() -> None:
    class Slow:
        special_tokens_map = {"unk_token": "<unk>"}  # noqa: RUF012

        def __init__(self, words: dict[str, int]) -> None:
            self._words = words

        def get_vocab(self) -> dict[str, int]:
            return self._words

    assert digest(Slow(WORDS)) == digest(Slow(dict(reversed(WORDS.items()))))
    assert digest(Slow(WORDS)) != digest(Slow({**WORDS, "d": 4}))


def test_what_is_no_tokenizer_is_named() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer is a int"):
        digest(7)
    for bad in ("x", "AB" * 32, "unverified:x", 5):
        with pytest.raises(InvalidRequest, match="tokenizer_digest"):
            small_spec(tokenizer_digest=bad)


def test_a_spec_that_says_nothing_is_named_as_before_and_a_profile_is_about_the_weights() -> None:
    spec = ModelSpec.from_transformers(CONFIG, "unverified:x")
    assert spec.tokenizer_digest == ""
    assert b"tokenizer" not in spec.canonical
    told = replace(spec, tokenizer_digest="ab" * 32)
    assert read_back(told.canonical) == told
    assert Side.of(told) == Side.of(spec)


def test_weights_made_in_inference_mode_are_known_by_the_same_digest_and_looked_at_each_time() -> None:
    with torch.inference_mode():
        model = model_of("llama")
    digest = weights_digest(model)
    assert digest == weights_digest(model_of("llama"))
    with torch.inference_mode():
        model.lm_head.weight[0, 0] += 1
    assert weights_digest(model) != digest
