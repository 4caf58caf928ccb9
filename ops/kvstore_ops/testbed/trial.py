"""Trials of reuse: the testbed's contexts, answered over caches that are not the model's own prefill of them.

Three kinds of reuse: "position" (the model's own cache of each chunk alone, computed from position 0 and moved to the
chunk's place), "sibling" (another model's cache of the same context), "both" (another model's, of each chunk alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from kvstore_client.engines.transformers_runner import TransformersRunner
from kvstore_client.recompute import GivenKV, Recomputed, Run, recompute
from kvstore_client.recompute.rows import Split

from kvstore.errors import InvalidRequest
from kvstore.planning import Recompute
from kvstore.spec import ModelSpec
from kvstore_ops.testbed import task
from kvstore_ops.testbed.evaluate import BATCH, Score, full_prefill, score
from kvstore_ops.testbed.store import load
from kvstore_ops.testbed.together import Planes, recompute_together

TOGETHER = 16
"""Number of contexts of one pass: more are no faster."""
Reuse = Literal["position", "sibling", "both"]


@dataclass(frozen=True)
class Outcome:
    """The score of a setting, and f, its share of a prefill's compute over the context."""

    score: Score
    share: float


@dataclass(frozen=True)
class _Given:
    """Caches of every context: per layer (K, V), each [contexts, kv_heads, tokens, dim], and per layer the hidden
    states entering it, [contexts, tokens, hidden]."""

    kv: list[tuple[torch.Tensor, torch.Tensor]]
    hidden: tuple[torch.Tensor, ...]


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: operations of models this small wait longer for a second thread than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Trial:
    """One model and one kind of reuse, over some contexts."""

    def __init__(self, receiver: str, found: task.Contexts, reuse: Reuse, sender: str | None = None) -> None:
        """Raises: InvalidRequest for a sibling's reuse without a sender, and names that are not shipped."""
        if (reuse == "position") != (sender is None):
            raise InvalidRequest(f"sender is {sender!r}: 'sibling' and 'both' take one, 'position' takes none")
        self.receiver = receiver
        self.reuse = reuse
        self.found = found
        self._model, self._recipe = load(receiver)
        self._runner = TransformersRunner(self._model, spec=spec_of(self._model, receiver))
        self.layer_count = self._runner.spec.layer_count
        source = self._model if sender is None else load(sender)[0]
        self._sender = None if sender is None else spec_of(source, sender)
        self._alone = reuse != "sibling"
        self._given = _caches(source, found, alone=self._alone)
        self._planes: dict[bool, Planes] = {}
        runs = list(self._runs(0, Recompute.reuse(), turned=True))
        self._split = Split.of(runs, found.tokens.shape[1], torch.device("cpu"))

    def full(self) -> Score:
        """Return the score of a full prefill, without any reuse."""
        return full_prefill(self._model, self.found, self._recipe.answers)

    def run(self, setting: Recompute, *, turned: bool = True) -> Outcome:
        """Answer every context with one setting. Not ``turned``: keys stay rotated for the positions at which they were
        computed, as in a cache that ignores positions."""
        logits, share = self.answers(setting, range(len(self.found.tokens)), turned=turned)
        return Outcome(score(logits, self.found, self._recipe.answers), share)

    def answers(
        self, setting: Recompute, those: range, report: Callable[[int], None] | None = None, *, turned: bool = True
    ) -> tuple[torch.Tensor, float]:
        """Return the logits of the suffixes of the contexts ``those``, [contexts, suffix tokens, vocab_size], and f.
        ``report`` gets the number of finished contexts."""
        logits, share = [], 0.0
        for start in range(those.start, those.stop, TOGETHER):
            part = slice(start, min(start + TOGETHER, those.stop))
            cached = [(k[part], v[part]) for k, v in self._merged(turned=turned)]
            tokens, hidden = torch.from_numpy(self.found.tokens[part]), self._given.hidden[setting.first_layer][part]
            found, share = recompute_together(self._runner, tokens, cached, hidden, self._split, setting)
            logits.append(found)
            if report:
                report(part.stop - those.start)
        return torch.cat(logits), share

    def one(self, index: int, setting: Recompute, *, turned: bool = True) -> Recomputed:
        """Answer one context by itself, as a client does."""
        tokens, runs = torch.from_numpy(self.found.tokens[index]), list(self._runs(index, setting, turned=turned))
        return recompute(self._runner, tokens, runs, setting, logit_count=self.found.suffix.shape[1])

    def _merged(self, *, turned: bool) -> Planes:
        """Return the caches, each at its place in the context: per layer (K, V), [contexts, kv_heads, tokens, dim]."""
        if turned not in self._planes:
            count, length = self.found.context.shape
            every = [self.one(index, Recompute.reuse(), turned=turned).kv for index in range(count)]
            found = self._planes[turned] = []
            for layer in range(self.layer_count):
                k, v = (torch.stack([kv[layer][which][:, :length] for kv in every]) for which in (0, 1))
                found.append((k, v))
        return self._planes[turned]

    def _runs(self, index: int, setting: Recompute, *, turned: bool) -> Iterator[Run]:
        bounds = self.found.boundaries
        for start, stop in pairwise(bounds):
            kv = [(k[index, :, start:stop], v[index, :, start:stop]) for k, v in self._given.kv]
            hidden = self._given.hidden[setting.first_layer][index, start:stop]
            rotated_from = 0 if self._alone and turned else start
            yield Run(start, stop - start, GivenKV(kv, hidden), rotated_from, self._sender)


def spec_of(model: Any, name: str) -> ModelSpec:
    """Return a spec. Its weights_digest is only the model's name, because nothing is stored under the spec."""
    found = ModelSpec.from_transformers(model.config, f"unverified:testbed-{name}", task.CHUNK_TOKENS)
    dtype = str(model.dtype).removeprefix("torch.")
    return replace(found, cache_dtype=dtype, hidden_dtype=dtype)


@torch.no_grad()
def _caches(model: Any, found: task.Contexts, *, alone: bool) -> _Given:
    """Compute the model's caches of the contexts. ``alone``: of each chunk by itself, from position 0."""
    context = torch.from_numpy(found.context.copy())
    size = task.CHUNK_TOKENS if alone else context.shape[1]
    pieces = context.reshape(-1, size)
    step = BATCH * (context.shape[1] // size)
    outs = [
        model(pieces[first : first + step], use_cache=True, output_hidden_states=True)
        for first in range(0, len(pieces), step)
    ]

    def whole(tensors: list[torch.Tensor]) -> torch.Tensor:
        """Join tensors [pieces, heads, tokens, dim] to one of [contexts, heads, context tokens, dim]."""
        joined = torch.cat(tensors)
        heads, dim = joined.shape[1], joined.shape[3]
        return joined.view(len(context), -1, heads, size, dim).transpose(1, 2).reshape(len(context), heads, -1, dim)

    layers = range(model.config.num_hidden_layers)
    kv = [
        (
            whole([out.past_key_values.layers[layer].keys for out in outs]),
            whole([out.past_key_values.layers[layer].values for out in outs]),
        )
        for layer in layers
    ]
    hidden = tuple(whole([out.hidden_states[layer][:, None] for out in outs])[:, 0] for layer in layers)
    return _Given(kv, hidden)
