"""Subjects of a profiler: a model, caches for it, and calibration contexts with known answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from blake3 import blake3
from kvstore_client.gate.drift import misled

from kvstore.errors import InvalidRequest
from kvstore.planning import Calibration, Recompute
from kvstore.planning.permit import PROVENANCE
from kvstore.planning.profile import Origin
from kvstore.spec import ModelSpec
from kvstore_ops.testbed import Seeds, contexts, recipe, task
from kvstore_ops.testbed.evaluate import expected
from kvstore_ops.testbed.store import load
from kvstore_ops.testbed.trial import Reuse, Trial


@dataclass(frozen=True)
class Measured:
    """One setting, measured over some contexts. ``by_context``: the quality of each in 0..1. ``share``: f. ``misled``:
    the share of answers for which ``kvstore_client.gate.drift.misled`` holds. ``tokens`` and ``kl``: see ``Point``;
    None: not measured."""

    by_context: tuple[float, ...]
    share: float
    misled: float
    tokens: float | None = None
    kl: float | None = None

    def __add__(self, other: Measured) -> Measured:
        """Return the measurement over the contexts of both."""
        part = len(other.by_context) / (len(self.by_context) + len(other.by_context))

        def both(ours: float | None, theirs: float | None) -> float | None:
            return None if ours is None or theirs is None else ours * (1 - part) + theirs * part

        return Measured(
            self.by_context + other.by_context,
            self.share * (1 - part) + other.share * part,
            self.misled * (1 - part) + other.misled * part,
            both(self.tokens, other.tokens),
            both(self.kl, other.kl),
        )


class Subject(Protocol):
    """One (sender, receiver, reuse) with calibration contexts. Each implementation has its own measure of quality, in
    0..1.

    The search uses the first ``calibration.search_contexts`` contexts; the ``calibration.contexts`` behind them are for
    the figures. Measuring must be deterministic, so that a killed run can continue.
    """

    receiver: ModelSpec
    sender: ModelSpec | None
    reuse: str
    origin: Origin
    calibration: Calibration

    def full(self) -> Measured:
        """Measure a plain prefill on all contexts."""

    def measure(self, setting: Recompute, those: range, report: Callable[[int], None]) -> Measured:
        """Measure one setting on the contexts ``those``; ``report`` gets the number of finished contexts."""


class TestbedSubject:
    """A model of the testbed on calibration contexts: ``count`` for the figures, half as many others for the search.

    Raises: InvalidRequest for evaluation seeds, a count of contexts that is no multiple of the seeds, and models that
    are not shipped."""

    __test__ = False  # pytest must not take the class for tests because of its name

    def __init__(self, receiver: str, reuse: Reuse, sender: str | None, seeds: Seeds, count: int) -> None:
        each = len(seeds.to_choose_with().numbers)
        if count < each or count % each:
            raise InvalidRequest(f"contexts is {count}: a multiple of the {each} seeds")
        search = -(-count // (2 * each)) * each
        found = contexts(seeds, search + count)
        self._trial = Trial(receiver, found, reuse, sender)
        self._expected = expected(found, recipe(receiver).answers)
        self._full: torch.Tensor | None = None
        self.receiver = spec_of(receiver)
        self.sender = None if sender is None else spec_of(sender)
        self.reuse: str = reuse
        self.origin = PROVENANCE[reuse]
        digest = blake3(found.tokens.tobytes() + found.labels.tobytes()).hexdigest()
        self.calibration = Calibration(
            digest, seeds.numbers, count, found.answers[search:].size, search,
            found.tokens.shape[1], 1 if reuse == "sibling" else len(found.boundaries) - 1,
        )  # fmt: skip

    def full(self) -> Measured:
        return self._measured(self._full_logits(), range(len(self._expected)), 1.0)

    def measure(self, setting: Recompute, those: range, report: Callable[[int], None]) -> Measured:
        logits, share = self._trial.answers(setting, those, report)
        return self._measured(logits[:, 1::2], those, share)

    def _full_logits(self) -> torch.Tensor:
        if self._full is None:
            full, every = Recompute.full(self.receiver.layer_count), range(len(self._expected))
            self._full = self._trial.answers(full, every)[0][:, 1::2]
        return self._full

    def _measured(self, logits: torch.Tensor, those: range, share: float) -> Measured:
        right = logits.argmax(-1).numpy() == self._expected[those.start : those.stop]
        wrong = misled(self._full_logits()[those.start : those.stop], logits)
        return Measured(tuple(right.mean(axis=1).tolist()), share, float(wrong.float().mean()))


def spec_of(name: str) -> ModelSpec:
    """Return the spec of a shipped model, with the digest of its weights."""
    model, _ = load(name)
    return replace(ModelSpec.from_transformers(model.config, model, task.CHUNK_TOKENS), model_id=name)
