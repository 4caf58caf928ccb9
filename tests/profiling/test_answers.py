"""Whole answers: what is said over a cache is what a model that goes on from it says."""

from __future__ import annotations

import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Run, recompute
from kvstore_ops.profiling.answers import agreement, greedy, said

from kvstore.planning import Recompute
from tests.recompute.models import LAYERS, model_of, prompt

RUNNER = TransformersRunner(model_of("llama"))
FULL = Recompute.full(LAYERS)


def test_the_answer_is_what_generate_says() -> None:
    tokens = prompt(40, 1)
    answer, logits = greedy(RUNNER, tokens, 6)
    mask = torch.ones(1, 40, dtype=torch.int64)
    expected = RUNNER.model.generate(tokens[None], attention_mask=mask, max_new_tokens=6, do_sample=False)[0, 40:]
    assert answer.tolist() == expected.tolist() == logits.argmax(-1).tolist()
    assert (
        greedy(RUNNER, tokens, 6, [int(answer[1])])[0].tolist()
        == answer.tolist()[: answer.tolist().index(answer[1]) + 1]
    )


def test_an_answer_over_its_own_cache_is_kept_and_over_a_strange_one_is_not() -> None:
    tokens = prompt(40, 2)
    answer, known = greedy(RUNNER, tokens, 6)
    lossless, share = said(RUNNER, tokens, answer, [], FULL)
    same = agreement(known, lossless, answer, share)
    assert (same.is_kept, same.tokens) == (True, 1.0)
    assert abs(same.kl) < 1e-5
    strange = recompute(RUNNER, prompt(30, 3), [], FULL).kv
    lossy, share = said(RUNNER, tokens, answer, [Run(0, 30, GivenKV(strange))], Recompute.reuse())
    other = agreement(known, lossy, answer, share)
    assert not other.is_kept
    assert other.tokens < 1.0
    assert other.kl > 0.01
    assert share == 0.0


def test_the_answer_does_not_choose_what_is_computed_again() -> None:
    """Other answers, the same first token: only the question looks for its sources."""
    tokens = prompt(40, 4)
    strange = recompute(RUNNER, prompt(30, 5), [], FULL).kv
    setting = Recompute(0, -1, 0.2, "suffix_attention")
    first = [
        said(RUNNER, tokens, torch.tensor(answer), [Run(0, 30, GivenKV(strange))], setting)[0][0]
        for answer in ([1, 2, 3], [9, 8, 7], [5])
    ]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
