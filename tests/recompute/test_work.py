"""What a recompute does and does not: which rows it computes, which layers it waits for and when, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Recomputed, Run, check_sender, recompute
from kvstore_kernels import Rotation

from kvstore.errors import InvalidRequest, Unavailable
from kvstore.planning import Recompute
from tests.recompute.models import LAYERS, model_of, prompt
from tests.recompute.scenes import computed, documents


class Watched:
    """A runner that notes (what, layer, rows)."""

    def __init__(self, runner: TransformersRunner, notes: list[tuple[str, int, int]]) -> None:
        self.spec, self.rotary, self.scale, self.device = runner.spec, runner.rotary, runner.scale, runner.device
        self._runner, self._notes = runner, notes

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._runner.embed(tokens)

    def project(self, layer: int, hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        self._notes.append(("project", layer, len(hidden)))
        return self._runner.project(layer, hidden, positions)

    def finish(self, layer: int, hidden: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        self._notes.append(("finish", layer, len(hidden)))
        return self._runner.finish(layer, hidden, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._runner.logits(hidden)


class Noted(GivenKV):
    """A source that notes when it is asked."""

    def __init__(self, source: Any, notes: list[tuple[str, int, int]]) -> None:
        self._source, self._notes = source, notes

    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        self._notes.append(("land", layer, k.shape[1]))
        self._source.land(layer, k, v, turn)

    def hidden(self) -> torch.Tensor:
        hidden: torch.Tensor = self._source.hidden()
        return hidden


def work(setting: Recompute, sibling: bool = False) -> list[tuple[str, int, int]]:
    notes: list[tuple[str, int, int]] = []
    scene = documents("llama", sibling)
    runs = [replace(run, source=Noted(run.source, notes)) for run in scene.runs(setting.first_layer)]
    recompute(Watched(scene.runner, notes), scene.tokens, runs, setting)
    return notes


def landing(layer: int) -> list[tuple[str, int, int]]:
    return [("land", layer, 20), ("land", layer, 23)]


def test_a_blend_carries_the_chosen_and_the_suffix_and_waits_only_for_what_it_needs() -> None:
    """43 of 55 tokens are context: all are computed in layer 0, whose cache is not loaded, and K and V of layer 1,
    which chooses 9."""
    assert work(Recompute.cacheblend(1, 0.2)) == [
        ("project", 0, 55), ("finish", 0, 55),
        *landing(1), ("project", 1, 55), ("finish", 1, 21),
        *landing(2), ("project", 2, 21), ("finish", 2, 21),
        *landing(3), ("project", 3, 21), ("finish", 3, 1),
    ]  # fmt: skip


def test_a_sibling_group_computes_the_suffix_around_it() -> None:
    assert work(Recompute.droidspeak(1, 2), sibling=True) == [
        *landing(0), ("project", 0, 12), ("finish", 0, 12),
        ("project", 1, 55), ("finish", 1, 55),
        ("project", 2, 55), ("finish", 2, 55),
        *landing(3), ("project", 3, 12), ("finish", 3, 1),
    ]  # fmt: skip


def test_asking_the_suffix_first_goes_on_where_the_group_begins() -> None:
    ahead = [note for layer in range(4) for note in (*landing(layer), ("project", layer, 12), ("finish", layer, 12))]
    assert work(Recompute(2, 1, 0.2, "product"), sibling=True) == [
        *ahead, ("project", 2, 55), ("finish", 2, 21), ("project", 3, 21), ("finish", 3, 1)
    ]  # fmt: skip


@pytest.mark.parametrize("first_layer", [0, 1])
def test_a_look_ahead_can_be_shared(first_layer: int) -> None:
    scene = documents("llama")
    first, setting = (Recompute(first_layer, first_layer - 1, ratio, "suffix_peak") for ratio in (0.2, 0.4))
    runs = scene.runs(first_layer)
    looked = recompute(scene.runner, scene.tokens, runs, first).attention
    alone, shared = (recompute(scene.runner, scene.tokens, runs, setting, attention=each) for each in (None, looked))
    tolerance = 1e-5 if first_layer else 0.0  # the look ahead adds up the attention of earlier layers in another order
    for one, other in ((alone.logits, shared.logits), *zip(_planes(alone), _planes(shared), strict=True)):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert alone.share == shared.share
    assert len(alone.timeline.layers) == 2 * LAYERS - first_layer
    assert len(shared.timeline.layers) == LAYERS  # nothing was looked at again
    with pytest.raises(InvalidRequest, match=r"attention is of \(3,\) tokens"):
        recompute(scene.runner, scene.tokens, runs, setting, attention=looked[:3])


def _planes(found: Recomputed) -> list[torch.Tensor]:
    return [plane for pair in found.kv for plane in pair]


def test_a_prompt_that_is_longer_than_a_step_is_computed_in_steps() -> None:
    notes: list[tuple[str, int, int]] = []
    runner = TransformersRunner(model_of("llama", max_position_embeddings=2048))
    recompute(Watched(runner, notes), prompt(1100, 1), [], Recompute.full(LAYERS))
    assert max(rows for _, _, rows in notes) == 512


class Gone(GivenKV):
    def land(self, layer: int, k: torch.Tensor, v: torch.Tensor, turn: Rotation | None) -> None:
        raise Unavailable("the sidecar is gone")


def test_a_run_that_does_not_come_is_an_error() -> None:
    scene = documents("llama")
    runs = [replace(run, source=Gone([])) for run in scene.runs(0)]
    with pytest.raises(Unavailable):
        recompute(scene.runner, scene.tokens, runs, Recompute.cacheblend(1, 0.2))


def test_runs_that_do_not_fit_are_refused() -> None:
    scene = documents("llama")
    first, second = scene.runs(0)
    bad = [
        ([second, first], "runs\\[1\\]"),
        ([first, replace(second, token_start=19)], "runs\\[1\\]"),
        ([first, replace(second, token_start=32)], "the last run must end before"),
        ([replace(first, is_exact=True)], "exact"),
        ([first, replace(second, is_exact=True)], "exact"),
        ([replace(first, rotated_from=-1)], "runs\\[0\\]"),
    ]
    for runs, match in bad:
        with pytest.raises(InvalidRequest, match=match):
            recompute(scene.runner, scene.tokens, runs, Recompute.reuse())
    with pytest.raises(InvalidRequest, match="logits"):
        recompute(scene.runner, scene.tokens, [first, second], Recompute.reuse(), logit_count=10)
    with pytest.raises(InvalidRequest, match="hidden"):
        recompute(scene.runner, scene.tokens, [first], Recompute.reuse(), hidden_layers=(1,))
    with pytest.raises(InvalidRequest, match=r"hidden_layers \[99\] must be layers in 0\.\."):
        recompute(scene.runner, scene.tokens, [], Recompute.reuse(), hidden_layers=(1, 99))
    with pytest.raises(InvalidRequest, match="tokens"):
        recompute(scene.runner, scene.tokens[None], [], Recompute.reuse())


def test_missing_hidden_states_and_layers_are_named() -> None:
    runner, tokens = TransformersRunner(model_of("llama")), prompt(12, 1)
    made = computed(runner, tokens[:8])
    with pytest.raises(InvalidRequest, match="hidden is missing"):
        recompute(runner, tokens, [Run(0, 8, GivenKV(made.kv))], Recompute.droidspeak(1, 1))
    with pytest.raises(InvalidRequest, match=r"kv\[3\]"):
        recompute(runner, tokens, [Run(0, 8, GivenKV([*made.kv[:3], None]))], Recompute.reuse())


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        ("llama", {"num_hidden_layers": 3}, "layer_count"),
        ("llama", {"hidden_size": 64, "head_dim": 8}, "hidden_size"),
        ("llama", {"vocab_size": 97}, "vocab_size"),
        ("llama", {"num_key_value_heads": 4}, "layers\\[0\\].kv_heads"),
        ("llama", {"head_dim": 16}, "layers\\[0\\].k_dim"),
        ("mistral-window", {"head_dim": 8}, "layers\\[0\\].kind"),
        ("llama-linear", {}, "rope.kind"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "rope.theta"),
        ("llama", {"dtype": torch.bfloat16}, "cache_dtype"),
    ],
)
def test_a_sender_of_another_architecture_is_named(family: str, change: dict[str, Any], field: str) -> None:
    receiver = TransformersRunner(model_of("llama"))
    sender = TransformersRunner(model_of(family, seed=1, **change))
    with pytest.raises(InvalidRequest, match=f"{field} "):
        check_sender(receiver.spec, sender.spec)
    made = computed(receiver, prompt(8, 1))
    with pytest.raises(InvalidRequest, match=f"{field} "):
        run = Run(0, 8, GivenKV(made.kv), sender=sender.spec)
        recompute(receiver, prompt(12, 1), [run], Recompute.reuse())
    check_sender(receiver.spec, TransformersRunner(model_of("llama", seed=2)).spec)
