"""What a lookup found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.keys import ROOT_DIGEST
from kvstore.spec import ChunkState, Encoding, MissReason, ModelSpec, Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.prompt import Prompt


class ChunkMatch(NamedTuple):
    """One chunk of the prompt: where it is, or why not."""

    token_start: int
    token_stop: int
    state: ChunkState
    tier: Tier
    encoding: Encoding
    reason: MissReason


@dataclass(frozen=True)
class Match:
    """How much of a prompt is stored. ``chunks`` covers the prompt; the leading hits make the prefix. ``ticket``: with
    hold, what other processes fetch the prefix by; None when there is none."""

    prefix_token_count: int
    chunks: tuple[ChunkMatch, ...]
    ticket: bytes | None = None

    def __bool__(self) -> bool:
        return self.prefix_token_count > 0


def unavailable(spec: ModelSpec, token_count: int) -> Match:
    """The match of a prompt when nobody answers."""
    step = spec.chunk_tokens
    gone = (ChunkState.MISS, Tier.NONE, Encoding.NONE, MissReason.UNAVAILABLE)
    starts = range(0, token_count, step)
    return Match(0, tuple(ChunkMatch(start, min(start + step, token_count), *gone) for start in starts))


def matching_tail(
    prompt: Prompt, prefix: int, hits: int, tails: Sequence[pb.PartialTail]
) -> tuple[int, bytes] | None:  # fmt: skip
    """The longest stored partial chunk after the prefix that holds exactly our tokens: (token count, digest)."""
    parent = prompt.digests[hits - 1] if hits else ROOT_DIGEST
    best: tuple[int, bytes] | None = None
    for tail in tails:
        stop = prefix + tail.token_count
        if stop <= prompt.token_count and (best is None or tail.token_count > best[0]):
            if prompt.tail_digest(prefix, stop, parent) == tail.digest:
                best = (tail.token_count, tail.digest)
    return best
