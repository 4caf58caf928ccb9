"""The account of one generation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from kvstore.planning import Plan
from kvstore.planning.loading import LoadPlan
from kvstore.spec import Durability, Exactness, MissReason, Tier
from kvstore_client.store.receipt import Receipt


@dataclass
class Report:
    """The account of a generation: the source and times of its first token. Seconds are of the monotonic clock."""

    token_count: int = 0
    reused_token_count: int = 0
    tier: Tier = Tier.NONE
    reason: MissReason = MissReason.NONE
    fetched_bytes: int = 0
    lookup_s: float = 0.0
    """From the call to the sidecar's answer, which says what is stored, and where."""
    fetch_s: float = 0.0
    """From that answer until the last layer had landed; overlaps with the prefill."""
    prefill_s: float = 0.0
    """From that answer to the first token."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    bypassed: str = ""
    """The reason why the cache was not used at all; empty when it was."""
    plan: LoadPlan | None = field(default=None, repr=False)
    """The loading plan for the prompt; None while planning is off."""
    deadline_s: float = math.inf
    """The deadline that the caller gave, in seconds from the call on."""
    exactness: Exactness = Exactness.EXACT
    """The exactness of the prompt's cache: DERIVED where documents were mended."""
    mended: Plan | None = field(default=None, repr=False)
    """The plan of documents that were reused, and why not more; None: the prompt has none, or none was asked for."""
    receipt: Receipt | None = field(default=None, repr=False)

    @property
    def is_in_time(self) -> bool:
        """True when the first token came within the deadline."""
        return self.ttft_s <= self.deadline_s

    @property
    def fetch_bytes_per_s(self) -> float:
        return self.fetched_bytes / self.fetch_s if self.fetch_s else 0.0

    def wait_stored(self, timeout_s: float | None = None) -> Durability:
        """Wait for the background store, and for its level; NONE when there was nothing to store or it failed. Raises
        as ``Receipt.wait``."""
        return self.receipt.wait(timeout_s) if self.receipt else Durability.NONE


@dataclass
class Generated:
    """The result of a generation: ``sequences``, as transformers' generate returns them (or its output object), and the
    report."""

    sequences: Any
    report: Report
