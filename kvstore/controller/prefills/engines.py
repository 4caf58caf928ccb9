"""Learns how fast engines compute, from the prefills that they report."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.catalog import Catalog
from kvstore.planning.loading import ComputeRate, Operations, Prefill, Prefills

ENGINES_MAX = 64
"""So many are remembered: those that computed last."""


class EngineRate(NamedTuple):
    """The compute rate of one model in engines that compute ``step_tokens`` at a time; 0: all at once."""

    fingerprint: bytes
    model_id: str
    step_tokens: int
    rate: ComputeRate


class Engines:
    """Of one tenant. Bounded; lost at a restart, and learned again with the first prefill."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._seen: dict[tuple[bytes, int], Prefills] = {}

    def computed(self, fingerprint: bytes, step_tokens: int, prefill: Prefill) -> None:
        """An engine took so long for a prefill. What no engine takes is left out."""
        key = fingerprint, step_tokens
        known = self._seen.pop(key, None)
        if known is None:
            known = Prefills(Operations.of(self._catalog.model(fingerprint).spec).pair_share)
        self._seen[key] = known.observed(prefill)
        if len(self._seen) > ENGINES_MAX:
            del self._seen[next(iter(self._seen))]

    def rate(self, fingerprint: bytes, step_tokens: int) -> ComputeRate:
        """Return the rate that was learned, or an unknown rate when no prefill was reported."""
        known = self._seen.get((fingerprint, step_tokens))
        return known.rate if known is not None else ComputeRate()

    @property
    def rates(self) -> tuple[EngineRate, ...]:
        """All that are known, the one that computed last as the last."""
        return tuple(
            EngineRate(name, self._catalog.model(name).spec.model_id, step_tokens, known.rate)
            for (name, step_tokens), known in self._seen.items()
            if known.rate.is_known and name in self._catalog.models
        )
