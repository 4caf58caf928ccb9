"""Several contexts of one shape in one pass: the computation that `kvstore_client.recompute.recompute` does for one.

Models this small spend most of a pass on calls. Contexts of equal length, cut into the same chunks, are computed in the
same calls, in half the time. The client's own code chooses the tokens, context by context. A test checks that both
passes give the same result. Differences from the client's pass: every token is in a run or behind all runs, no run is
exact, and there is no window. A runner gets the rows of several sequences, one sequence after the other; each sequence
ends with the last position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kvstore_client.recompute.choosing import Choosing
from kvstore_client.recompute.fused import LEAST_MASS
from kvstore_client.recompute.rows import Split
from kvstore_client.recompute.runner import ModelRunner
from torch.nn.functional import scaled_dot_product_attention

from kvstore.planning import Recompute

Planes = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a layer: ``positions`` int64 [contexts, rows], ascending; ``hidden`` [contexts, rows, hidden_size]."""

    positions: torch.Tensor
    hidden: torch.Tensor

    def at(self, places: torch.Tensor) -> _Rows:
        """Return the rows at ``places`` int64 [contexts, fewer rows]: indices of each context's rows."""
        hidden = self.hidden.gather(1, places[..., None].expand(-1, -1, self.hidden.shape[2]))
        return _Rows(self.positions.gather(1, places), hidden)


@torch.inference_mode()
def recompute_together(
    runner: ModelRunner, tokens: torch.Tensor, cached: Planes, hidden: torch.Tensor, split: Split, setting: Recompute
) -> tuple[torch.Tensor, float]:
    """Return the logits of the suffix, [contexts, suffix tokens, vocab_size], and f.

    Shapes: ``tokens`` int64 [contexts, tokens]; ``cached``: per layer (K, V) of the runs, each
    [contexts, kv_heads, context tokens, dim], rotated for their positions in the prompt; ``hidden``: E of
    ``setting.first_layer``, [contexts, context tokens, hidden_size]; ``split``: that of any context, as all are equal.
    """
    return _Pass(runner, tokens, cached, hidden, split, setting).run()


