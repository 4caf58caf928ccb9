"""Two siblings' prefills, whole or in part, over caches that are kept."""

from __future__ import annotations

import torch
from kvstore_client import Client, Exactness, ModelSpec, Recompute
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, PartialPrefill, Recomputed, Run, recompute

from tests.recompute.models import LAYERS, model_of, sibling_of

STEP = 16

MODEL = model_of("qwen3", max_position_embeddings=1024)

RECEIVER = TransformersRunner(MODEL, chunk_tokens=STEP)

SENDER = TransformersRunner(sibling_of(MODEL, 3), chunk_tokens=STEP)

FULL = Recompute.full(LAYERS)

FUSED = Recompute(1, 1, 0.25, "product")

LOOKING = Recompute(0, -1, 0.2, "suffix_attention")


def computed(runner: TransformersRunner, tokens: torch.Tensor) -> Recomputed:
    return recompute(runner, tokens, [], FULL, hidden_layers=range(LAYERS))


def keep(client: Client, runner: TransformersRunner, tokens: torch.Tensor, *hidden: int) -> Recomputed:
    """Store what a runner computes of some tokens, with E of some layers."""
    made = computed(runner, tokens)
    client.store(runner.spec, tokens, made.kv, hidden={layer: made.hidden[layer] for layer in hidden}).wait(10.0)
    return made


def given(made: Recomputed, start: int, stop: int, hidden: int = 0, sender: ModelSpec | None = None) -> Run:
    """What was made, as a run in hand."""
    kv = [(k[:, start:stop], v[:, start:stop]) for k, v in made.kv]
    return Run(
        start, stop - start, GivenKV(kv, made.hidden[hidden][start:stop]), start, sender, is_exact=sender is None
    )  # fmt: skip


def same(found: Recomputed, expected: Recomputed) -> None:
    """To the bit."""
    assert torch.equal(found.logits, expected.logits)
    for ours, theirs in zip(found.kv, expected.kv, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert {layer: rows.tolist() for layer, rows in found.chosen.items()} == {
        layer: rows.tolist() for layer, rows in expected.chosen.items()
    }
    assert (found.exactness, found.share) == (expected.exactness, expected.share)


def in_full(found: PartialPrefill, tokens: torch.Tensor) -> None:
    same(found, computed(RECEIVER, tokens))
    assert found.exactness is Exactness.EXACT
    assert found.plan.runs == ()


def keep_alone(client: Client, runner: TransformersRunner, tokens: torch.Tensor, *hidden: int) -> Recomputed:
    made = computed(runner, tokens)
    client.store_segment(runner.spec, tokens, made.kv, hidden={layer: made.hidden[layer] for layer in hidden}).wait(10)
    return made


def alone(made: Recomputed, start: int, skip: int = 0, hidden: int = 0, sender: ModelSpec | None = None) -> Run:
    """A document that was computed alone, from its token ``skip`` on, as a run in hand at ``start``."""
    kv = [(k[:, skip:], v[:, skip:]) for k, v in made.kv]
    count = kv[0][0].shape[1]
    is_exact = start == 0 and sender is None
    return Run(start, count, GivenKV(kv, made.hidden[hidden][skip:]), skip, sender, is_exact)
