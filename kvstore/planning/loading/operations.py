"""Operations of a model, counted from its spec. They tell how attention over a context compares with the rest."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.spec import LayerKind, ModelSpec

MLP_WIDTHS = 8
"""Weights of a layer's MLP, in squares of the hidden size: two matrices of four times its width, or three of 8/3. A
spec does not give the MLP's width; models differ by less than a factor of two."""


@dataclass(frozen=True)
class Operations:
    """Numbers of multiplications and additions. ``token``: one token through all layers, without attention over other
    tokens. ``pair``: one token's attention over another. ``projection``: one token's K and V from E, in all layers."""

    token: float
    pair: float
    projection: float

    @staticmethod
    def of(spec: ModelSpec) -> Operations:
        """Count a decoder of the usual form, whose queries are as wide as its hidden states."""
        hidden, token, pair, projection = float(spec.hidden_size), 0.0, 0.0, 0.0
        for layer in spec.layers:
            keys = layer.kv_heads * (layer.k_dim + layer.v_dim)
            projection += 2 * hidden * keys
            token += 2 * hidden * (2 * hidden + keys + MLP_WIDTHS * hidden)
            if layer.kind is LayerKind.FULL:
                pair += 4 * hidden
            elif layer.window:
                token += 4 * hidden * layer.window
        return Operations(token, pair, projection)

    @property
    def pair_share(self) -> float:
        """c2 / c1: attention of one token over another, divided by the rest of a token's operations."""
        return self.pair / self.token if self.token else 0.0

    @property
    def projection_share(self) -> float:
        """The share of a token's operations that projecting K and V from E takes."""
        return self.projection / self.token if self.token else 0.0
