"""What a profiler measures on: a model, somebody's caches for it, and calibration contexts with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from blake3 import blake3
from kvstore_client.recompute import recompute
from kvstore_client.recompute.drift import misled
from kvstore_client.recompute.profile import Calibration
from kvstore_client.setting import Recompute

from kvstore.spec import ModelSpec
from kvstore_ops.testbed import Seeds, contexts, recipe, task
from kvstore_ops.testbed.evaluate import expected
from kvstore_ops.testbed.store import load
from kvstore_ops.testbed.trial import Reuse, Trial


@dataclass(frozen=True)
class Measured:
    """One setting over all contexts. ``by_context``: each one's quality in 0..1; ``share``: f; ``misled``: the share
    of answers for which ``kvstore_client.recompute.drift.misled`` holds."""

    by_context: tuple[float, ...]
    share: float
    misled: float


class Subject(Protocol):
    """One (sender, receiver, reuse) with calibration contexts. A model and contexts of the user's own are another
    implementation of this: quality is whatever in 0..1 they score by.

    Measuring must be deterministic: a run that was killed goes on where it was.
    """

    receiver: ModelSpec
    sender: ModelSpec | None
    reuse: str
    calibration: Calibration

    def full(self) -> Measured:
        """A plain prefill."""

    def measure(self, setting: Recompute, report: Callable[[int], None]) -> Measured:
        """One setting; ``report`` gets how many contexts are done."""


class TestbedSubject:
    """A model of the testbed on calibration contexts. Raises: InvalidRequest for evaluation seeds, a count of contexts
    that is no multiple of the seeds, and models that are not shipped."""

    __test__ = False  # a subject, whatever its name begins with

    def __init__(self, receiver: str, reuse: Reuse, sender: str | None, seeds: Seeds, count: int) -> None:
        found = contexts(seeds.to_choose_with(), count)
        self._trial = _Trial(receiver, found, reuse, sender)
        self._expected = expected(found, recipe(receiver).answers)
        self._full: torch.Tensor | None = None
        self.receiver = spec_of(receiver)
        self.sender = None if sender is None else spec_of(sender)
        self.reuse: str = reuse
        digest = blake3(found.tokens.tobytes() + found.labels.tobytes()).hexdigest()
        self.calibration = Calibration(digest, seeds.numbers, count, int(found.answers.size))

    def full(self) -> Measured:
        return self._measured(self._full_logits(), 1.0)

    def measure(self, setting: Recompute, report: Callable[[int], None]) -> Measured:
        return self._measured(*self._trial.answers(setting, report))

    def _full_logits(self) -> torch.Tensor:
        if self._full is None:
            self._full = self._trial.answers(Recompute.full(self.receiver.layer_count), lambda _: None)[0]
        return self._full

    def _measured(self, logits: torch.Tensor, share: float) -> Measured:
        right = logits.argmax(-1).numpy() == self._expected
        wrong = misled(self._full_logits(), logits)
        return Measured(tuple(right.mean(axis=1).tolist()), share, float(wrong.float().mean()))


class _Trial(Trial):
    """A trial whose logits are wanted."""

    def answers(self, setting: Recompute, report: Callable[[int], None]) -> tuple[torch.Tensor, float]:
        """Logits where the answers stand, [contexts, questions, vocab_size], and the mean f."""
        logits, shares = [], []
        for index, tokens in enumerate(torch.from_numpy(self.found.tokens)):
            runs = list(self._runs(index, setting, turned=True))
            done = recompute(self._runner, tokens, runs, setting, logit_count=self.found.suffix.shape[1])
            logits.append(done.logits[1::2])
            shares.append(done.share)
            report(index + 1)
        return torch.stack(logits), sum(shares) / len(shares)


def spec_of(name: str) -> ModelSpec:
    """A shipped model's, with the digest of its weights."""
    model, _ = load(name)
    return replace(ModelSpec.from_transformers(model.config, model, task.CHUNK_TOKENS), model_id=name)
