"""Small random models of every family and rope kind, as transformers makes them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 96
LAYERS = 4
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-biased-mha": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "num_key_value_heads": 4}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LINEAR}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 16}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 9, "head_dim": 16}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-windows": (Qwen2ForCausalLM, Qwen2Config, WINDOWS),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3-windows-yarn": (Qwen3ForCausalLM, Qwen3Config, {**WINDOWS, "rope_parameters": YARN, "head_dim": 8}),
}


def model_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model whose attention and norms say something: large weights, biases and norm weights that are not 0 and 1."""
    kind, config, special = FAMILIES[family]
    torch.manual_seed(seed)
    model = kind(config(**{**SIZES, "initializer_range": 0.25, **special, **more}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif "norm" in name:
                parameter.uniform_(0.6, 1.4)
    return model.to(dtype).eval()


def sibling_of(model: Any, seed: int, distance: float = 0.03) -> Any:
    """The same architecture with weights that differ a little."""
    import copy

    sibling = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in sibling.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return sibling


def prompt(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
