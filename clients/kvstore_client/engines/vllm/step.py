"""The message of the scheduler's side to the workers' side, one per step. Travels between processes as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.keys import Extra, Tokens
from kvstore.spec import ModelSpec
from kvstore_client.prompt import PageHashes


def slots_of(block_ids: list[int], block_tokens: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return [stop]: the slot of each of the first ``stop`` tokens; -1 before ``start``."""
    blocks = np.asarray(block_ids, np.int64)
    tokens = np.arange(stop, dtype=np.int64)
    slots = blocks[tokens // block_tokens] * block_tokens + tokens % block_tokens
    slots[:start] = -1
    return slots


@dataclass(frozen=True)
class Load:
    """Fetch the tokens ``start .. stop`` of a held prefix of ``token_count`` into a request's blocks. After
    ``give_up_s`` seconds the load is given up, and the tokens are computed; 0: no such limit."""

    request_id: str
    ticket: bytes
    token_count: int
    block_ids: list[int]
    start: int
    stop: int
    give_up_s: float = 0.0

    def slots(self, block_tokens: int) -> NDArray[np.int64]:
        """Return [token_count] slots; -1 for tokens that the request has or does not want."""
        slots = np.full(self.token_count, -1, np.int64)
        slots[: self.stop] = slots_of(self.block_ids, block_tokens, self.start, self.stop)
        return slots

    def written(self, block_tokens: int) -> list[int]:
        """Return the blocks that this load writes."""
        return self.block_ids[self.start // block_tokens : -(-self.stop // block_tokens)]


@dataclass(frozen=True)
class Save:
    """Keep a request's leading tokens, which this step completes, named by themselves or by vLLM's hashes. ``ticket``:
    the store that several ranks join; empty for one rank."""

    spec: ModelSpec
    tokens: Tokens | PageHashes
    extras: tuple[Extra, ...]
    block_ids: list[int]
    ticket: bytes = b""


@dataclass
class Step:
    """``settled``: blocks whose failed load the scheduler has noted; vLLM has computed them since. ``written``: blocks
    that this step may write and that a save of an earlier step may still read. ``number``: the step's, which the
    workers report with its results; 0: they report none."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    number: int = 0

    def anon_repr(self) -> str:
        """Return what vLLM writes to its log of a step that failed: names and counts, nothing of prompts or tickets."""
        loads = [(each.request_id, each.start, each.stop, each.block_ids) for each in self.loads]
        saves = [(each.tokens.size, each.block_ids) for each in self.saves]
        return f"Step(number={self.number}, loads={loads}, saves={saves}, written={self.written})"
