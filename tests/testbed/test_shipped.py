"""The shipped models: there, small enough, loadable as any checkpoint is, and right about the task."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kvstore_ops.testbed import calibration, contexts, full_prefill, load, shipped, store
from kvstore_ops.testbed.__main__ import app
from kvstore_ops.testbed.models import RECIPES
from kvstore_ops.testbed.net import Geometry, Net
from typer.testing import CliRunner

from kvstore.errors import InvalidRequest


def test_base_models_and_siblings_of_both_depths_are_shipped() -> None:
    assert {base + kind for base in ("l6-s2", "l12-s2") for kind in ("", "-plus3", "-plus11")} <= set(shipped())
    assert set(shipped()) <= set(RECIPES)


def test_all_weights_together_stay_under_their_limit() -> None:
    assert sum(file.stat().st_size for file in store.WEIGHTS.rglob("*")) <= store.WEIGHTS_BYTES_MAX


@torch.no_grad()
@pytest.mark.parametrize("name", shipped())
def test_a_shipped_model_answers(name: str) -> None:
    model, made = load(name)
    found = contexts(calibration(), 32)
    assert full_prefill(model, found, made.answers).accuracy > 0.9
    assert model.config.num_hidden_layers == made.layers
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    net = Net(Geometry(layers=made.layers))
    net.adopt(store.tensors(name))
    tokens = torch.from_numpy(found.tokens[:2])
    trained = net(tokens, torch.arange(tokens.numel())).view(*tokens.shape, -1)
    torch.testing.assert_close(trained, model(tokens).logits, rtol=1e-3, atol=1e-3)


def test_transformers_finds_the_model_by_its_directory() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(store.directory("l6-s2"), local_files_only=True)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.q_proj.bias.abs().max() > 0


def test_weights_that_are_not_here_say_how_to_make_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "WEIGHTS", tmp_path)
    with pytest.raises(InvalidRequest, match=r"python -m kvstore_ops\.testbed train l6-s2"):
        load("l6-s2")


def test_the_command_lists_models_and_measures_one() -> None:
    listed = CliRunner().invoke(app, ["list"])
    assert all(name in listed.stdout for name in RECIPES)
    measured = CliRunner().invoke(app, ["evaluate", "l6-s2", "--contexts", "8"])
    assert "on calibration seeds" in measured.stdout
