"""The result of a lookup."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

from kvstore.spec import ChunkState, Encoding, MissReason, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.lookup.presence import StateRun


class ChunkMatch(NamedTuple):
    """One chunk of the prompt: the tier that has it, or the reason for a miss."""

    token_start: int
    token_stop: int
    state: ChunkState
    tier: Tier
    encoding: Encoding
    reason: MissReason


_new: Callable[[type[ChunkMatch], tuple[Any, ...]], ChunkMatch] = tuple.__new__
"""As ``ChunkMatch._make``, which takes five times as long."""


class SegmentMatch(NamedTuple):
    """The stored part of one segment.

    ``standalone_token_count``: number of its first tokens with a cache that was computed for it alone (or behind the
    preamble); ``fetch_segment`` brings it, and it is not exact at another place. ``in_context_token_count``: number of
    its first tokens that belong to the prompt's own stored prefix, which is exact. ``chunks``: the standalone ones, by
    their places in the prompt.
    """

    token_start: int
    token_stop: int
    standalone_token_count: int
    in_context_token_count: int
    chunks: tuple[ChunkMatch, ...]

    @property
    def is_whole(self) -> bool:
        """True when all of it is stored as a segment."""
        return self.standalone_token_count == self.token_stop - self.token_start


@dataclass(frozen=True)
class Match:
    """The stored part of a prompt. ``chunks`` covers the prompt; the leading hits make the prefix. ``ticket``: with
    hold, the ticket by which other processes fetch the prefix; None when there is none. ``segments``: one per segment
    that was asked for. ``is_answered``: False when the sidecar is gone, so that nobody says what is stored."""

    prefix_token_count: int
    chunks: tuple[ChunkMatch, ...]
    ticket: bytes | None = None
    segments: tuple[SegmentMatch, ...] = ()
    is_answered: bool = True

    def __bool__(self) -> bool:
        return self.prefix_token_count > 0


def chunk_matches(runs: Iterable[pb.ChunkRun | StateRun], step: int, start: int, stop: int) -> tuple[ChunkMatch, ...]:
    """Expand runs of chunks of ``step`` tokens, for the tokens ``start .. stop``."""
    chunks: list[ChunkMatch] = []
    for run in runs:
        states = ChunkState(run.state), Tier(run.tier), Encoding(run.encoding), MissReason(run.reason)
        first = start + len(chunks) * step
        starts = range(first, first + run.count * step, step)
        stops = range(first + step, first + (run.count + 1) * step, step)
        chunks += map(_new, repeat(ChunkMatch), zip(starts, stops, *map(repeat, states), strict=False))
    if chunks and chunks[-1].token_stop > stop:
        chunks[-1] = chunks[-1]._replace(token_stop=stop)
    return tuple(chunks)


def unknown_chunks(step: int, start: int, stop: int) -> tuple[ChunkMatch, ...]:
    """Return the matches of the tokens ``start .. stop`` when no sidecar says what it has of them: all are misses."""
    gone = (ChunkState.MISS, Tier.NONE, Encoding.NONE, MissReason.UNAVAILABLE)
    return tuple(ChunkMatch(first, min(first + step, stop), *gone) for first in range(start, stop, step))


def stored_places(chunks: Iterable[ChunkMatch], token_stop: int) -> list[tuple[int, Tier]]:
    """Return, per leading chunk that is stored, its number of tokens before ``token_stop``, and the tier that has
    it."""
    found: list[tuple[int, Tier]] = []
    for chunk in chunks:
        stop = min(chunk.token_stop, token_stop)
        if stop <= chunk.token_start or chunk.state is not ChunkState.HIT:
            break
        found.append((stop - chunk.token_start, chunk.tier))
    return found
