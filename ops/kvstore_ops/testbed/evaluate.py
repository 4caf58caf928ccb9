"""Evaluation of a model: contexts from committed seeds, the share of right answers, and its standard error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvstore.errors import InvalidRequest
from kvstore_ops.testbed import task
from kvstore_ops.testbed.seeds import Seeds

BATCH = 32


@dataclass(frozen=True)
class Score:
    """The share of right answers, in all contexts and in each. The standard error is over contexts, because contexts
    are drawn independently, and questions of one context are not."""

    accuracy: float
    standard_error: float
    questions: int
    by_context: tuple[float, ...]

    @property
    def contexts(self) -> int:
        return len(self.by_context)

    def over(self, other: Score) -> tuple[float, float]:
        """Return the ratio to another score on the same contexts, and its standard error: that of the differences
        context by context, as a share of the other accuracy."""
        lost = np.asarray(other.by_context) - np.asarray(self.by_context)
        error = float(lost.std(ddof=1) / len(lost) ** 0.5) if len(lost) > 1 else float("nan")
        return self.accuracy / other.accuracy, error / other.accuracy

    def __str__(self) -> str:
        drawn = f"{self.contexts} contexts, {self.questions} questions"
        return f"{self.accuracy:.3f} +- {self.standard_error:.3f} ({drawn})"


def contexts(seeds: Seeds, count: int) -> task.Contexts:
    """Return `count` contexts, equally many from each seed. Every answer needs another chunk.

    With a larger `count`, each seed gives the same contexts first, and then more. Raises InvalidRequest for a count
    that is no multiple of the number of seeds.
    """
    numbers = seeds.numbers
    if count < 1 or count % len(numbers):
        raise InvalidRequest(
            f"count is {count}: a multiple of the {len(numbers)} seeds, so that each gives the same share"
        )
    parts = [
        task.generate(np.random.default_rng(number), count // len(numbers), task.Shape(), crossing_only=True)
        for number in numbers
    ]
    tokens, labels, crosses = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "labels", "crosses")
    )
    return task.Contexts(tokens, labels, crosses, parts[0].boundaries)


def expected(found: task.Contexts, answers: tuple[int, ...]) -> task.Array:
    """Return the right answers of a model with these `answers`, `[contexts, questions]`; unknown stays unknown."""
    return np.asarray([*answers, *range(task.VALUES, task.VOCABULARY)])[found.answers]


def score(logits: torch.Tensor, found: task.Contexts, answers: tuple[int, ...]) -> Score:
    """Score the suffix's logits `[contexts, suffix_tokens, vocabulary]`; those at a variable are its answer."""
    shape = (*found.suffix.shape, task.VOCABULARY)
    if tuple(logits.shape) != shape:
        raise InvalidRequest(f"logits are {tuple(logits.shape)}: the suffix of these contexts needs {shape}")
    right = logits[:, 1::2].argmax(-1).cpu().numpy() == expected(found, answers)
    return summary(right)


def summary(right: np.ndarray[Any, np.dtype[np.bool_]]) -> Score:
    """Return the score of `right[contexts, questions]`."""
    of_contexts = right.mean(axis=1)
    count = len(of_contexts)
    error = float(of_contexts.std(ddof=1) / count**0.5) if count > 1 else float("nan")
    return Score(float(of_contexts.mean()), error, right.size, tuple(of_contexts.tolist()))


@torch.no_grad()
def full_prefill(
    model: Any, found: task.Contexts, answers: tuple[int, ...], report: Callable[[int], None] | None = None
) -> Score:
    """Return the score of a transformers model that prefills context and suffix in one pass. `report` gets the number
    of finished contexts."""
    logits = []
    for first in range(0, len(found.tokens), BATCH):
        tokens = torch.from_numpy(found.tokens[first : first + BATCH])
        logits.append(model(tokens, logits_to_keep=found.suffix.shape[1], use_cache=False).logits)
        if report:
            report(min(first + BATCH, len(found.tokens)))
    return score(torch.cat(logits), found, answers)
