"""A causal language model of transformers: what of it is used here, by type. transformers ships no types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch


class CausalModel(Protocol):
    """A causal language model. ``config`` has the fields of its family."""

    config: Any
    generation_config: object
    base_model: Any
    dtype: torch.dtype
    device: torch.device
    training: bool

    def __call__(self, **inputs: object) -> Any: ...

    def modules(self) -> Iterable[torch.nn.Module]: ...

    def generate(self, input_ids: torch.Tensor, **options: object) -> Any: ...
