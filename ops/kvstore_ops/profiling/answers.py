"""Whole answers: a model's answer over a reused cache, compared with its answer after its own full prefill.

Only the question chooses the tokens to compute again. The answer's tokens follow one by one over the merged cache, as
they do in use. As part of the suffix, their attention would select the tokens that they were taken from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kvstore_client.recompute import GivenKV, Recomputed, Run, recompute

from kvstore.planning import Recompute


@dataclass(frozen=True)
class Agreement:
    """One answer over a cache, compared with the full prefill's. ``is_kept``: every token is the same. ``tokens``: the
    share of tokens that are the same. ``kl``: the mean divergence of the full prefill's distributions from this
    answer's, in nats."""

    is_kept: bool
    tokens: float
    kl: float
    share: float = 1.0


def said(runner: Any, tokens: torch.Tensor, answer: torch.Tensor, runs: Sequence[Run], setting: Recompute) -> Any:
    """Return the logits [answer tokens, vocab_size] for each token of the answer, given the tokens before it, and f."""
    return said_after(runner, tokens, answer, recompute(runner, tokens, runs, setting))


def said_after(runner: Any, tokens: torch.Tensor, answer: torch.Tensor, first: Recomputed) -> Any:
    """Return as ``said`` does, of a prompt that is computed already."""
    if len(answer) == 1:
        return first.logits, first.share
    longer = torch.cat((tokens, answer[:-1]))
    there = [Run(0, len(tokens), GivenKV(first.kv))]
    rest = recompute(runner, longer, there, Recompute.reuse(), logit_count=len(answer) - 1)
    return torch.cat((first.logits, rest.logits)), first.share


def greedy(
    runner: Any, tokens: torch.Tensor, count: int, last: Sequence[int] = (), runs: Sequence[Run] = ()
) -> tuple[torch.Tensor, Any]:
    """Return the greedy answer after a full prefill, and the logits of each of its tokens. It has at most ``count``
    tokens, and ends with the first token out of ``last``. ``runs``: what is known of the prefill already; exact."""
    done = recompute(runner, tokens, runs, Recompute.full(runner.spec.layer_count))
    logits = [done.logits]
    found = [int(done.logits[-1].argmax())]
    while len(found) < count and found[-1] not in last:
        longer = torch.cat((tokens, torch.tensor(found)))
        runs = [Run(0, done.kv[0][0].shape[1], GivenKV(done.kv))]
        done = recompute(runner, longer, runs, Recompute.reuse())
        logits.append(done.logits)
        found.append(int(done.logits[-1].argmax()))
    return torch.tensor(found), torch.cat(logits)


def agreement(full: torch.Tensor, lossy: torch.Tensor, answer: torch.Tensor, share: float) -> Agreement:
    """Compare two answers. Shapes: both logits [answer tokens, vocab_size]."""
    same = lossy.argmax(-1) == answer
    known, found = full.float().log_softmax(-1), lossy.float().log_softmax(-1)
    kl = (known.exp() * (known - found)).sum(-1).mean()
    return Agreement(bool(same.all()), float(same.float().mean()), max(0.0, float(kl)), share)
