"""Choosing: selects the context tokens that are carried beyond a layer."""

from __future__ import annotations

import torch
from kvstore_kernels import Metric, Selector, deviation_of, gradual_ratios, highest, row_count, scores_of

from kvstore.planning import Recompute
from kvstore_client.recompute.rows import Split


class Choosing:
    """The choice of one prompt, from the check layer on. ``survivors``: int64 places in the context, ascending.

    ``attention``: fp32 [context], the suffix's attention, for the selectors that use it.
    """

    def __init__(
        self, setting: Recompute, split: Split, layer_count: int, attention: torch.Tensor | None = None
    ) -> None:
        self._setting = setting
        self._split = split
        self._attention = attention
        self._selector, self._metric = Selector(setting.selector), Metric(setting.metric)
        count = layer_count - setting.check_layer
        ratios = [setting.ratio] * count
        if setting.gradual:
            ratios = gradual_ratios(setting.ratio, count, setting.gradual)
        self._ratios = dict(enumerate(ratios, start=setting.check_layer))
        self.survivors = torch.arange(len(split.context), device=split.context.device)
        # The last one is for the rows that do not belong to the context: to leave them out is to wait for a GPU.
        self._deviations = torch.zeros(len(split.context) + 1, dtype=torch.float32, device=split.context.device)

    @property
    def needs_deviation(self) -> bool:
        return self._selector in (Selector.DEVIATION, Selector.PRODUCT)

    def at(self, layer: int) -> bool:
        """Return True when this layer chooses."""
        first = self._setting.check_layer
        return self._setting.chooses and (layer == first or (layer > first and self._setting.gradual > 0))

    def compare(
        self,
        positions: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor],
        cached: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Record how far the rows' fresh KV deviates from their cached KV, before that is overwritten.

        Shapes: ``positions`` int64 [rows], suffix or context; (K, V) each [kv_heads, rows, dim].
        """
        self._deviations[self._places(positions)] = deviation_of(fresh, cached, self._metric)

    def choose(self, layer: int) -> torch.Tensor:
        """Return the positions of the context tokens that are carried beyond this layer, out of those that entered
        it."""
        setting, split = self._setting, self._split
        scores = scores_of(
            self._selector,
            deviation=self._deviations[:-1],
            attention=self._attention,
            chunk_starts=split.run_starts,
            token_count=len(split.context),
            seed=setting.seed,
        ).to(split.context.device)
        count = min(row_count(self._ratios[layer], len(split.context)), len(self.survivors))
        self.survivors = highest(scores[self.survivors], count, self.survivors)
        return split.context[self.survivors]

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        """Return each position's place in the context; the place behind the last for the suffix's."""
        context = self._split.context
        place = torch.searchsorted(context, positions).clamp(max=len(context) - 1)
        return torch.where(context[place] == positions, place, len(context))
