"""Lists the calls of transformers' ``generate`` that the cache serves. All others are left to transformers.

The options served may only look at logits and tokens. K and V of the prompt are then those of a plain prefill, and the
answer is transformers' own. An unlisted option is left to transformers; the report says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Integral

import torch
from kvstore_kernels.rotary import KINDS
from transformers import GenerationConfig

from kvstore_client.arrays import Tensor
from kvstore_client.engines.transformers_spec import CausalModel

HONOURED = frozenset({
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "stop_strings", "do_sample", "temperature", "top_k",
    "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "no_repeat_ngram_size", "bad_words_ids", "renormalize_logits", "forced_eos_token_id", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "sequence_bias", "pad_token_id",
    "bos_token_id", "eos_token_id", "output_scores", "output_logits", "return_dict_in_generate", "disable_compile",
})  # fmt: skip
"""Fields of a GenerationConfig that act on logits and tokens alone, or on the form of the answer."""
NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (1,), "num_return_sequences": (1,), "num_beam_groups": (1,), "use_cache": (True,),
    "output_attentions": (False,), "output_hidden_states": (False,), "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,), "length_penalty": (1.0,), "diversity_penalty": (0.0,),
    "early_stopping": (False,), "guidance_scale": (1.0,), "token_healing": (False,), "is_assistant": (False,),
    "use_mtp": (False,), "low_memory": (False,), "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant",), "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,), "target_lookbehind": (10,), "assistant_ensemble_weight": (0.5,),
    "speculation_type": ("assisted",),
}  # fmt: skip
"""Values of other fields that change nothing."""
ARGUMENTS = frozenset({
    "generation_config", "attention_mask", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn",
    "streamer", "tokenizer",
})  # fmt: skip
"""``generate``'s other arguments that see logits and tokens alone. A mask is served if it hides nothing."""
ROOM_TOKENS_MAX = 4096
"""The most new tokens that a generation reserves memory for at the start: many callers set a limit that no answer
reaches. Beyond it the cache's memory grows by halves."""


def room_tokens(model: CausalModel, options: Mapping[str, object], token_count: int) -> int:
    """Return for how many tokens behind a prompt a generation reserves memory. A limit that is no number is
    transformers' to refuse."""
    config = options.get("generation_config") or model.generation_config
    limit = options.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    behind = 0
    if limit is None:
        limit, behind = options.get("max_length"), token_count
    return max(0, min(int(limit) - behind, ROOM_TOKENS_MAX)) + 1 if isinstance(limit, Integral) else 1


def why_left(model: CausalModel, input_ids: Tensor, options: Mapping[str, object], rope_kind: str) -> str:
    """Return why a call is left to transformers; empty when the cache serves it."""
    return (
        _why_ids(input_ids)
        or _why_model(model, rope_kind)
        or _why_option(model, options)
        or _why_prompt(model, input_ids, options)
    )


def _why_ids(input_ids: object) -> str:
    """Return why the input is left to transformers: anything but tokens in memory. Its errors are transformers' to
    raise."""
    if not isinstance(input_ids, torch.Tensor):
        return f"input_ids is a {type(input_ids).__name__}, not a tensor"
    if input_ids.dtype not in (torch.int64, torch.int32):
        return f"input_ids are {input_ids.dtype}: tokens are int64 or int32"
    if input_ids.layout is not torch.strided or input_ids.device.type == "meta":
        return f"input_ids are {input_ids.layout} on {input_ids.device}"
    return ""


def why_rotation(rope_kind: str) -> str:
    """Return why a model's rotation leaves all its calls to transformers; empty when it does not."""
    if rope_kind not in KINDS:
        return f"the rotation ({rope_kind!r}) depends on the prompt's length, so that prompts share no beginning"
    return ""


def _why_model(model: CausalModel, rope_kind: str) -> str:
    left = why_rotation(rope_kind)
    if left:
        return left
    dropout = getattr(model.config, "attention_dropout", 0.0)
    if model.training or (dropout and any(each.training for each in model.modules())):
        return "the model is in training: call eval()"
    if torch.is_autocast_enabled(model.device.type):
        return "autocast is on: K and V would be of another dtype than the model"
    return _why_adapter(getattr(model, "peft_config", None))


def _why_adapter(configs: object) -> str:
    """Return why PEFT's adapters leave all calls to transformers: they put learned tokens before the prompt, look in it
    for words that turn them on, or weight others by all of it (X-LoRA), which no step of it shows; or they swap
    attention modules (LLaMA-Adapter), and nothing tells whether they act. A vouched name does not help."""
    for name, config in configs.items() if isinstance(configs, Mapping) else ():
        looks_at_all = getattr(config, "alora_invocation_tokens", None) or getattr(config, "peft_type", "") == "XLORA"
        if looks_at_all or getattr(config, "is_prompt_learning", False):
            return f"the adapter {name!r} acts on a prompt as a whole, and the cache on its steps: use plain LoRA"
        if getattr(config, "is_adaption_prompt", False):
            return f"the adapter {name!r} swaps attention modules, and nothing tells whether it acts: use plain LoRA"
    return ""


def _why_option(model: CausalModel, options: Mapping[str, object]) -> str:
    given = options.get("generation_config")
    if given is not None and type(given) is not GenerationConfig:
        return f"generation_config is a {type(given).__name__}"
    for name, value in _asked(model, options):
        if name not in HONOURED and value not in NEUTRAL.get(name, ()):
            return f"{name} is {value!r:.60}" if name in NEUTRAL else f"{name} is given"
    return ""


def _asked(model: CausalModel, options: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield every option and its value: the call's, else its generation config's, else the model's."""
    told = {name: value for name, value in options.items() if name not in ARGUMENTS and value is not None}
    yield from told.items()
    fields = _fields(model.generation_config) | _fields(options.get("generation_config"))
    yield from ((name, value) for name, value in fields.items() if name not in told)


def _fields(config: object) -> dict[str, object]:
    found = {} if config is None else vars(config)
    return {
        name: value
        for name, value in found.items()
        if value is not None and name[0] != "_" and name != "transformers_version"
    }


def _why_prompt(model: CausalModel, input_ids: torch.Tensor, options: Mapping[str, object]) -> str:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
        return f"batch of {tuple(input_ids.shape)}: one sequence at a time"
    mask: Tensor = options.get("attention_mask")
    if mask is not None:
        hides = mask.shape != input_ids.shape or not bool((mask == 1).all())
        return "attention_mask hides tokens" if hides else ""
    found = dict(_asked(model, options))
    pad: Tensor = found.get("pad_token_id")
    if not isinstance(pad, int | None) and not (isinstance(pad, torch.Tensor) and pad.numel() == 1):
        return f"pad_token_id is {pad!r:.60}"
    stops = found.get("eos_token_id")
    if isinstance(stops, torch.Tensor):
        stops = stops.tolist()
    # without a mask, transformers takes pad tokens in the prompt for padding, and hides them
    if pad is not None and pad not in (stops if isinstance(stops, list | tuple) else [stops]):
        if bool((input_ids == pad).any()):
            return f"the prompt holds pad_token_id {pad}, and no attention_mask says that it is none"
    return ""
