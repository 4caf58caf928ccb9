"""A model with vLLM's modules and calls, as far as ``VllmRunner`` uses them, made of a model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear


class Joined(nn.Module):
    """Linear layers of the same input as one, which returns (rows, nothing)."""

    def __init__(self, *parts: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([each.weight for each in parts]))
        self.bias = nn.Parameter(torch.cat([each.bias for each in parts])) if parts[0].bias is not None else None

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(rows, self.weight, self.bias), None


class Attention(nn.Module):
    """What vLLM tells a connector of."""


class Turning(nn.Module):
    """Rotates queries and keys, [rows, heads * dim], in place, as vLLM's kernel does."""

    def __init__(self, rotary: Any, dim: int) -> None:
        super().__init__()
        self._rotary, self._dim = rotary, dim

    def forward(
        self, positions: torch.Tensor, *given: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        for each in given:
            heads = each.view(len(each), -1, self._dim)
            cos, sin = (turn[0, :, None] for turn in self._rotary(heads, positions[None]))
            first, second = heads.clone().chunk(2, dim=-1)
            heads.copy_(torch.cat((first, second), -1) * cos + torch.cat((-second, first), -1) * sin)
        return given


class LlamaAttention(nn.Module):
    def __init__(self, theirs: Any, rotary: Any) -> None:
        super().__init__()
        self.scaling, self.head_dim = theirs.scaling, theirs.head_dim
        self.q_size, self.kv_size = theirs.q_proj.out_features, theirs.k_proj.out_features
        self.qkv_proj = Joined(theirs.q_proj, theirs.k_proj, theirs.v_proj)
        self.o_proj = Joined(theirs.o_proj)
        self.rotary_emb = Turning(rotary, theirs.head_dim)
        for name in ("q_norm", "k_norm"):
            if hasattr(theirs, name):
                setattr(self, name, getattr(theirs, name))
        self.attn = Attention()


class Block(nn.Module):
    def __init__(self, theirs: Any, rotary: Any) -> None:
        super().__init__()
        self.input_layernorm, self.mlp = theirs.input_layernorm, theirs.mlp
        self.post_attention_layernorm = theirs.post_attention_layernorm
        self.self_attn = LlamaAttention(theirs.self_attn, rotary)


class LlamaModel(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.embed_tokens, self.norm = theirs.embed_tokens, theirs.norm
        self.layers = nn.ModuleList(Block(each, theirs.rotary_emb) for each in theirs.layers)


class LlamaForCausalLM(nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.model, self.lm_head = LlamaModel(theirs.model), theirs.lm_head

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.lm_head(hidden)
        return found
