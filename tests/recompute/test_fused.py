"""Fused recompute is the algorithm: equal to an independent dense implementation, layer by layer, row by row."""

from __future__ import annotations

import pytest
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import recompute

from kvstore.planning import Recompute
from kvstore.planning.setting import LOOK_AHEAD_SHARE
from kvstore.spec import Exactness
from tests.recompute.models import FAMILIES, LAYERS, model_of, prompt
from tests.recompute.scenes import Scene, check, documents, prefix

SETTINGS = [
    Recompute.reuse(),
    Recompute.full(LAYERS),
    Recompute.cacheblend(1, 0.3),
    Recompute.cacheblend(2, 0.2, metric="k"),
    Recompute.cacheblend(1, 0.2, metric="v"),
    Recompute.cacheblend(2, 0.25, selector="product"),
    Recompute(0, -1, 0.3, "suffix_attention"),
    Recompute(0, -1, 0.3, "suffix_peak"),
    Recompute(0, 0, 0.3, "first"),
    Recompute(0, 0, 0.25, gradual=0.4),  # more of them than a window of 9 lets deviate would be noise
    Recompute(0, 0, 0.3, "product", gradual=0.3),
    Recompute(0, 2, 0.5),
]
SIBLING = [
    Recompute.reuse(),
    Recompute.droidspeak(0, 1),
    Recompute.droidspeak(1, 2),
    Recompute.droidspeak(2, 3),
    Recompute(1, 1, 0.3),
    Recompute(1, 2, 0.2, "product"),
    Recompute(2, 1, 0.4, "suffix_attention"),
    Recompute(1, 1, 0.4, gradual=0.5),
    Recompute(1, 0, 1.0),
    Recompute(1, 0),
    Recompute(0, -1, 0.3),
]


def named(setting: Recompute) -> str:
    return f"{setting.first_layer}-{setting.last_layer}-{setting.ratio}-{setting.selector}-{setting.metric}"


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_at_other_positions(family: str) -> None:
    for setting in SETTINGS:
        check(documents(family), setting)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_siblings_documents_at_other_positions(family: str) -> None:
    for setting in SIBLING:
        check(documents(family, sibling=True), setting)


@pytest.mark.parametrize("setting", [*SETTINGS, Recompute(1, 1, 0.3)], ids=named)
def test_behind_an_exact_prefix(setting: Recompute) -> None:
    """The prefix is never computed again, and never chosen."""
    found = check(prefix("qwen3-windows-yarn"), setting)
    assert all(int(rows[0]) >= 16 for rows in found.chosen.values())


def full(scene: Scene) -> torch.Tensor:
    alone = recompute(
        scene.runner, scene.tokens, [], Recompute.full(LAYERS), logit_count=scene.suffix_count, hidden_layers=()
    )
    return alone.logits


@pytest.mark.parametrize("setting", [Recompute.full(LAYERS), Recompute(0, 0, 1.0), Recompute(0, -1, 1.0)], ids=named)
def test_all_of_it_again_is_a_full_prefill(setting: Recompute) -> None:
    scene = documents("qwen2-windows", sibling=True)
    found = check(scene, setting)
    assert torch.allclose(found.logits, full(scene), atol=1e-4)
    assert (found.exactness, found.share) == (Exactness.EXACT, 1.0)


def test_the_share_of_compute_is_the_papers_formula() -> None:
    scene = documents("llama")  # 43 tokens of context, of 4 layers
    for setting, share in [
        (Recompute.reuse(), 0.0),
        (Recompute.cacheblend(1, 13 / 43), (1 + 3 * 13 / 43) / 4),
        (Recompute(0, 2, 1 / 43), (3 + 1 / 43) / 4),
        (Recompute(0, -1, 2 / 43, "suffix_attention"), 2 / 43 + LOOK_AHEAD_SHARE),
    ]:
        found = check(scene, setting)
        assert found.share == pytest.approx(share)
        assert found.exactness is Exactness.DERIVED
    # of the exact prefix's 16 tokens nothing is computed: 26 of 42
    assert check(prefix("llama"), Recompute.droidspeak(0, 1)).share == pytest.approx(0.5 * 26 / 42)


def test_a_random_choice_is_reproducible_and_of_its_seed() -> None:
    scene = documents("llama")
    chosen = [
        recompute(
            scene.runner, scene.tokens, scene.runs(0), Recompute(0, 0, 0.3, "random", seed=seed)
        ).chosen[1].tolist()
        for seed in (1, 1, 2)
    ]  # fmt: skip
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(chosen[0]) == 13


def test_an_exact_prefix_alone_is_exact_and_the_same_numbers() -> None:
    """Reuse = the same computation over in-process KV: what was merged is what was given, to the bit."""
    runner, tokens = TransformersRunner(model_of("mistral-window")), prompt(40, 3)
    whole = recompute(runner, tokens, [], Recompute.full(LAYERS))
    scene = prefix("mistral-window")
    part = scene.parts[0]
    found = recompute(scene.runner, scene.tokens, scene.runs(0)[:1], Recompute.reuse())
    assert found.exactness is Exactness.EXACT
    for (k, v), (given_k, given_v) in zip(found.kv, part.made.kv, strict=True):
        assert torch.equal(k[:, :16], given_k)
        assert torch.equal(v[:, :16], given_v)
    alone = recompute(scene.runner, scene.tokens, [], Recompute.full(LAYERS))
    assert torch.allclose(found.logits, alone.logits, atol=1e-4)
    assert whole.exactness is Exactness.EXACT
