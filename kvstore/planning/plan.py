"""Plans: what is reused of a prompt, from where, and what is computed again. Values that say why."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.planning.loading import LoadPlan
from kvstore.planning.permit import Permit
from kvstore.planning.setting import Recompute
from kvstore.spec import ModelSpec


@dataclass(frozen=True)
class StoredCache:
    """A cache of the prompt's tokens ``token_start`` to ``token_stop``: a segment's, which was computed alone or behind
    a preamble (``is_standalone``), or the prompt's own beginning. ``sender``: the sibling it is of, None: the model's
    own. ``stood_at``: the position that a segment's first token was computed at."""

    token_start: int
    token_stop: int
    is_standalone: bool = False
    sender: ModelSpec | None = None
    stood_at: int = 0


@dataclass(frozen=True)
class PlannedRun:
    """Tokens that are fetched out of a ``cache``. ``layers``: those whose KV is fetched. ``hidden_layer``: the one
    whose E is fetched before them, because the tokens are computed from there; None: no E is fetched, or it comes as a
    layer does, where a spec keeps E in the place of KV."""

    token_start: int
    token_count: int
    layers: tuple[int, ...]
    cache: StoredCache
    hidden_layer: int | None = None

    @property
    def token_stop(self) -> int:
        return self.token_start + self.token_count

    @property
    def sender(self) -> ModelSpec | None:
        return self.cache.sender

    @property
    def is_standalone(self) -> bool:
        return self.cache.is_standalone

    @property
    def is_exact(self) -> bool:
        """True when the model itself computes exactly this here, so that no token of it is computed again."""
        return is_exact(self.cache)

    @property
    def rows(self) -> range:
        """The tokens of the cache that the run takes."""
        return range(self.token_start - self.cache.token_start, self.token_stop - self.cache.token_start)

    @property
    def rotated_from(self) -> int:
        """The position that K of its first token was rotated for."""
        return self.cache.stood_at + self.rows.start if self.is_standalone else self.token_start


@dataclass(frozen=True)
class Plan:
    """The plan for a prompt: which stored tokens it reuses. Tokens of no run are computed. ``recompute``: the setting
    of runs that are not exact, None when there are none. ``reason``: why less is reused than was asked for; empty when
    it is not. ``permits``: by which runs behind the exact prefix are reused; none when the caller gave the setting.
    ``loading``: what the client's planner says of the exact prefix; None: it was not asked."""

    token_count: int
    runs: tuple[PlannedRun, ...] = ()
    recompute: Recompute | None = None
    reason: str = ""
    permits: tuple[Permit, ...] = ()
    loading: LoadPlan | None = None

    @property
    def reused_token_count(self) -> int:
        return sum(run.token_count for run in self.runs)

    @property
    def front_token_count(self) -> int:
        """Number of leading tokens that are computed while the tokens behind them load."""
        first = self.runs[0] if self.runs else None
        return first.token_start if first is not None and first.is_exact and not first.is_standalone else 0

    @property
    def hidden(self) -> tuple[tuple[StoredCache, int], ...]:
        """The E that is fetched by itself: of which cache, entering which layer."""
        wanted = [(run.cache, run.hidden_layer) for run in self.runs if run.hidden_layer is not None]
        return tuple(dict.fromkeys(wanted))

    def __str__(self) -> str:
        parts = [
            f"{run.token_count} tokens from {run.token_start} of {run.sender.model_id if run.sender else 'its own'}"
            for run in self.runs
        ]
        reused = ", ".join(parts) or "nothing"
        return f"reuse {reused}; {self.recompute or 'exact'}{'; ' + self.reason if self.reason else ''}"


def is_exact(cache: StoredCache) -> bool:
    """True when tokens of a cache equal what the model computes there: of its own prefix, and of its own segment where
    that begins the prompt, or follows the preamble that the prompt begins with, as it did when it was computed."""
    return cache.sender is None and (not cache.is_standalone or cache.token_start == cache.stood_at)
