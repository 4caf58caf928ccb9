"""Shared by the benchmarks that run a model on a GPU: the 8B geometry with random weights, made on the device."""

from __future__ import annotations

from typing import Any

from kvstore_ops.bench.model_1b import build as build_tiny

TOKENS_MAX = 40_960


def build(scale: str, device: str) -> Any:
    """Build a model: 32 layers, hidden 4096, 32 / 8 heads, head dim 128, MLP 14336, vocabulary 128,256, bf16, 16 GB. At
    the scale tiny it is the small one of ``model_1b``. Attention is torch's own (sdpa)."""
    import torch

    if scale == "tiny":
        return build_tiny(scale).to(device)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128_256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=TOKENS_MAX, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, dtype=torch.bfloat16, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):  # the weights are made there: on the host it takes minutes
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
