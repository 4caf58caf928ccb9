"""Plans: what is reused of a prompt, from where, and what is computed again. Values that say why."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.spec import ModelSpec
from kvstore_client.setting import Recompute


@dataclass(frozen=True)
class PlannedRun:
    """Tokens whose cache is fetched. ``layers``: those whose KV is; ``sender``: the sibling it is of, None: the model's
    own; ``is_standalone``: a segment's, computed alone; ``is_exact``: nothing of it is computed again."""

    token_start: int
    token_count: int
    layers: tuple[int, ...]
    sender: ModelSpec | None = None
    is_standalone: bool = False
    is_exact: bool = False


@dataclass(frozen=True)
class Plan:
    """What became of a call. Tokens of no run are computed. ``recompute``: the setting of runs that are not exact, None
    when there are none. ``reason``: why it is less than what was asked for; empty when it is that."""

    token_count: int
    runs: tuple[PlannedRun, ...] = ()
    recompute: Recompute | None = None
    reason: str = ""

    @property
    def reused_token_count(self) -> int:
        return sum(run.token_count for run in self.runs)

    def __str__(self) -> str:
        parts = [
            f"{run.token_count} tokens from {run.token_start} of {run.sender.model_id if run.sender else 'its own'}"
            for run in self.runs
        ]
        reused = ", ".join(parts) or "nothing"
        return f"reuse {reused}; {self.recompute or 'exact'}{'; ' + self.reason if self.reason else ''}"
