"""vLLM's own modules, one layer at a time, of any rows: the ``ModelRunner`` of the families whose layers are known.

vLLM tells a connector of its attention layers alone, so the model around them is looked for among all modules. Only
attention is the caller's; norms, projections, rotation and MLP are the modules that vLLM computes with, whatever their
dtype or quantisation. Not those of several ranks: each has a part of a layer.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from kvstore_kernels import rotary_of

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ATTENTION = ("LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention")


def model_of(layer: object) -> Any:
    """Return the model that has this attention layer. Raises InvalidRequest for one whose layers are not known."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    around = [each for each in modules if each is not layer and any(part is layer for part in each.modules())]
    for each in around:
        if type(each).__name__ in FAMILIES:
            return each
    found = max(around, key=lambda each: sum(1 for _ in each.modules()), default=layer)
    raise InvalidRequest(
        f"{type(found).__name__} has no runner, so documents cannot be mended (known: {', '.join(FAMILIES)}): leave "
        '"recompute" out of kv_connector_extra_config'
    )


class VllmRunner:
    """A model of vLLM, layer by layer. Runs in inference mode. Raises: InvalidRequest for rotations and layers that are
    not known."""

    def __init__(self, model: Any, spec: ModelSpec, device: torch.device) -> None:
        self.spec = spec
        self.rotary = rotary_of(spec.rope)
        self.device = device
        self._model, self._base = model, model.model
        self._layers = list(self._base.layers)
        attention = self._layers[0].self_attn
        self.scale = float(attention.scaling)
        more = (
            getattr(attention, "do_llama_4_scaling", False),
            getattr(attention, "dual_chunk_attention_config", None),
            getattr(self._layers[0], "ada_rms_norm_t_cond", None),
        )
        if len(self._layers) != spec.layer_count or type(attention).__name__ not in ATTENTION or any(more):
            raise InvalidRequest(
                f"{type(model).__name__} computes its layers in a way that is not known here, so documents cannot be "
                'mended: leave "recompute" out of kv_connector_extra_config'
            )
        self._head_dim = int(attention.head_dim)
        self._sizes = [int(attention.q_size), int(attention.kv_size), int(attention.kv_size)]
        self._has_norms = hasattr(attention, "q_norm")

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._base.embed_tokens(tokens.to(self.device))
        return hidden

    @torch.inference_mode()
    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._layers[layer]
        attention = block.self_attn
        rows = attention.qkv_proj(block.input_layernorm(hidden))[0]
        q, k, v = rows.split(self._sizes, dim=-1)
        if self._has_norms:
            q = attention.q_norm(self._by_head(q)).reshape(q.shape)
            k = attention.k_norm(self._by_head(k)).reshape(k.shape)
        q, k = attention.rotary_emb(positions, q.contiguous(), k.contiguous())
        return self._by_head(q).transpose(0, 1), self._by_head(k).transpose(0, 1), self._by_head(v).transpose(0, 1)

    @torch.inference_mode()
    def finish(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        block = self._layers[layer]
        rows = attention.transpose(0, 1).reshape(hidden.shape[0], -1)
        hidden = hidden + block.self_attn.o_proj(rows)[0]
        out: torch.Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return out

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._model.compute_logits(self._base.norm(hidden))
        return out

    def _by_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(rows.shape[0], -1, self._head_dim)
