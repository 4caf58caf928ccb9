"""Shared by the benchmarks that run a model: the 1B geometry with random weights."""

from __future__ import annotations

from typing import Any

LAYERS = {"full": 16, "quick": 4, "tiny": 1}
TINY_HIDDEN = 128


def build(scale: str, *, is_mha: bool = False) -> Any:
    """Build a model: 16 layers (quick: 4), hidden 2048, 32 / 8 heads, head dim 64, MLP 8192, vocabulary 128,256, bf16.
    ``is_mha``: it has a KV head for every query head."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    config = config_of(scale, is_mha=is_mha)
    torch.set_default_dtype(torch.bfloat16)
    try:
        return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def config_of(scale: str, *, is_mha: bool = False) -> Any:
    """Return the configuration of the model of ``build``."""
    import torch
    from transformers import LlamaConfig

    tiny = scale == "tiny"
    heads = 4 if tiny else 32
    return LlamaConfig(
        vocab_size=512 if tiny else 128_256,
        hidden_size=TINY_HIDDEN if tiny else 2048,
        intermediate_size=256 if tiny else 8192,
        num_hidden_layers=LAYERS[scale],
        num_attention_heads=heads,
        num_key_value_heads=heads if is_mha else heads // (2 if tiny else 4),
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )


def prompts(model: Any, count: int, token_count: int) -> Any:
    """Return random prompts [count, 1, token_count]; no two share a prefix."""
    import torch

    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, model.config.vocab_size, (count, 1, token_count), generator=generator)
