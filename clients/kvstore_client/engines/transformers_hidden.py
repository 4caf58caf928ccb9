"""E of a prompt in a transformers model: captured during prefill, fetched where it is stored, and projected to K and
V."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers import DynamicCache

from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.recompute.merged import hidden_planes
from kvstore_client.recompute.projecting import project_into

NOTHING: Mapping[str, Any] = MappingProxyType({})


class PromptE:
    """The hidden states that enter each layer, for a prompt's first ``token_count`` tokens: ``planes``, one per layer,
    [token_count, hidden_size]. The leading tokens of a plane are filled, the others not yet."""

    def __init__(self, runner: TransformersRunner, token_count: int) -> None:
        self._runner = runner
        self.planes = hidden_planes(runner.spec, token_count, runner.device)
        self._there = [0] * len(self.planes)

    @property
    def token_count(self) -> int:
        """The number of leading tokens that are filled in every layer."""
        return min(self._there)

    @contextmanager
    def captured(self, cache: DynamicCache) -> Iterator[None]:
        """Capture what enters the layers in forward passes over ``cache``, and over no other: other threads may use the
        model at the same time."""
        blocks = self._runner.model.base_model.layers
        hooks = []
        try:
            for layer, block in enumerate(blocks):  # an interrupt in between leaves no hook, which keeps the planes
                hook = _observing(partial(self._capture, cache, layer))
                hooks.append(block.register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _capture(
        self, cache: DynamicCache, layer: int, _block: Any, args: tuple[Any, ...], named: Mapping[str, Any] = NOTHING
    ) -> None:
        """Copy one layer's input. ``named`` is missing when the hook is removed while another thread's pass is about to
        call it."""
        if not any(value is cache for value in named.values()):
            return
        hidden = (args[0] if args else named["hidden_states"])[0]
        start, plane = int(cache.layers[layer].keys.shape[-2]), self.planes[layer]
        if start == self._there[layer] < len(plane):
            stop = min(start + len(hidden), len(plane))
            plane[start:stop] = hidden[: stop - start]
            self._there[layer] = stop

    def announce(self, token_count: int) -> None:
        """Count the first tokens as filled: a fetch fills each layer before it is computed, or the attempt fails."""
        self._there = [token_count] * len(self.planes)

    def arrive(self, layer: int, token_count: int, into: tuple[torch.Tensor, torch.Tensor], step_tokens: int) -> None:
        """Project a layer's fetched E to its K and V, in the steps of the prefill."""
        project_into(self._runner, layer, self.planes[layer][:token_count], into, step_tokens)


def _observing(hook: Any) -> Any:
    """Mark the hook as one that changes nothing: a model with any other hook is refused."""
    hook.observes = True
    return hook
