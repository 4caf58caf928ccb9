"""Plans: which tokens of a prompt are reused, from which caches, and which are computed again. Plans are values, and
give their reasons."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.planning.loading import LoadPlan
from kvstore.planning.permit import Permit
from kvstore.planning.setting import Recompute
from kvstore.spec import ModelSpec


@dataclass(frozen=True)
class StoredCache:
    """A cache of the prompt's tokens ``token_start`` to ``token_stop``: of a segment that was computed alone or behind
    a preamble (``is_standalone``), or of the prompt's beginning. ``sender``: the sibling that computed it; None: the
    model itself. ``stood_at``: the position at which a segment's first token was computed."""

    token_start: int
    token_stop: int
    is_standalone: bool = False
    sender: ModelSpec | None = None
    stood_at: int = 0


@dataclass(frozen=True)
class PlannedRun:
    """Tokens that are fetched from a ``cache``. ``layers``: the layers whose KV is fetched. ``hidden_layer``: the layer
    whose E is fetched first, because the tokens are computed from that layer on. None: no E is fetched, or the spec
    keeps E in the place of KV and E is fetched among ``layers``."""

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
        """True when the model itself would compute the same here, so that no token is computed again."""
        return is_exact(self.cache)

    @property
    def rows(self) -> range:
        """The run's tokens, counted from the first token of the cache."""
        return range(self.token_start - self.cache.token_start, self.token_stop - self.cache.token_start)

    @property
    def rotated_from(self) -> int:
        """The position for which K of the run's first token was rotated."""
        return self.cache.stood_at + self.rows.start if self.is_standalone else self.token_start


@dataclass(frozen=True)
class Plan:
    """The plan of a prompt. Tokens outside all runs are computed. ``recompute``: the setting of runs that are not
    exact; None when there are none. ``reason``: why fewer tokens are reused than was asked for; empty otherwise.
    ``permits``: the permits of the runs behind the exact prefix; none when the caller gave the setting.
    ``loading``: the client's loading plan of the exact prefix; None: it made none."""

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
        """Number of tokens at the front that are computed while the run behind them loads."""
        first = self.runs[0] if self.runs else None
        return first.token_start if first is not None and first.is_exact and not first.is_standalone else 0

    @property
    def hidden(self) -> tuple[tuple[StoredCache, int], ...]:
        """The E that is fetched by itself: (cache, layer that it enters) pairs, each once."""
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
    """True when a cache equals the model's own prefill at that place: the cache of its own prefix, or of its own
    segment at the position where it was computed (at the prompt's start, or behind the same preamble)."""
    return cache.sender is None and (not cache.is_standalone or cache.token_start == cache.stood_at)
