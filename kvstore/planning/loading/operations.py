"""Operations of a model, counted from its spec: how attention over a context compares with everything else."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.spec import LayerKind, ModelSpec

MLP_WIDTHS = 8
"""Numbers in a layer's MLP, in squares of the hidden size: two matrices of four times its width, or three of 8/3. A
spec does not say; models differ by less than a factor of two."""


@dataclass(frozen=True)
class Operations:
    """Multiplications and additions. ``token``: of one token through all layers, but for attention over others;
    ``pair``: of one token's attention over another; ``projection``: of one token's K and V out of E, in all layers."""

    token: float
    pair: float
    projection: float

    @staticmethod
    def of(spec: ModelSpec) -> Operations:
        """Counts a decoder of the usual form, with as many query numbers as hidden ones."""
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
        """c2 / c1: attention of one token over another, by the rest of a token's operations."""
        return self.pair / self.token if self.token else 0.0

    @property
    def projection_share(self) -> float:
        """The part of a token's operations that K and V take when they are projected from E."""
        return self.projection / self.token if self.token else 0.0
