"""The cache of one generation: layers in memory of fixed capacity, into which fetched bytes land."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvstore.errors import InvalidRequest
from kvstore.seams import Clock
from kvstore_client.arrays import Layer
from kvstore_client.derived import exactness_of, is_derived, mark_derived
from kvstore_client.fetch.stream import LayerStream


class CacheLayer(DynamicLayer):  # type: ignore[misc]  # transformers ships no types
    """A cache layer in memory of fixed capacity: no concatenation per step, and fetched bytes land in place."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._k, self._v = k, v
        self._arrive = arrive
        self.show(0)

    def show(self, token_count: int) -> None:
        """Make the first ``token_count`` tokens the layer's content (some may still be on their way)."""
        self.keys, self.values = self._k[:, :, :token_count], self._v[:, :, :token_count]
        self._shown = self.keys
        self.dtype, self.device = self._k.dtype, self._k.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._arrive()
        start = int(self.get_seq_length())
        stop = start + int(key_states.shape[-2])
        if torch.is_grad_enabled():  # a graph may need what the memory holds, also later: nothing is written there
            self._join(start, key_states, value_states)
            self.show(stop)
            return self.keys, self.values
        # A cache that was cropped, repeated or reset goes on elsewhere: a store may still read what it had.
        # Memory of inference mode cannot be written to outside of it.
        is_closed = self._k.is_inference() and not torch.is_inference_mode_enabled()
        if stop > self._k.shape[-2] or self.keys is not self._shown or is_closed:
            self._move(start, stop, key_states, value_states)
        self._k[:, :, start:stop] = key_states
        self._v[:, :, start:stop] = value_states
        self.show(stop)
        return self.keys, self.values

    def reset(self) -> None:
        """Forget all tokens. Their memory stays as it is: some releases of transformers would zero it."""
        self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._copied()

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._copied()

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._copied()

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayer:
        """Return a copy as ``deepcopy`` makes it: several answers may go on from one cache."""
        again = CacheLayer.__new__(CacheLayer)
        memo[id(self)] = again
        again.__dict__.update(deepcopy(self.__dict__, memo))
        if is_derived([self._k, self._v]):
            mark_derived([again._k, again._v])
        again._copied()
        return again

    def _copied(self) -> None:
        """Remember that the tokens are in other memory now: a copy of derived tokens is derived."""
        if is_derived([self._k, self._v]):
            mark_derived([self.keys, self.values])

    def _move(self, start: int, stop: int, *fresh: torch.Tensor) -> None:
        """Take memory for ``stop`` tokens and more, of as many sequences as ``fresh`` has. Copy the first ``start``
        tokens there."""
        for name, shown, states in zip(("_k", "_v"), (self.keys, self.values), fresh, strict=True):
            new = states.new_empty((*states.shape[:2], stop + stop // 2, states.shape[-1]))
            if start:
                new[:, :, :start] = shown
            self._take(name, new, is_over=start > 0)

    def _join(self, start: int, *fresh: torch.Tensor) -> None:
        """Take memory of the first ``start`` tokens and ``fresh``, by an operation that a graph may record."""
        for name, shown, states in zip(("_k", "_v"), (self.keys, self.values), fresh, strict=True):
            self._take(name, torch.cat([shown, states] if start else [states], dim=-2), is_over=start > 0)

    def _take(self, name: str, new: torch.Tensor, *, is_over: bool) -> None:
        """Go on in new memory; ``is_over``: with tokens of the old one before the new ones."""
        if is_over and is_derived([getattr(self, name)]):
            mark_derived([new])  # later tokens are computed over derived ones, so they are derived too
        setattr(self, name, new)

    def first(self, token_count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (K, V) of the first tokens, [kv_heads, tokens, head_dim]. They do not change any more."""
        return self._k[0, :, :token_count], self._v[0, :, :token_count]


def cache_of(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> DynamicCache:
    """Return a cache for transformers' ``generate`` to go on from, over the tensors of a (partial) prefill, zero copy.

    Shapes: ``kv`` per layer (K, V), each [kv_heads, tokens, head_dim]. Give ``generate`` the prompt and at least one
    token more. The cache's ``exactness`` is that of ``kv``; memory grown from derived memory is remembered as derived.
    Raises: InvalidRequest for planes of another form.
    """
    _check_planes(kv)
    cache = DynamicCache()
    cache.exactness = exactness_of(kv)
    cache.layers = [CacheLayer(k[None], v[None], lambda: None) for k, v in kv]
    for layer, (k, _) in zip(cache.layers, kv, strict=True):
        layer.show(k.shape[1])
    return cache


def _check_planes(kv: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for number, pair in enumerate(kv):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest(f"kv[{number}] must be a pair (K, V), not {type(pair).__name__}")
        for plane in pair:
            first = kv[0][0]
            if not isinstance(plane, torch.Tensor) or plane.ndim != 3 or plane.shape[1] != first.shape[1]:
                found = tuple(getattr(plane, "shape", ())) or type(plane).__name__
                raise InvalidRequest(
                    f"kv[{number}] has {found}: give tensors [kv_heads, tokens, head_dim] of one length"
                )
            if plane.dtype != first.dtype or plane.device != first.device or plane.is_meta:
                raise InvalidRequest(
                    f"kv[{number}] is {plane.dtype} on {plane.device}, kv[0] {first.dtype} on {first.device}: a cache "
                    "has one dtype, and memory"
                )


class LayerArrivals:
    """Hands layers to the forward pass in order, pulling the stream only as far as the layer that asks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._source: LayerStream | None = None
        self._stream: Iterator[tuple[int, Layer]] | None = None
        self._next = 0
        self.is_blocked = False
        """True while the engine waits for a layer."""
        self.blocked_s = 0.0
        """Seconds for which it has waited so far."""
        self._unhook()

    def _unhook(self) -> None:
        self.on_layer: Callable[[int], None] = lambda _: None
        self.on_last: Callable[[], None] = lambda: None
        self.give_up: Callable[[], None] = lambda: None
        """Ends the wait for layers that have not landed. Any thread may call it."""

    def attach(self, stream: LayerStream) -> None:
        self._source, self._stream = stream, iter(stream)

    def close(self) -> None:
        """Ask for no more layers, and give back what those on their way hold at the sidecar. Idempotent."""
        self._unhook()  # a layer refers to this, and what was called refers to layers: a circle would keep their memory
        source, self._source, self._stream = self._source, None, None
        if source is not None:
            source.close()

    @property
    def is_waiting(self) -> bool:
        """True while layers are on their way and none was asked for yet: a step that begins now waits for them."""
        return self._stream is not None and not self._next

    def until(self, layer: int) -> None:
        while self._stream is not None and self._next <= layer:
            self.is_blocked, since_s = True, self._clock.monotonic()
            try:
                item = next(self._stream, None)
            finally:
                self.is_blocked = False
                self.blocked_s += self._clock.monotonic() - since_s
            if item is None:
                self._end()
                return
            self._next = item[0] + 1
            self.on_layer(item[0])

    def finish(self) -> None:
        """Pull the remaining layers."""
        self.until(1 << 30)

    def _end(self) -> None:
        self._stream = None
        self.on_last()
