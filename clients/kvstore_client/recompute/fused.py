"""Fused recompute: CacheBlend, DroidSpeak, exact reuse and full prefill are settings of one pass over the layers.

A layer's rows write their K and V into the merged cache and attend over all of it by absolute position. The set of rows
changes twice: at ``first_layer`` the context joins the suffix, from the embeddings or from E; at the check layer the
rows that are not chosen leave. Departures from the papers: every row that enters the check layer (a later one, with
gradual filtering) leaves its K and V there, since they are computed anyway. In the last layer only rows whose logits
are wanted go on from K and V, since nothing reads the results of the others.

Departure from the papers that ask the suffix: its attention's geometric mean over layers, not the sum, which one layer
with a sharp head decides. At the same ratio fewer answers are lost, in the testbed a quarter to a half fewer.

Sources: CacheBlend (EuroSys '25), DroidSpeak (NSDI '26); asking the suffix, ProphetKV and A3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from kvstore_kernels import Rotation, attend, attend_with_mass, rotation

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute
from kvstore.seams import Clock, SystemClock
from kvstore.spec import Exactness
from kvstore_client.arrays import settle_device
from kvstore_client.prompt import GivenTokens, checked_tokens
from kvstore_client.recompute.choosing import Choosing
from kvstore_client.recompute.merged import dense_planes
from kvstore_client.recompute.result import LayerTime, MergedKV, Recomputed, Timeline
from kvstore_client.recompute.rows import Rows, Split, drained, step_rows
from kvstore_client.recompute.runner import ModelRunner, check_runner
from kvstore_client.recompute.runs import Run, check_runs

LEAST_MASS = 1e-3
"""The attention of a token that a layer's suffix does not see, as a share of an even distribution: without it, one such
layer would make the token's geometric mean zero."""


@torch.inference_mode()
def recompute(
    runner: ModelRunner,
    tokens: GivenTokens,
    runs: Sequence[Run],
    setting: Recompute,
    *,
    logit_count: int = 1,
    hidden_layers: Sequence[int] = (),
    kv: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    clock: Clock | None = None,
    attention: torch.Tensor | None = None,
    before_layer: Callable[[], None] | None = None,
) -> Recomputed:
    """Compute the cache and the last logits of a prompt, some runs of which are stored.

    Shapes: ``tokens``: one run of whole numbers. ``runs``: in order; the pass waits for each run's layer when it needs
    that layer; tokens of no run are always computed. ``logit_count``: number of last tokens whose logits are wanted.
    ``hidden_layers``: layers whose E is returned as well, of a prompt without runs. ``kv``: memory to merge in, as
    ``dense_planes`` makes it, in which runs may already be landing. ``attention``: a result's, of the same tokens, runs
    and selector: the look ahead is not done again, and counts in f as if it were. ``before_layer``: called before each
    layer; what it raises ends the pass.
    Memory: the merged cache, the residual stream and queries of the rows that are carried, and what a layer needs
    inside for 512 of them (on a GPU, 4,096). Raises: InvalidRequest for arguments that do not fit, and when the
    model's weights change meanwhile; KVStoreError when a run does not come: discard the cache then.
    """
    given = checked_tokens(tokens, runner.spec.vocab_size)
    if not given.size:
        raise InvalidRequest("tokens must be one run of whole numbers, one or more")
    known = torch.from_numpy(given.astype("int64")).to(runner.device)
    setting.check(runner.spec.layer_count)
    check_runs(runs, len(known), runner.spec, logit_count)
    if hidden_layers and runs:
        raise InvalidRequest("hidden_layers: E of a prompt that is computed alone, without runs")
    if unknown := set(hidden_layers) - set(range(runner.spec.layer_count)):
        raise InvalidRequest(f"hidden_layers {sorted(unknown)} must be layers in 0..{runner.spec.layer_count - 1}")
    planes = kv or dense_planes(runner.spec, len(known), runner.device)
    check_runner(runner)
    done = _Pass(runner, known, runs, setting, planes, clock or SystemClock(), attention, before_layer)
    found = done.run(logit_count, tuple(hidden_layers))
    check_runner(runner)
    return found


