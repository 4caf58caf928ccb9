"""The testbed's model for training: Qwen2's arithmetic, its parameter names, and initial weights that learn the task.

Qwen2 is a Llama with q, k and v biases: RoPE, SwiGLU, grouped queries, RMS norms before each half of a layer. This
module computes the same logits as transformers' model on the same weights (a test holds them together), in fewer
and larger operations, and can restrict layer 0 to a window, which the recipe's first stages need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name everyone reads

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed import task

LAYER = "model.layers."


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes of a testbed model."""

    layers: int
    hidden: int = 128
    inner: int = 256
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    theta: float = 10_000.0
    epsilon: float = 1e-6
    positions_max: int = 2048

    def config(self) -> dict[str, Any]:
        """Return the transformers configuration of the same model, as `Qwen2Config(**config)` takes it."""
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": task.VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions_max,
            "rms_norm_eps": self.epsilon,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.theta},
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }


class Attention(nn.Module):
    """Grouped-query attention with biases on q, k and v."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.geometry = g
        self.q_proj = nn.Linear(g.hidden, g.heads * g.head_dim)
        self.k_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim)
        self.v_proj = nn.Linear(g.hidden, g.kv_heads * g.head_dim)
        self.o_proj = nn.Linear(g.heads * g.head_dim, g.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Attend. x `[batch, tokens, hidden]`, cos and sin `[tokens, 1, head_dim]`; mask None: causal."""
        g = self.geometry
        batch, tokens, _ = x.shape
        group = g.heads // g.kv_heads
        q = rotate(self.q_proj(x).view(batch, tokens, g.heads, g.head_dim), cos, sin).transpose(1, 2)
        k = rotate(self.k_proj(x).view(batch, tokens, g.kv_heads, g.head_dim), cos, sin)
        v = self.v_proj(x).view(batch, tokens, g.kv_heads, g.head_dim)
        k, v = (t.repeat_interleave(group, dim=2).transpose(1, 2) for t in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(g.hidden, g.inner, bias=False)
        self.up_proj = nn.Linear(g.hidden, g.inner, bias=False)
        self.down_proj = nn.Linear(g.inner, g.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One layer: attention, then SwiGLU, each on the normed residual."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(g.hidden, g.epsilon)
        self.self_attn = Attention(g)
        self.post_attention_layernorm = nn.RMSNorm(g.hidden, g.epsilon)
        self.mlp = Mlp(g)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """All layers without the head. The class exists so that parameters have their names in transformers."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(task.VOCABULARY, g.hidden)
        self.layers = nn.ModuleList(Layer(g) for _ in range(g.layers))
        self.norm = nn.RMSNorm(g.hidden, g.epsilon)


class Net(nn.Module):
    """The whole model; its state dict is transformers' (`model.layers.0.self_attn.q_proj.weight` and so on)."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.geometry = geometry
        self.model = Body(geometry)
        self.lm_head = nn.Linear(geometry.hidden, task.VOCABULARY, bias=False)

    def tensors_by_name(self) -> dict[str, nn.Parameter]:
        """Return the parameters by their transformers names."""
        return dict(self.named_parameters())

    @torch.no_grad()
    def adopt(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy all weights from `tensors`, by name."""
        self.load_state_dict(tensors)

    @torch.no_grad()
    def repeat(self) -> None:
        """Make every layer above the first equal to the second."""
        for copies in self._upper():
            for copy in copies[1:]:
                copy.copy_(copies[0])

    @torch.no_grad()
    def share_gradients(self) -> None:
        """Give every layer above the first the mean of their gradients, so that equal layers stay equal."""
        for copies in self._upper():
            gradients = [copy.grad for copy in copies if copy.grad is not None]
            mean = torch.stack(gradients).sum(0) / len(copies)
            for copy in copies:
                copy.grad = mean.clone()

    def _upper(self) -> list[tuple[nn.Parameter, ...]]:
        """Return, for each parameter of a layer, that parameter of all layers above the first."""
        return list(zip(*(list(layer.parameters()) for layer in self.model.layers[1:]), strict=True))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor, *, window: int | None = None) -> torch.Tensor:
        """Return logits `[n, vocabulary]` at the flat indices `at` `[n]` of tokens `[batch, tokens]`. `window` narrows
        the attention of layer 0 to that many tokens."""
        g = self.geometry
        count = tokens.shape[1]
        cos, sin = rotation(g, count)
        x = F.embedding(tokens, self.model.embed_tokens.weight)
        for i, layer in enumerate(self.model.layers):
            mask = _window(count, window) if window is not None and i == 0 else None
            x = layer(x, cos, sin, mask)
        x = x.reshape(-1, g.hidden).index_select(0, at)
        logits: torch.Tensor = self.lm_head(self.model.norm(x))
        return logits


def rotation(g: Geometry, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine of positions 0 to count - 1, `[count, 1, head_dim]` each, halves repeated."""
    frequencies = g.theta ** (-torch.arange(0, g.head_dim, 2).float() / g.head_dim)
    angles = torch.outer(torch.arange(count).float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x `[batch, tokens, heads, head_dim]`, first half paired with second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _window(count: int, window: int) -> torch.Tensor:
    """Return the additive mask `[count, count]`: a token sees itself and the window - 1 tokens before it."""
    distance = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    return torch.zeros(count, count).masked_fill((distance < 0) | (distance >= window), -math.inf)


@torch.no_grad()
def initialise(net: Net, seed: int) -> None:
    """Set initial weights from which the task is learnt in some hundreds of steps; plain random weights stall.

    Queries begin equal to keys in one head per group, so that these heads match equal tokens. Output projections
    contain the transposed value projections, so that heads copy. Biases of q and k are small, and one head of layer 0
    attends to the previous token.
    """
    random = torch.Generator().manual_seed(seed)
    g = net.geometry
    layers = [cast(Layer, layer) for layer in net.model.layers]

    def normal(p: torch.Tensor, std: float) -> None:
        p.copy_(torch.randn(p.shape, generator=random) * std)

    normal(net.model.embed_tokens.weight, 0.3)
    normal(net.lm_head.weight, 0.02)
    for layer in layers:
        a, m = layer.self_attn, layer.mlp
        for linear in (a.q_proj, a.k_proj, a.v_proj, m.gate_proj, m.up_proj):
            normal(linear.weight, linear.in_features**-0.5)
        for linear in (a.o_proj, m.down_proj):
            normal(linear.weight, linear.in_features**-0.5 / math.sqrt(2 * g.layers))
        normal(a.q_proj.bias, 0.1)
        normal(a.k_proj.bias, 0.1)
        a.v_proj.bias.zero_()
        for head in range(g.heads):
            group = head // (g.heads // g.kv_heads)
            q, kv = _rows(g, head), _rows(g, group)
            if head % (g.heads // g.kv_heads) == 0:
                a.q_proj.weight[q] = a.k_proj.weight[kv]
            a.o_proj.weight[:, q] += 0.5 * a.v_proj.weight[kv].T
    _previous_token_head(layers[0].self_attn)


def _previous_token_head(a: Attention) -> None:
    """Make the last query head attend to the token before, by a key bias; the query bias is the key bias, rotated."""
    g = a.geometry
    q, kv = _rows(g, g.heads - 1), _rows(g, g.kv_heads - 1)
    half, fast = g.head_dim // 2, g.head_dim // 4
    a.q_proj.weight[q] /= 10
    a.k_proj.weight[kv] /= 10
    key = torch.zeros(g.head_dim)
    key[:fast] = 4.0
    cos, sin = (t[1, 0] for t in rotation(g, 2))
    turned = torch.cat([-key[half:], key[:half]])
    a.k_proj.bias[kv] = key
    a.q_proj.bias[q] = key * cos - turned * sin  # rotated by -1: matches the key of position t - 1
    a.o_proj.weight[:, q] += a.v_proj.weight[kv].T


def _rows(g: Geometry, head: int) -> slice:
    return slice(head * g.head_dim, (head + 1) * g.head_dim)


def grow(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """Return the weights of a deeper model that computes the same; the same weights when `layers` is their depth.

    New layers stand behind layers of the upper half, spread evenly. They are copies of the layer before them, with
    output and down projections of zero, so that they start as the identity and learn from there. The lower half keeps
    its depth, because in deep models the first layers change a token most.
    """
    grown = {name: p for name, p in tensors.items() if not name.startswith(LAYER)}
    source = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith(LAYER))
    upper, added = source - source // 2, layers - source
    if added < 0:
        raise InvalidRequest(f"layers is {layers}: at least the {source} there are")
    place = 0
    for layer in range(source):
        rank = layer - source // 2
        copies = 0 if rank < 0 else added * (rank + 1) // upper - added * rank // upper
        for copy in range(1 + copies):
            prefix = f"{LAYER}{layer}."
            for name, p in tensors.items():
                if name.startswith(prefix):
                    silent = copy > 0 and name.endswith(("o_proj.weight", "down_proj.weight"))
                    grown[f"{LAYER}{place}.{name.removeprefix(prefix)}"] = torch.zeros_like(p) if silent else p.clone()
            place += 1
    return grown
