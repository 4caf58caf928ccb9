"""The speeds at which engines compute, from their reports of prefills."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.catalog import Catalog
from kvstore.controller.benefit import Served
from kvstore.planning.loading import ComputeRate, Operations, Prefill, Prefills
from kvstore.planning.loading.compute import TOKENS_MAX
from kvstore.planning.loading.kept import ENGINES_MAX, pack_prefills, unpack_prefills

FASTEST_OPERATIONS_S = 1e18
"""No engine does more operations in a second: a hundred of the fastest devices of today together."""


class EngineRate(NamedTuple):
    """The compute rate of one model in engines that compute ``step_tokens`` tokens at a time; 0: all at once."""

    fingerprint: bytes
    model_id: str
    step_tokens: int
    rate: ComputeRate


class Engines:
    """The engines' speeds of one tenant, those that computed last. Bounded. ``served`` counts by them what fetches
    save."""

    def __init__(self, catalog: Catalog, served: Served) -> None:
        self._catalog = catalog
        self._served = served
        self._seen: dict[tuple[bytes, int], Prefills] = {}
        self.is_changed = False
        """True when an engine told a prefill since ``pack`` was last called."""

    def computed(self, fingerprint: bytes, step_tokens: int, prefill: Prefill) -> None:
        """Take note of a prefill's time, as an engine measured it. Implausible times are ignored: those that no clock
        gives, and those in which no device can have done the model's operations; and those of a model that is not
        registered here, or is forgotten."""
        model = self._catalog.models.get(fingerprint)
        if model is None or step_tokens > TOKENS_MAX or not prefill.is_sound:
            return
        operations = Operations.of(model.spec)
        if prefill.seconds * FASTEST_OPERATIONS_S < operations.token * prefill.new_tokens:
            return
        key = fingerprint, step_tokens
        known = self._seen.pop(key, None)
        if known is None:
            known = Prefills(operations.pair_share)
        self._seen[key] = known.observed(prefill)
        if len(self._seen) > ENGINES_MAX:
            del self._seen[next(iter(self._seen))]
        self._served.learn(fingerprint, self._seen[key].rate)
        self.is_changed = True

    def pack(self) -> bytes:
        """Return the prefills as ``unpack`` reads them."""
        self.is_changed = False
        return pack_prefills(self._seen)

    def unpack(self, data: bytes) -> None:
        """Begin with the prefills that an earlier start packed. Raises InvalidRequest saying what is wrong with
        ``data``, and then begins with none."""
        self._seen = unpack_prefills(data)
        for (fingerprint, _), known in self._seen.items():
            self._served.learn(fingerprint, known.rate)

    def rate(self, fingerprint: bytes, step_tokens: int) -> ComputeRate:
        """Return the rate of a model at a step size; an unknown rate where no engine has told one."""
        known = self._seen.get((fingerprint, step_tokens))
        return known.rate if known is not None else ComputeRate()

    @property
    def rates(self) -> tuple[EngineRate, ...]:
        """All known rates; the last one is of the engine that computed last."""
        return tuple(
            EngineRate(name, self._catalog.models[name].spec.model_id, step_tokens, known.rate)
            for (name, step_tokens), known in self._seen.items()
            if known.rate.is_known and name in self._catalog.models
        )