class _Pass:
    """One prompt's pass through the layers."""

    def __init__(
        self,
        runner: ModelRunner,
        tokens: torch.Tensor,
        runs: Sequence[Run],
        setting: Recompute,
        planes: list[tuple[torch.Tensor, torch.Tensor]],
        clock: Clock,
        attention: torch.Tensor | None,
        before_layer: Callable[[], None] | None,
    ) -> None:
        self._runner, self._tokens, self._runs, self._setting, self._planes = runner, tokens, runs, setting, planes
        self._clock, self._before_layer = clock, before_layer
        self._layer_count = runner.spec.layer_count
        self._split = Split.of(runs, len(tokens), tokens.device)
        self._every = torch.arange(len(tokens), device=tokens.device)
        self._step = step_rows(tokens.device)
        self._counted: tuple[torch.Tensor | None, int] = (None, 0)
        self._loaded = frozenset(setting.loaded_layers(self._layer_count))
        self._landed: set[int] = set()
        self._turns = [_turn(runner, run, tokens.device) for run in runs]
        if attention is not None and attention.shape != self._split.context.shape:
            raise InvalidRequest(
                f"attention is of {tuple(attention.shape)} tokens, and {len(self._split.context)} of the reused tokens "
                "are not exact: give a result's attention with the tokens and runs that it is of"
            )
        self._attention = attention
        self._choosing = Choosing(setting, self._split, self._layer_count, attention)
        self._is_context = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
        self._is_context[self._split.context] = True
        self._times: list[LayerTime] = []
        self._carried = 0
        self._chosen: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}

    def run(self, logit_count: int, hidden_layers: Sequence[int]) -> Recomputed:
        started_s = self._clock.monotonic()
        first, rows = 0, self._embedded(self._split.suffix)
        ahead = self._setting.look_ahead_share(self._layer_count)
        if ahead and len(self._split.context) and self._attention is None:
            first, rows = self._look_ahead(rows)
        ahead *= len(self._split.context) * self._layer_count
        for layer in range(first, self._layer_count):
            if layer in hidden_layers:
                with torch.inference_mode(False):
                    self._hidden[layer] = rows.hidden.clone()  # the caller may write to it
            rows = self._layer(layer, rows, logit_count)
        logits = self._runner.logits(rows.hidden)
        with torch.inference_mode(False):
            logits = logits.clone()  # the caller may write to them
        settle_device([logits])  # the time is that of the work; and any stream may read the cache
        spared = all(run.is_exact for run in self._runs) or self._setting.computes_all(self._layer_count)
        covered = sum(run.token_count for run in self._runs) * self._layer_count
        exactness = Exactness.EXACT if spared else Exactness.DERIVED
        return Recomputed(
            kv=MergedKV(self._planes, exactness),
            logits=logits,
            exactness=exactness,
            share=min(1.0, (self._carried + ahead) / covered) if covered else 1.0,
            timeline=Timeline(self._clock.monotonic() - started_s, tuple(self._times)),
            chosen=self._chosen,
            hidden=self._hidden,
            attention=self._attention,
        )

    # ------------------------------------------------------------ one layer

    def _layer(self, layer: int, rows: Rows, logit_count: int) -> Rows:
        setting = self._setting
        if self._before_layer is not None:
            self._before_layer()
        before_s = self._clock.monotonic()
        received = self._receive() if layer == setting.first_layer else []
        self._land(layer)
        landed_s = self._clock.monotonic()
        if layer == setting.first_layer:
            rows = self._with_context(rows, received)
        if layer == setting.check_layer and not setting.ratio:
            rows = rows.kept(~self._is_context[rows.positions])
        chooses = self._choosing.at(layer) and bool(len(self._split.context))
        q = self._enter(layer, rows, compares=chooses and self._choosing.needs_deviation)
        entered, entered_s = self._of_context(rows) / len(rows), self._clock.monotonic()
        if chooses:
            mask = self._stay(layer)[rows.positions]
            rows, q = rows.kept(mask), q if bool(mask.all()) else q[:, mask]
        self._carried += self._of_context(rows)
        row_count, portion = len(rows), self._of_context(rows) / len(rows)
        if layer == self._layer_count - 1:
            rows, q = rows.last(logit_count), q[:, len(rows) - logit_count :]
        rows = self._attend(layer, rows, q)
        settle_device([rows.hidden])  # the times of a layer are those of its work, not of its launch
        left_s = self._clock.monotonic()
        context_s = (entered_s - landed_s) * entered + (left_s - entered_s) * portion
        suffix_s = left_s - landed_s - context_s
        self._times.append(LayerTime(layer, landed_s - before_s, context_s, suffix_s, row_count))
        return rows

    def _land(self, layer: int) -> None:
        """Wait for this layer of every run that loads it."""
        if layer in self._landed:
            return
        self._landed.add(layer)
        k, v = self._planes[layer]
        for run, turn in zip(self._runs, self._turns, strict=True):
            if run.is_exact or layer in self._loaded:
                place = slice(run.token_start, run.token_stop)
                run.source.land(layer, k[:, place], v[:, place], turn)

    def _enter(self, layer: int, rows: Rows, *, compares: bool) -> torch.Tensor:
        """Write K and V of the rows into the cache, step by step. Returns their queries, [heads, rows, dim]."""
        k, v = self._planes[layer]
        queries = None
        for step in rows.steps():
            places = rows.positions if len(rows) <= self._step else rows.positions[step]
            q, fresh_k, fresh_v = self._runner.project(layer, rows.hidden[step], places)
            if compares:
                self._choosing.compare(places, (fresh_k, fresh_v), (k[:, places], v[:, places]))
            k[:, places], v[:, places] = fresh_k, fresh_v
            if queries is None:
                queries = q.new_empty(q.shape[0], len(rows), q.shape[2])
            queries[:, step] = q
        assert queries is not None, "there are always rows: those whose logits are wanted"
        return queries

    def _stay(self, layer: int) -> torch.Tensor:
        """Choose the rows that go on beyond this layer: the chosen, and the suffix, always. Returns bool [tokens]."""
        stay = ~self._is_context
        self._chosen[layer] = self._choosing.choose(layer)
        stay[self._chosen[layer]] = True
        return stay

    def _attend(self, layer: int, rows: Rows, q: torch.Tensor) -> Rows:
        """Attend over everything merged, and run the rest of the layer, step by step, in place."""
        k, v = self._planes[layer]
        window = self._runner.spec.layers[layer].window
        for step in rows.steps():
            seen = attend(
                q[:, step], k, v, rows.positions[step], self._every, window=window, scale=self._runner.scale
            )  # fmt: skip
            rows.hidden[step] = self._runner.finish(layer, rows.hidden[step], seen)
        return rows

    # ------------------------------------------------------------ the rows

    def _embedded(self, positions: torch.Tensor) -> Rows:
        return Rows(positions, self._runner.embed(self._tokens[positions]))

    def _receive(self) -> list[torch.Tensor]:
        """Return E of the context, run by run, where the setting starts from it."""
        if not self._setting.needs_hidden or not len(self._split.context):
            return []
        return [run.source.hidden() for run in self._runs if not run.is_exact]

    def _with_context(self, rows: Rows, received: list[torch.Tensor]) -> Rows:
        """Return the rows joined by the context's, as these enter the first layer that computes them; the rows alone
        when no layer does."""
        context = self._split.context
        nothing = not self._setting.ratio and self._setting.last_layer < self._setting.first_layer
        if nothing or not len(context):
            return rows
        if received:
            return rows.joined(context, drained(received))
        return rows.joined(context, (self._embedded(part).hidden for part in torch.split(context, self._step)))

    def _look_ahead(self, rows: Rows) -> tuple[int, Rows]:
        """Pass the suffix over the reused cache. It measures the attention to each token: summed over heads, then the
        geometric mean over layers; or the most that any head gives it in any layer. Returns the layer to start from,
        and the suffix as it enters that layer: earlier layers stay as they are."""
        logs = torch.zeros(len(self._tokens), dtype=torch.float32, device=self._tokens.device)
        peaks, takes_peak = torch.zeros_like(logs), self._setting.selector == "suffix_peak"
        resumed = rows
        for layer in range(self._layer_count):
            if layer == self._setting.first_layer:
                resumed = rows
            before_s = self._clock.monotonic()
            self._land(layer)
            landed_s = self._clock.monotonic()
            q = self._enter(layer, rows, compares=False)
            seen, given = attend_with_mass(
                q, *self._planes[layer], rows.positions, self._every, suffix_rows=self._split.tail_count,
                window=self._runner.spec.layers[layer].window, scale=self._runner.scale, peak=takes_peak,
            )  # fmt: skip
            peaks = torch.maximum(peaks, given)
            logs += (given + LEAST_MASS * given.mean()).clamp_min(torch.finfo(given.dtype).tiny).log()
            rows = Rows(rows.positions, self._runner.finish(layer, rows.hidden, seen))
            settle_device([rows.hidden])
            suffix_s = self._clock.monotonic() - landed_s
            self._times.append(LayerTime(layer, landed_s - before_s, 0.0, suffix_s, len(rows)))
        attention = (peaks if takes_peak else (logs / self._layer_count).exp())[self._split.context]
        self._attention = attention
        self._choosing = Choosing(self._setting, self._split, self._layer_count, attention)
        return self._setting.first_layer, resumed

    def _of_context(self, rows: Rows) -> int:
        """Return how many rows belong to the context. They are counted once: on a GPU the count is waited for."""
        counted, count = self._counted
        if counted is not rows.positions:
            count = int(self._is_context[rows.positions].sum())
            self._counted = rows.positions, count
        return count


def _turn(runner: ModelRunner, run: Run, device: torch.device) -> Rotation | None:
    """Return the rotation of a run's keys from the positions they were rotated for to their own; None when these are
    the same."""
    if run.rotated_from == run.token_start:
        return None
    target = torch.arange(run.token_start, run.token_stop, device=device)
    return rotation(runner.rotary, target, target - run.token_start + run.rotated_from)
