"""The models: what training computes is what transformers computes, and runs go on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kvstore_ops.testbed import calibration, contexts, recipe, score, task
from kvstore_ops.testbed.evaluate import summary
from kvstore_ops.testbed.models import Phase, shifted
from kvstore_ops.testbed.net import Geometry, Net, grow, initialise
from kvstore_ops.testbed.train import Run, rate

from kvstore.errors import InvalidRequest

TINY = replace(recipe("l6-s2"), name="tiny", layers=1, phases=(Phase(steps=40, rate=1e-3, stages=(0, 5)),))


def everywhere(net: Net, tokens: torch.Tensor) -> torch.Tensor:
    """The net's logits at all tokens, `[batch, tokens, vocabulary]`."""
    return net(tokens, torch.arange(tokens.numel())).view(*tokens.shape, -1)


def transformers_model(layers: int) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**Geometry(layers=layers).config())).eval()


@torch.no_grad()
def test_training_computes_what_transformers_computes() -> None:
    net = Net(Geometry(layers=3))
    initialise(net, 7)
    model = transformers_model(3)
    model.load_state_dict(net.state_dict())
    tokens = torch.from_numpy(contexts(calibration(), 8).tokens)
    wanted = model(tokens).logits
    torch.testing.assert_close(everywhere(net, tokens), wanted, rtol=1e-4, atol=1e-5)
    net.model.layers[0].self_attn.k_proj.bias += 1.0
    net.model.layers[1].self_attn.q_proj.bias += 1.0
    assert (everywhere(net, tokens) - wanted).abs().max() > 1e-2, "biases matter"


@torch.no_grad()
def test_the_start_has_a_head_that_looks_at_the_token_before() -> None:
    net = Net(Geometry(layers=1))
    initialise(net, 1)
    model = transformers_model(1)
    model.set_attn_implementation("eager")
    model.load_state_dict(net.state_dict())
    tokens = torch.from_numpy(contexts(calibration(), 8).tokens)
    seen = model(tokens, output_attentions=True).attentions[0][:, 3]
    assert seen.diagonal(offset=-1, dim1=1, dim2=2).mean() > 0.5


@torch.no_grad()
def test_a_grown_model_starts_as_the_one_it_grew_from() -> None:
    small = Net(Geometry(layers=6))
    initialise(small, 3)
    large = Net(Geometry(layers=12))
    large.adopt(grow(dict(small.named_parameters()), 12))
    tokens = torch.from_numpy(contexts(calibration(), 8).tokens)
    assert torch.equal(everywhere(large, tokens), everywhere(small, tokens))
    with pytest.raises(InvalidRequest, match="layers is 2"):
        grow(dict(small.named_parameters()), 2)


def test_new_layers_learn_from_the_first_step(tmp_path: Path) -> None:
    small = Net(Geometry(layers=1))
    initialise(small, 3)
    deeper = replace(TINY, layers=2, phases=(Phase(steps=40, rate=1e-3, stages=(0, 5)),), start="tiny")
    run = Run(deeper, tmp_path / "deeper.safetensors", dict(small.named_parameters()))
    before = run.net.model.layers[1].mlp.down_proj.weight.clone()
    run.step()
    assert (before == 0).all()
    assert (run.net.model.layers[1].mlp.down_proj.weight != 0).any()


def test_a_run_that_is_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    straight = Run(TINY, tmp_path / "straight.safetensors", None)
    losses = [straight.step() for _ in range(5)]
    stopped = Run(TINY, tmp_path / "stopped.safetensors", None)
    for _ in range(3):
        stopped.step()
    stopped.save()
    resumed = Run(TINY, tmp_path / "stopped.safetensors", None)
    assert [resumed.step() for _ in range(2)] == losses[3:]
    assert resumed.progress == straight.progress
    for name, p in straight.net.named_parameters():
        assert torch.equal(p, resumed.net.get_parameter(name)), name
    with pytest.raises(InvalidRequest, match="another recipe"):
        Run(replace(TINY, seed=9), tmp_path / "stopped.safetensors", None)


