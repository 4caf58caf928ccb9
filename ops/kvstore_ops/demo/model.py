"""The demo's model: Llama architecture, 110 M parameters, bf16, weights from a fixed seed.

It is a real transformer with random weights: its answers mean nothing, but its timings do.
"""

from __future__ import annotations

from typing import Any

SEED = 20260921


def build() -> Any:
    """Build the model: 12 layers, hidden 768, 12 query and 4 kv heads, MLP 3072, vocabulary 8,192, tied embeddings."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvstore_ops.demo.text import VOCABULARY

    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()
