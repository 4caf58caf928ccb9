"""Facts: what is known of a prompt before anything is decided. Values; whoever gathers them does the I/O."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.planning.loading import LoadPlan
from kvstore.planning.permit import Permit
from kvstore.planning.plan import Plan, StoredCache
from kvstore.planning.setting import Recompute
from kvstore.spec import MissReason, ModelSpec


@dataclass(frozen=True)
class StoredSegment:
    """A document of the prompt, of which the first ``stored_token_count`` tokens are stored: computed alone, or behind
    the preamble that the prompt begins with. ``stood_at``: where its first token stood then."""

    token_start: int
    token_stop: int
    stored_token_count: int
    stood_at: int = 0

    @property
    def is_exact(self) -> bool:
        """True when it stands where it was computed: only that preamble comes before it."""
        return self.token_start == self.stood_at


@dataclass(frozen=True)
class Holding:
    """The parts of a prompt that are stored under one model: ``sender``, None: the receiver itself. ``permits``: what
    the profiles say, one per kind of reuse; empty when the caller gave the setting."""

    sender: ModelSpec | None = None
    prefix_token_count: int = 0
    segments: tuple[StoredSegment, ...] = ()
    permits: tuple[Permit, ...] = ()

    @property
    def is_refused(self) -> bool:
        """True when no profile allows any of it: then nobody needs to ask what is stored."""
        return bool(self.permits) and not any(permit.setting for permit in self.permits)

    def permit(self, reuse: str) -> Permit | None:
        return next((permit for permit in self.permits if permit.pair.reuse == reuse), None)


@dataclass(frozen=True)
class StoredE:
    """The number of leading tokens of a cache for which E of a layer is stored; ``reason``: why no more. Only a fetch
    tells."""

    cache: StoredCache
    layer: int
    token_count: int
    reason: MissReason = MissReason.NONE


@dataclass(frozen=True)
class Facts:
    """One prompt of ``token_count`` tokens. ``reusable_token_count``: those from there on are computed in any case, for
    their logits are wanted. ``setting``: the caller's, None: the permits decide. ``hidden``: what is known of E; where
    nothing is, it is taken to be there until a fetch says otherwise. ``loading``: by which ``own`` was cut to what is
    worth loading; None: it was not. ``load_start``: tokens of ``own`` before it are computed while the rest loads."""

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

    def hidden_of(self, cache: StoredCache, layer: int) -> StoredE | None:
        return next((each for each in self.hidden if (each.cache, each.layer) == (cache, layer)), None)

    def unknown(self, plan: Plan) -> tuple[tuple[StoredCache, int], ...]:
        """The E that a plan of these facts rests on, and of which they say nothing."""
        return tuple(each for each in plan.hidden if self.hidden_of(*each) is None)
