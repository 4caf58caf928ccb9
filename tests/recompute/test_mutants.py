"""The faults of known implementations, put in on purpose: the comparison with the reference catches each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvstore_client.recompute import choosing, fused
from kvstore_kernels import Metric, Rotation, attend, deviation_of, rotation

from kvstore.planning import Recompute
from tests.recompute.scenes import Scene, check, documents

BLEND = Recompute.cacheblend(1, 0.3)


def mask_bottom_right(patch: pytest.MonkeyPatch) -> None:
    """Rows are taken for the last ones, so that chosen tokens see the future."""

    def misaligned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *positions: torch.Tensor, **more: Any) -> Any:
        every = positions[1]
        return attend(q, k, v, every[len(every) - q.shape[1] :], every, **more)

    patch.setattr(fused, "attend", misaligned)


def suffix_unforced(patch: pytest.MonkeyPatch) -> None:
    """After the check layer only what was chosen is computed, and the last token."""
    stay = fused._Pass._stay

    def dropping(self: Any, layer: int) -> torch.Tensor:
        kept = stay(self, layer)
        kept[self._split.suffix[:-1]] = False
        return kept

    patch.setattr(fused._Pass, "_stay", dropping)


def not_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused, "_turn", lambda *_: None)


def moved_backwards(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fused, "rotation", lambda rotary, target, source: rotation(rotary, source, target))


def moved_as_if_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """By the new position instead of the difference to the old one."""
    patch.setattr(fused, "rotation", lambda rotary, target, source: rotation(rotary, target, source - source[0]))


def scaled_twice(patch: pytest.MonkeyPatch) -> None:
    """Yarn's scaling is in the cached key already."""

    def scaled(rotary: Any, target: torch.Tensor, source: torch.Tensor) -> Rotation:
        turn = rotation(rotary, target, source)
        return Rotation(turn.cos * rotary.scaling, turn.sin * rotary.scaling)

    patch.setattr(fused, "rotation", scaled)


def values_alone_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choosing, "deviation_of", lambda fresh, cached, _: deviation_of(fresh, cached, Metric.V))


def hidden_ignored(patch: pytest.MonkeyPatch) -> None:
    """A group in the middle starts from the embeddings instead of the sender's E."""
    patch.setattr(fused._Pass, "_receive", lambda _: [])


def first_tokens_for_the_highest(patch: pytest.MonkeyPatch) -> None:
    """Whatever the scores say."""
    patch.setattr(choosing, "highest", lambda scores, count, among: among[:count])


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], str, bool, Recompute]] = [
    (mask_bottom_right, "llama", False, BLEND),
    (suffix_unforced, "llama", False, BLEND),
    (not_moved, "llama", False, Recompute.reuse()),
    (moved_backwards, "llama-llama3", False, Recompute.reuse()),
    (moved_as_if_from_the_start, "llama", False, Recompute.reuse()),
    (scaled_twice, "llama-yarn", False, Recompute.reuse()),
    (values_alone_compared, "llama", False, BLEND),
    (hidden_ignored, "llama", True, Recompute.droidspeak(1, 2)),
    (first_tokens_for_the_highest, "llama", False, replace(BLEND, gradual=0.4)),
]


@pytest.mark.parametrize(
    ("mutate", "family", "sibling", "setting"), MUTANTS, ids=[each[0].__name__ for each in MUTANTS]
)
def test_a_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch,
    mutate: Callable[[pytest.MonkeyPatch], None],
    family: str,
    sibling: bool,
    setting: Recompute,
) -> None:
    scene: Scene = documents(family, sibling)
    check(scene, setting)
    mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(scene, setting)
