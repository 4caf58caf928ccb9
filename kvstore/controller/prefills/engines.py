"""The speeds at which engines compute, from their reports of prefills."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.catalog import Catalog
from kvstore.planning.loading import ComputeRate, Operations, Prefill, Prefills

ENGINES_MAX = 64
"""Pairs of model and step size that are remembered: those that computed last."""


class EngineRate(NamedTuple):
    """The compute rate of one model in engines that compute ``step_tokens`` tokens at a time; 0: all at once."""

    fingerprint: bytes
    model_id: str
    step_tokens: int
    rate: ComputeRate


class Engines:
    """The engines' speeds of one tenant. Bounded. They are lost at a restart, and learned again from new prefills."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen: dict[tuple[bytes, int], Prefills] = {}

    def computed(self, fingerprint: bytes, step_tokens: int, prefill: Prefill) -> None:
        """Take note of a prefill's time, as an engine measured it. Implausible times are ignored."""
        key = fingerprint, step_tokens
        known = self._seen.pop(key, None)
        if known is None:
            known = Prefills(Operations.of(self._catalog.model(fingerprint).spec).pair_share)
        self._seen[key] = known.observed(prefill)
        if len(self._seen) > ENGINES_MAX:
            del self._seen[next(iter(self._seen))]

    def rate(self, fingerprint: bytes, step_tokens: int) -> ComputeRate:
        """Return the rate of a model at a step size; an unknown rate where no engine has told one."""
        known = self._seen.get((fingerprint, step_tokens))
        return known.rate if known is not None else ComputeRate()

    @property
    def rates(self) -> tuple[EngineRate, ...]:
        """All known rates; the last one is of the engine that computed last."""
        return tuple(
            EngineRate(name, self._catalog.model(name).spec.model_id, step_tokens, known.rate)
            for (name, step_tokens), known in self._seen.items()
            if known.rate.is_known and name in self._catalog.models
        )
