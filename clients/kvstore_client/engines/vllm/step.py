"""The message of the scheduler's side to the workers' side, one per step. Travels between processes as plain data."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvstore.keys import Extra, Tokens
from kvstore.spec import ModelSpec
from kvstore_client.engines.vllm.documents import NamedDocuments
from kvstore_client.engines.vllm.groups import LayerGroup
from kvstore_client.prompt import PageHashes


@dataclass(frozen=True)
class Load:
    """Fetch the tokens ``start .. stop`` of a held prefix of ``token_count`` into a request's blocks, ``block_ids`` by
    group of layers. After ``give_up_s`` seconds the load is given up, and the tokens are computed; 0: no such limit."""

    request_id: str
    ticket: bytes
    token_count: int
    block_ids: list[list[int]]
    start: int
    stop: int
    give_up_s: float = 0.0

    def slots(self, place: int, group: LayerGroup) -> NDArray[np.int64]:
        """Return [token_count] slots of the group at that place; -1 for tokens that the request has, does not want, or
        has no block for."""
        slots = np.full(self.token_count, -1, np.int64)
        slots[: self.stop] = group.slots(self.block_ids[place], self.start, self.stop)
        return slots

    def written(self, place: int, group: LayerGroup) -> list[int]:
        """Return the blocks of that group that this load writes."""
        return self.block_ids[place][self.start // group.block_tokens : -(-self.stop // group.block_tokens)]


@dataclass(frozen=True)
class Save:
    """Keep a request's leading tokens, which this step completes, named by themselves or by vLLM's hashes.
    ``block_ids``: by group of layers, from the token ``start`` on; the chunks before it are stored already, or by
    another save. ``ticket``: the store that several ranks join; empty for one rank. ``new``: how many of its tokens,
    the last ones, no save or load of the request had before. ``preamble``: the tokens are that many, and behind them a
    document, which is kept by itself; None: they are a prefix."""

    spec: ModelSpec
    tokens: Tokens | PageHashes
    extras: tuple[Extra, ...]
    block_ids: list[list[int]]
    ticket: bytes = b""
    start: int = 0
    new: int = 0
    preamble: int | None = None

    def slots(self, place: int, group: LayerGroup) -> NDArray[np.int64]:
        """Return the slots of the tokens from ``start`` on, in the group at that place."""
        return group.slots(self.block_ids[place], 0, self.tokens.size - self.start)

    def reads(self, blocks: Set[int]) -> bool:
        """Return True when it reads one of these blocks."""
        return not all(blocks.isdisjoint(each) for each in self.block_ids)


@dataclass(frozen=True)
class Mend:
    """Compute a prompt over the stored caches of its documents, and write the tokens ``start .. stop`` into the
    request's blocks, of the one group that there is. ``reused_min``: with fewer reused tokens vLLM is faster."""

    request_id: str
    spec: ModelSpec
    tokens: Tokens
    documents: NamedDocuments
    extras: tuple[Extra, ...]
    block_ids: list[int]
    start: int
    stop: int
    reused_min: int


@dataclass(frozen=True)
class Mended:
    """A worker's report of a prompt that it computed over documents: how many of its tokens were ``reused``, how many
    ``computed``, reused ones that were mended by their share of a prefill, and the ``seconds`` that its step waited.
    """

    token_count: int
    reused: int
    computed: int
    seconds: float


@dataclass
class Step:
    """``settled``: blocks whose failed load the scheduler has noted; vLLM has computed them since. ``written``: blocks
    that this step may write and that a save of an earlier step may still read. ``number``: the step's, which the
    workers report with its results; 0: they report none."""

    loads: list[Load] = field(default_factory=list)
    mends: list[Mend] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    number: int = 0

    def anon_repr(self) -> str:
        """Return what vLLM writes to its log of a step that failed: names and counts, nothing of prompts or tickets."""
        loads = [(each.request_id, each.start, each.stop, each.block_ids) for each in self.loads]
        mends = [(each.request_id, each.start, each.stop, each.block_ids) for each in self.mends]
        saves = [(each.tokens.size, each.block_ids) for each in self.saves]
        return f"Step(number={self.number}, loads={loads}, mends={mends}, saves={saves}, written={self.written})"
