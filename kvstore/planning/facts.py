"""Facts: the inputs of a plan. They are plain values: the caller does the I/O that gathers them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from kvstore.planning.loading import LoadPlan
from kvstore.planning.permit import Permit
from kvstore.planning.plan import Plan, StoredCache
from kvstore.planning.setting import Recompute
from kvstore.spec import MissReason, ModelSpec, Tier

Places: TypeAlias = tuple[tuple[int, Tier], ...]
"""The places of a cache's tokens: (token count, tier), in order."""


@dataclass(frozen=True)
class StoredSegment:
    """A document of the prompt whose first ``stored_token_count`` tokens are stored. They were computed alone, or
    behind the preamble that the prompt begins with. ``stood_at``: the position of the first token at that time.
    ``places``: the tiers of the stored tokens."""

    token_start: int
    token_stop: int
    stored_token_count: int
    stood_at: int = 0
    places: Places = ()

    @property
    def is_exact(self) -> bool:
        """True when the segment stands where it was computed: only that preamble, or nothing, comes before it."""
        return self.token_start == self.stood_at


@dataclass(frozen=True)
class Holding:
    """The stored tokens of a prompt under one model. ``sender``: that model; None: the receiver itself. ``permits``:
    the verdicts of the profiles, one per kind of reuse; empty when the caller gave the setting. ``places``: the tiers
    of the stored prefix."""

    sender: ModelSpec | None = None
    prefix_token_count: int = 0
    segments: tuple[StoredSegment, ...] = ()
    permits: tuple[Permit, ...] = ()
    places: Places = ()

    @property
    def is_refused(self) -> bool:
        """True when no profile allows any reuse of it: then no lookup is needed."""
        return bool(self.permits) and not any(permit.setting for permit in self.permits)

    def permit(self, reuse: str) -> Permit | None:
        return next((permit for permit in self.permits if permit.pair.reuse == reuse), None)


@dataclass(frozen=True)
class StoredE:
    """The number of leading tokens of a cache whose E of a layer is stored. ``reason``: why there are no more. Only a
    fetch tells."""

    cache: StoredCache
    layer: int
    token_count: int
    reason: MissReason = MissReason.NONE


@dataclass(frozen=True)
class Facts:
    """One prompt of ``token_count`` tokens. ``reusable_token_count``: tokens from there on are always computed, because
    their logits are wanted. ``setting``: the caller's; None: the permits decide. ``hidden``: the known extents of
    stored E; unknown E is assumed to be stored until a fetch shows that it is not. ``loading``: the loading plan that
    cut ``own`` to the tokens worth loading; None: there was none. ``load_start``: tokens of ``own`` before it are
    computed while the rest loads."""

    receiver: ModelSpec
    token_count: int
    reusable_token_count: int
    own: Holding = Holding()
    senders: tuple[Holding, ...] = ()
    setting: Recompute | None = None
    hidden: tuple[StoredE, ...] = ()
    is_unavailable: bool = False
    loading: LoadPlan | None = None
    load_start: int = 0

    @property
    def allows_lossy(self) -> bool:
        """True when tokens behind the exact prefix may be reused at all."""
        computes_all = self.setting is not None and self.setting.computes_all(self.receiver.layer_count)
        return not self.is_unavailable and not computes_all

    @cached_property
    def _extents(self) -> dict[tuple[StoredCache, int], StoredE]:
        return {(each.cache, each.layer): each for each in self.hidden}

    def hidden_of(self, cache: StoredCache, layer: int) -> StoredE | None:
        return self._extents.get((cache, layer))

    def unknown(self, plan: Plan) -> tuple[tuple[StoredCache, int], ...]:
        """Return the (cache, layer) of each E that a plan needs and that these facts say nothing about."""
        return tuple(each for each in plan.hidden if self.hidden_of(*each) is None)
