"""Hugging Face transformers, one layer of any rows at a time: the ``ModelRunner`` of Llama, Mistral, Qwen2 and Qwen3.

The model's own modules do the work, so biases and norms of queries and keys are those of its forward pass (adapters and
quantised weights too, where somebody vouches for them by name). Only attention is the caller's. Loops run over layers,
never over tokens or heads.
"""

from __future__ import annotations

from typing import Any

import torch
from kvstore_kernels import Rotary, rotary_of

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec
from kvstore.spec.live import identity_of
from kvstore_client.engines.transformers_spec import CausalModel, check_spec, is_of

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
FP16_LOSS = 2**-25
"""The most that float16 rounds a small number by."""


class TransformersRunner:
    """A causal language model of transformers, layer by layer.

    ``spec``: by default ``ModelSpec.from_transformers``, which digests the weights. Runs in inference mode, in the
    model's dtype and on its device. Raises: InvalidRequest for a family without a runner, a rotation that depends on
    the prompt's length, and a spec that is not this model's: another geometry, or other weights or another
    configuration than its digest ('unverified:<name>' vouches for these).
    """

    def __init__(self, model: CausalModel, *, spec: ModelSpec | None = None, chunk_tokens: int = 256) -> None:
        config = model.config
        if config.model_type not in FAMILIES or not hasattr(model, "lm_head"):
            raise InvalidRequest(
                f"{type(model).__name__} (model_type {config.model_type!r}) has no runner: recompute needs one, exact "
                f"reuse does not. Known: causal language models of {', '.join(FAMILIES)}"
            )
        if not hasattr(model.base_model, "layers"):
            raise InvalidRequest(
                f"{type(model).__name__} wraps the model whose layers are run: give that one. Of PEFT's it is "
                "get_base_model(), which has the adapters in it"
            )
        self.model = model
        self.spec = spec or ModelSpec.from_transformers(config, model, chunk_tokens)
        check_spec(self.spec, model)
        self._base = model.base_model
        self._layers = list(self._base.layers)
        self._head_dim = int(self._layers[0].self_attn.head_dim)
        self.rotary = _rotary_of(self._base.rotary_emb, self.spec)
        self.scale = float(self._layers[0].self_attn.scaling)
        self.device: torch.device = model.device
        self._tables: tuple[torch.Tensor, torch.Tensor] | None = None
        self._last: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def check(self) -> None:
        """Raise InvalidRequest when the model's weights are no longer the spec's: make another runner; and under
        autocast, which computes in another dtype than the spec's. Cost: less than a millisecond."""
        if torch.is_autocast_enabled(self.device.type):
            raise InvalidRequest(
                f"autocast is on: K and V would be rounded to another dtype than {self.spec.cache_dtype}, the spec's. "
                "Leave autocast, or cast the model"
            )
        if not is_of(self.spec, self.model):
            raise InvalidRequest(
                f"the model's weights are not those of spec.weights_digest {self.spec.weights_digest[:80]} any more, "
                f"but of {identity_of(self.model).digest}: make a runner of the model as it is"
            )

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._base.embed_tokens(tokens.to(self.device))
        return hidden

    @torch.inference_mode()
    def project(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self._layers[layer].input_layernorm(hidden)
        turn = self._rotations(positions, hidden)
        q = _rotated(self._heads_of(layer, "q", x), *turn)
        return q, *self._kv(layer, x, *turn)

    @torch.inference_mode()
    def project_kv(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kv(layer, self._layers[layer].input_layernorm(hidden), *self._rotations(positions, hidden))

    def _kv(
        self, layer: int, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Return K, rotated, and V of rows that have passed the layer's first norm."""
        return _rotated(self._heads_of(layer, "k", x), cos, sin), self._heads_of(layer, "v", x)

    def _heads_of(self, layer: int, which: str, x: torch.Tensor) -> torch.Tensor:
        """Return queries, keys or values, [heads, rows, dim], before rotation."""
        attention = self._layers[layer].self_attn
        heads: torch.Tensor = getattr(attention, f"{which}_proj")(x).view(x.shape[0], -1, self._head_dim)
        if which != "v" and self.model.config.model_type == "qwen3":
            heads = getattr(attention, f"{which}_norm")(heads)
        return heads.transpose(0, 1)

    @torch.inference_mode()
    def finish(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        block = self._layers[layer]
        hidden = hidden + block.self_attn.o_proj(attention.transpose(0, 1).reshape(hidden.shape[0], -1))
        out: torch.Tensor = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return out

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.lm_head(self._base.norm(hidden))
        return out

    def _rotations(self, positions: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's own cos and sin of these positions, [rows, rotary_dim]: on the CPU from a table that grows
        by doubling; on a GPU they are computed, since to know the last position is to wait for the GPU, and kept for
        the next layers of the same rows."""
        if self.device.type != "cpu":
            last = self._last  # read once, as below
            if last is None or last[0] is not positions or last[1].dtype != like.dtype:
                cos, sin = self._base.rotary_emb(like, positions[None])
                self._last = last = positions, cos[0], sin[0]
            return last[1:]
        stop = int(positions[-1]) + 1 if len(positions) else 0
        tables = self._tables  # read once: another thread may put a shorter table there
        if tables is None or len(tables[0]) < stop:
            size = 1 << max(8, (stop - 1).bit_length())
            every = torch.arange(size, device=self.device)[None]
            cos, sin = self._base.rotary_emb(like, every)
            self._tables = tables = cos[0], sin[0]
        cos, sin = tables
        return cos[positions], sin[positions]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate and round as the model does. ``x``: [heads, rows, dim], of which the first dims turn, in halves."""
    turned = x[..., : cos.shape[-1]]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return turned if cos.shape[-1] == x.shape[-1] else torch.cat((turned, x[..., cos.shape[-1] :]), dim=-1)


def _rotary_of(module: Any, spec: ModelSpec) -> Rotary:
    """Return the model's own frequencies: a model cast to bfloat16 has lost some of their bits, and one cast to float16
    most of those of its slowest pairs. Raises InvalidRequest when they are not the spec's."""
    named = rotary_of(spec.rope)
    rotary = Rotary(module.inv_freq.float(), float(module.attention_scaling))
    same = rotary.frequencies.shape == named.frequencies.shape
    if not same or not torch.allclose(rotary.frequencies.cpu(), named.frequencies, rtol=2**-7, atol=FP16_LOSS):
        raise InvalidRequest(f"spec.rope ({spec.rope.kind}, rotary_dim {spec.rope.rotary_dim}) is not the model's")
    return rotary
