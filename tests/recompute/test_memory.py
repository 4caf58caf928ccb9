"""What a recompute holds at once: the merged cache, the activations of the rows that are computed, and one landing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kvstore_client.engines.transformers import TransformersRunner
from kvstore_client.recompute import GivenKV, Run, dense_planes, fused, recompute
from kvstore_client.recompute.rows import Rows
from kvstore_ops.bench.memory import allocated_bytes_max, allowed, merged_bytes

from kvstore.planning import Recompute
from tests.recompute.models import LAYERS, model_of, prompt

TOKENS, CONTEXT = 3000, 2960
MODEL = model_of(
    "llama", hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=1,
    max_position_embeddings=4096,
)  # fmt: skip
RUNNER = TransformersRunner(MODEL)
PROMPT = prompt(TOKENS, 1)


class Made(GivenKV):
    """A source that makes its E when it is asked, as a fetch would, and keeps none of it."""

    def hidden(self) -> torch.Tensor:
        return torch.zeros(CONTEXT, RUNNER.spec.hidden_size)


def held_bytes(setting: Recompute) -> int:
    """Without the merged cache, and without what is there before."""
    kv = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in dense_planes(RUNNER.spec, CONTEXT)]
    planes = dense_planes(RUNNER.spec, TOKENS)

    def once() -> object:
        return recompute(RUNNER, PROMPT, [Run(0, CONTEXT, Made(kv), rotated_from=7)], setting, kv=planes)

    once()  # tables and scratch that are kept
    return allocated_bytes_max(once)


def allowed_bytes(setting: Recompute) -> int:
    return allowed(MODEL, RUNNER.spec, TOKENS, CONTEXT, setting) - merged_bytes(RUNNER.spec, TOKENS)


SETTINGS = [
    Recompute.reuse(), Recompute.cacheblend(1, 0.15), Recompute.droidspeak(1, 2),
    Recompute(0, -1, 0.2, "suffix_attention"), Recompute.full(LAYERS),
]  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_no_setting_holds_more_than_it_may(setting: Recompute) -> None:
    assert held_bytes(setting) <= allowed_bytes(setting)


def landing_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Made, "hidden", lambda self: vars(self).setdefault("kept", torch.zeros(CONTEXT, 256)))


def rows_beside_the_old(patch: pytest.MonkeyPatch) -> None:
    attend = fused._Pass._attend

    def apart(self: Any, layer: int, rows: Rows, q: torch.Tensor) -> Rows:
        return attend(self, layer, Rows(rows.positions, rows.hidden.clone()), q)

    patch.setattr(fused._Pass, "_attend", apart)


@pytest.mark.parametrize("mutate", [landing_kept, rows_beside_the_old])
def test_what_is_held_twice_is_too_much(monkeypatch: pytest.MonkeyPatch, mutate: Any) -> None:
    setting = Recompute.droidspeak(1, 2)
    mutate(monkeypatch)
    assert held_bytes(setting) > allowed_bytes(setting)


def test_a_full_prefill_of_a_prompt_holds_more() -> None:
    """What the bound is worth: one pass of the model over all tokens."""
    setting = Recompute.cacheblend(1, 0.15)
    with torch.inference_mode():
        whole = allocated_bytes_max(lambda: MODEL(PROMPT[None], logits_to_keep=1))
    assert whole > held_bytes(setting) + merged_bytes(RUNNER.spec, TOKENS)