class _Pass:
    def __init__(
        self,
        runner: ModelRunner,
        tokens: torch.Tensor,
        cached: Planes,
        hidden: torch.Tensor,
        split: Split,
        setting: Recompute,
    ) -> None:
        self._runner, self._tokens, self._hidden, self._split, self._setting = runner, tokens, hidden, split, setting
        self._layer_count = runner.spec.layer_count
        count, length = tokens.shape
        self._suffix = split.suffix.expand(count, -1)
        self._context = split.context.expand(count, -1)
        self._planes: Planes = []
        for pair in cached:
            wide = [plane.new_zeros(*plane.shape[:2], length, plane.shape[3]) for plane in pair]
            for whole, plane in zip(wide, pair, strict=True):
                whole[:, :, : plane.shape[2]] = plane
            self._planes.append((wide[0], wide[1]))
        self._choosing = [Choosing(setting, split, self._layer_count) for _ in range(count)]
        self._carried = 0

    def run(self) -> tuple[torch.Tensor, float]:
        setting, first = self._setting, 0
        rows = self._embedded(self._suffix)
        ahead = setting.look_ahead_share(self._layer_count)
        if ahead:
            first, rows = setting.first_layer, self._look_ahead(rows)
        for layer in range(first, self._layer_count):
            rows = self._layer(layer, rows)
        share = min(1.0, self._carried / (self._context.shape[1] * self._layer_count) + ahead)
        count, suffix = self._suffix.shape
        logits = self._runner.logits(rows.hidden[:, -suffix:].flatten(0, 1))
        return logits.view(count, suffix, -1), share

    def _layer(self, layer: int, rows: _Rows) -> _Rows:
        setting, suffix = self._setting, self._suffix.shape[1]
        if layer == setting.first_layer and (setting.ratio or setting.last_layer >= setting.first_layer):
            context = _Rows(self._context, self._hidden) if setting.first_layer else self._embedded(self._context)
            rows = _Rows(
                torch.cat((context.positions, rows.positions), 1), torch.cat((context.hidden, rows.hidden), 1)
            )  # fmt: skip
        if layer == setting.check_layer and not setting.ratio:
            rows = _Rows(rows.positions[:, -suffix:], rows.hidden[:, -suffix:])
        chooses = self._choosing[0].at(layer)
        q = self._enter(layer, rows, compares=chooses and self._choosing[0].needs_deviation)
        if chooses:
            chosen = torch.stack([each.choose(layer) for each in self._choosing])
            stay = torch.cat((chosen, self._suffix), 1)
            places = torch.searchsorted(rows.positions.contiguous(), stay)
            rows = rows.at(places)
            q = q.gather(2, places[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        self._carried += rows.positions.shape[1] - suffix
        if layer == self._layer_count - 1:
            rows, q = _Rows(rows.positions[:, -suffix:], rows.hidden[:, -suffix:]), q[:, :, -suffix:]
        return self._finish(layer, rows, self._attend(layer, rows, q))

    def _enter(self, layer: int, rows: _Rows, *, compares: bool) -> torch.Tensor:
        """Write K and V of the rows to the planes. Return their queries, [contexts, heads, rows, dim]."""
        count, length = rows.positions.shape
        made = self._runner.project(layer, rows.hidden.flatten(0, 1), rows.positions.flatten())
        q, k, v = (each.view(each.shape[0], count, length, -1).transpose(0, 1) for each in made)
        for index, choosing in enumerate(self._choosing if compares else ()):
            places = rows.positions[index]
            cached_k, cached_v = (plane[index][:, places] for plane in self._planes[layer])
            choosing.compare(places, (k[index], v[index]), (cached_k, cached_v))
        for plane, fresh in zip(self._planes[layer], (k, v), strict=True):
            places = rows.positions[:, None, :, None].expand(-1, fresh.shape[1], -1, fresh.shape[3])
            plane.scatter_(2, places, fresh)
        return q

    def _attend(self, layer: int, rows: _Rows, q: torch.Tensor) -> torch.Tensor:
        """Return the result of the rows' attention, [contexts, heads, rows, dim]."""
        k, v = self._planes[layer]
        count, kv_heads, length, _ = k.shape
        group = q.shape[1] // kv_heads
        seen = rows.positions[..., None] >= torch.arange(length)
        key, value = (plane.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for plane in (k, v))
        return scaled_dot_product_attention(
            q.reshape(count * kv_heads, group, *q.shape[2:]), key, value,
            attn_mask=seen.repeat_interleave(kv_heads, 0)[:, None], scale=self._runner.scale,
        ).view(count, -1, q.shape[2], v.shape[3])  # fmt: skip

    def _finish(self, layer: int, rows: _Rows, seen: torch.Tensor) -> _Rows:
        flat = self._runner.finish(layer, rows.hidden.flatten(0, 1), seen.transpose(0, 1).flatten(1, 2))
        return replace(rows, hidden=flat.view(rows.hidden.shape))

    def _embedded(self, positions: torch.Tensor) -> _Rows:
        tokens = self._tokens.gather(1, positions)
        return _Rows(positions, self._runner.embed(tokens.flatten()).view(*tokens.shape, -1))

    def _look_ahead(self, rows: _Rows) -> _Rows:
        """Run the suffix over all reused rows, and pass its attention to new ``Choosing`` objects. Return the suffix's
        rows as they enter ``setting.first_layer``."""
        resumed, logs, peaks = rows, torch.zeros(self._tokens.shape), torch.zeros(self._tokens.shape)
        for layer in range(self._layer_count):
            if layer == self._setting.first_layer:
                resumed = rows
            q = self._enter(layer, rows, compares=False)
            by_head = self._mass(layer, rows, q)
            given, peaks = by_head.sum(1), torch.maximum(peaks, by_head.amax(1))
            logs += (given + LEAST_MASS * given.mean(1, keepdim=True)).clamp_min(torch.finfo(given.dtype).tiny).log()
            rows = self._finish(layer, rows, self._attend(layer, rows, q))
        of_all = peaks if self._setting.selector == "suffix_peak" else (logs / self._layer_count).exp()
        attention = of_all.gather(1, self._context)
        self._choosing = [Choosing(self._setting, self._split, self._layer_count, each) for each in attention]
        return resumed

    def _mass(self, layer: int, rows: _Rows, q: torch.Tensor) -> torch.Tensor:
        """Return the attention that each token gets, summed over the rows: [contexts, heads, tokens]."""
        k = self._planes[layer][0]
        query = q.reshape(q.shape[0], k.shape[1], -1, *q.shape[2:]) * self._runner.scale
        scores = torch.einsum("bghrd,bgtd->bghrt", query, k)
        blind = rows.positions[:, None, None, :, None] < torch.arange(k.shape[2])
        return scores.masked_fill_(blind, -torch.inf).softmax(-1).sum(3).flatten(1, 2)
