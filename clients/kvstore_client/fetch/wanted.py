"""The part of a prefix that a fetch brings: layers, heads, hidden layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import index
from typing import TypeAlias

from kvstore.errors import InvalidRequest
from kvstore.spec import ModelSpec, item_size

Heads: TypeAlias = range | tuple[int, int]
"""A run of kv heads."""


@dataclass(frozen=True)
class Wanted:
    """The part of a prefix to bring, checked against the spec."""

    spec: ModelSpec
    layers: tuple[int, ...]
    head_start: int
    head_stop: int | None
    hidden_layers: tuple[int, ...]
    verify: bool
    device: str = "cpu"
    """The device that the bytes go to, as torch names it; empty: to several."""

    def on(self, device: str) -> Wanted:
        """Return the same part for another device."""
        return self if device == self.device else _on(self, device)

    @staticmethod
    def of(
        spec: ModelSpec, layers: Sequence[int] | None, heads: Heads | None,
        hidden_layers: Sequence[int], verify: bool,
    ) -> Wanted:  # fmt: skip
        """Return the checked part. Raises InvalidRequest for layers, heads or hidden layers that the spec does not
        have."""
        hidden = _numbers("hidden_layers", hidden_layers) if type(hidden_layers) is not tuple or hidden_layers else ()
        if layers is None and heads is None and not hidden:
            return _all_of(spec, bool(verify))
        chosen = spec.slab_layers if layers is None else _numbers("layers", layers)
        if not set(chosen) <= set(spec.slab_layers):
            layer = next(each for each in chosen if each not in spec.slab_layers)
            raise InvalidRequest(f"layer {layer} keeps no cache in this model of {spec.layer_count} layers")
        if len(set(hidden)) < len(hidden) or not all(0 <= layer < spec.layer_count for layer in hidden):
            raise InvalidRequest(f"hidden_layers {hidden} must be different layers in 0..{spec.layer_count - 1}")
        if hidden and spec.keeps_e:
            raise InvalidRequest(
                "hidden_layers: this spec keeps E of every layer as its cache (keeps_e): ask for layers="
            )
        if heads is None:
            return Wanted(spec, chosen, 0, None, hidden, verify)
        most = min((spec.layers[layer].kv_heads for layer in chosen), default=1)
        start, stop = _head_range(heads, 0 if spec.mla or spec.keeps_e else most)
        return Wanted(spec, chosen, start, stop, hidden, verify)

    @property
    def head_count(self) -> int | None:
        """Number of kv heads wanted of each layer; None: all that it has."""
        return None if self.head_stop is None else self.head_stop - self.head_start

    def heads_of(self, layer: int) -> int:
        return self.head_count or self.spec.kept(layer)[0]

    def byte_count(self, token_count: int) -> int:
        """Return the bytes that ``token_count`` tokens of this part take."""
        return token_count * self._token_bytes

    @cached_property
    def kept(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """Return, by what a layer keeps (``ModelSpec.kept``), the number of layers that keep it."""
        if self.spec.are_layers_alike:
            return {self.spec.kept(0): len(self.layers)}
        return dict(Counter(map(self.spec.kept, self.layers)))

    @cached_property
    def kept_by_all(self) -> tuple[int, tuple[int, ...]] | None:
        """The heads wanted of each layer, and the dims of its K and V. None where layers differ, and for E."""
        if self.spec.keeps_e or len(self.kept) != 1:
            return None
        heads, dims = next(iter(self.kept))
        return self.head_count or heads, dims

    @cached_property
    def _token_bytes(self) -> int:
        spec = self.spec
        e_bytes = spec.hidden_size * item_size(spec.hidden_dtype)
        if not spec.layers:
            return e_bytes
        numbers = sum(
            (self.head_count or heads) * sum(dims) * layer_count for (heads, dims), layer_count in self.kept.items()
        )
        return numbers * spec.item_size + len(self.hidden_layers) * e_bytes


@lru_cache(maxsize=64)
def _all_of(spec: ModelSpec, verify: bool) -> Wanted:
    """Return all layers and heads. Kept, because most fetches want these, and each property is computed once."""
    return Wanted(spec, spec.slab_layers, 0, None, (), verify)


@lru_cache(maxsize=64)
def _on(wanted: Wanted, device: str) -> Wanted:
    """Return the part for a device. Kept, as that of ``_all_of``."""
    return replace(wanted, device=device)


def _numbers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(index(value) for value in values)
    except TypeError:
        raise InvalidRequest(f"{name} must be layer numbers, not {values!r:.80}") from None


def _head_range(heads: Heads, most: int) -> tuple[int, int]:
    """Return (first, stop) of a range of kv heads, or of such a pair. ``most`` 0: the cache has no heads: MLA, or E.
    Raises InvalidRequest."""
    if not most:
        raise InvalidRequest("heads: this cache has no kv heads (MLA, or E in the place of KV): leave it out")
    if isinstance(heads, range):
        heads = (heads.start, heads.stop if heads.step == 1 else -1)
    bounds = _numbers("heads", heads)
    if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= most:
        raise InvalidRequest(f"heads {heads!r:.80} must be a run (first, stop) of the {most} kv heads")
    return bounds[0], bounds[1]