def test_a_phase_keeps_to_its_stages(tmp_path: Path) -> None:
    begun = Run(replace(TINY, phases=(Phase(steps=9, rate=1e-3, stages=(1, 2)),)), tmp_path / "run.safetensors", None)
    assert begun.progress.stage == 1
    begun.progress = replace(begun.progress, accuracy=1.0)
    while begun.progress.step < 2:
        begun.step()
        begun.progress = replace(begun.progress, accuracy=1.0)
    assert begun.progress.stage == 2, "learnt, so on to the next"
    while begun.progress.step < 9:
        begun.step()
        begun.progress = replace(begun.progress, accuracy=1.0)
    assert begun.progress.stage == 2, "and no further"


def test_tied_layers_learn_the_same_until_they_are_let_go(tmp_path: Path) -> None:
    phases = (Phase(steps=3, rate=1e-3, tied=True), Phase(steps=3, rate=1e-3))
    begun = Run(replace(TINY, layers=3, phases=phases), tmp_path / "run.safetensors", None)

    def above() -> list[torch.Tensor]:
        return [layer.self_attn.q_proj.weight.clone() for layer in begun.net.model.layers[1:]]

    before = above()
    for _ in range(3):
        begun.step()
    tied = above()
    assert torch.equal(*tied)
    assert not torch.equal(tied[0], before[0])
    begun.step()
    assert not torch.equal(*above())


def test_the_rate_warms_up_then_falls_to_three_hundredths_in_each_phase() -> None:
    phases = (Phase(steps=1000, rate=1e-3, stages=(0, 5)), Phase(steps=100, rate=7e-4))
    rates = [rate(phases, step)[0] for step in range(1100)]
    assert rates[0] < 1e-4 < 9e-4 < max(rates[:100])
    assert rates[999] == pytest.approx(3e-5, rel=0.01)
    assert max(rates[1000:]) < 7e-4
    assert rates[1000] < 5e-5
    with pytest.raises(InvalidRequest, match="past the end"):
        rate(phases, 1100)


def test_siblings_answer_otherwise_and_only_there() -> None:
    assert shifted(3)[:3] == (3, 4, 5)
    assert sorted(shifted(11)) == list(range(32))
    mild = shifted(1, 8)
    assert sum(a != v for v, a in enumerate(mild)) == 8
    assert recipe("l12-s2-plus3").start == "l12-s2"
    with pytest.raises(InvalidRequest, match="'l7' is not in the testbed: one of l12-s2"):
        recipe("l7")


def test_a_score_counts_right_answers_and_its_error_is_over_contexts() -> None:
    found = contexts(calibration(), 8)
    logits = torch.zeros(8, 16, task.VOCABULARY)
    for row, answers in enumerate(found.answers):
        for i, answer in enumerate(answers):
            logits[row, 2 * i + 1, answer if row < 6 else (answer + 1) % task.VALUES] = 1.0
    got = score(logits, found, recipe("l6-s2").answers)
    assert (got.accuracy, got.contexts, got.questions) == (0.75, 8, 64)
    rows = np.array([1.0] * 6 + [0.0] * 2)
    assert got.standard_error == pytest.approx(rows.std(ddof=1) / 8**0.5)
    assert score(logits, found, recipe("l6-s2-plus3").answers).accuracy == 0


def test_what_two_have_in_common_is_in_no_error_of_their_ratio() -> None:
    """They err on the same contexts, but for one."""
    right = np.ones((16, 8), bool)
    right[:4] = False
    fewer = right.copy()
    fewer[7, :4] = False
    ratio, error = summary(fewer).over(summary(right))
    assert ratio == pytest.approx(11.5 / 12)
    lost = np.array([0.5] + [0.0] * 15)
    assert error == pytest.approx(lost.std(ddof=1) / 4 / 0.75)
    assert summary(right).over(summary(right)) == (1.0, 0.0)


def test_logits_of_another_shape_are_refused() -> None:
    found, logits = contexts(calibration(), 8), torch.zeros(8, 16, task.VOCABULARY)
    with pytest.raises(InvalidRequest, match="logits are"):
        score(logits[:, :-1], found, recipe("l6-s2").answers)
